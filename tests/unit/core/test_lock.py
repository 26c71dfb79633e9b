"""The file that says which run has a directory."""

from __future__ import annotations

import getpass
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from unipar.errors import ConfigError
from unipar.train import lock


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / lock.NAME


def touched_before(file: Path, age: float) -> None:
    then = time.time() - age
    os.utime(file, (then, then))


def left_by(file: Path, *, age: float = 0.0, **changes: Any) -> None:
    """A lock that nobody removes, last touched ``age`` seconds ago."""
    file.unlink(missing_ok=True)
    with lock.held(file.parent):
        values = json.loads(file.read_bytes())
    file.write_text(json.dumps({**values, **changes}))
    touched_before(file, age)


def taken(file: Path) -> bool:
    """Whether the directory can be had."""
    try:
        with lock.held(file.parent):
            assert json.loads(file.read_bytes())["pid"] == os.getpid()
    except ConfigError:
        with pytest.raises(ConfigError, match="is in use by"):
            lock.refuse_if_held(file.parent)
        return False
    assert list(file.parent.glob(f"{lock.NAME}*")) == []
    return True


def test_the_second_run_is_told_who_has_the_directory(tmp_path: Path, file: Path):
    """Under whatever name the directory goes."""
    other = tmp_path / "link"
    other.symlink_to(tmp_path)
    with lock.held(tmp_path, other), pytest.raises(ConfigError) as caught, lock.held(other):
        pass
    message = str(caught.value)
    who = f"{tmp_path} is in use by a run of {getpass.getuser()} on {socket.gethostname()}, "
    assert message.startswith(f"{who}process {os.getpid()}, since 20")
    assert "(last seen 0 s ago)" in message
    assert "another output_dir" in message
    assert "If it was killed" not in message
    assert taken(file)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_it_is_given_back_after_an_error(tmp_path: Path, file: Path, error: type[BaseException]):
    def run() -> None:
        with lock.held(tmp_path):
            assert file.exists()
            raise error

    with pytest.raises(error):
        run()
    assert not file.exists()


def test_of_two_directories_none_is_kept_where_one_is_held(tmp_path: Path):
    own, shared = tmp_path / "own", tmp_path / "shared"
    own.mkdir()
    shared.mkdir()
    refused = pytest.raises(ConfigError, match="shared is in use")
    with lock.held(shared), refused, lock.held(own, shared):
        pass
    assert list(own.iterdir()) == []


HOLD = """
import sys, time
from pathlib import Path
from unipar.train import lock
with lock.held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_what_was_killed_on_this_machine_is_seen_to_be_gone(
    tmp_path: Path, file: Path, caplog: pytest.LogCaptureFixture
):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert not taken(file)
        process.send_signal(signal.SIGKILL)
        # It is a zombie until its parent asks for it.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert file.exists()
        assert taken(file)
    assert f"took {tmp_path} over from a run of {getpass.getuser()}" in caplog.text
    assert f"process {process.pid}, since" in caplog.text


def test_another_process_that_got_the_number_is_not_taken_for_it(file: Path):
    left_by(file)
    assert not taken(file)
    left_by(file, started=1)
    assert taken(file)


@pytest.mark.parametrize("content", [None, "", "{", "[1]", "{}", '{"pid": "x", "attempts": 3}'])
def test_on_another_machine_it_lapses(file: Path, content: str | None):
    """So does what was cut off as it was written."""
    for age, free in ((0, False), (lock.LEASE - 30, False), (lock.LEASE + 1, True)):
        left_by(file, age=age, machine="another")
        if content is not None:
            file.write_text(content)
            touched_before(file, age)
        assert taken(file) == free


def test_when_it_lapses_is_said(tmp_path: Path, file: Path):
    left_by(file, age=100, machine="another", host="node7")
    with pytest.raises(ConfigError, match=r"on node7, .*100 s ago.* killed, .* free (199|200) s"):
        lock.refuse_if_held(tmp_path)


def test_an_earlier_attempt_at_the_same_job_is_over(file: Path, monkeypatch: pytest.MonkeyPatch):
    """Wherever it ran; but not one of another job, nor this attempt itself."""
    for name, count in lock._ATTEMPTS.items():
        monkeypatch.setenv(name, "17")
        monkeypatch.setenv(count, "1")
        key = f"{name}=17"
        for attempts, free in (({key: 0}, True), ({key: 1}, False), ({f"{name}=18": 0}, False)):
            left_by(file, machine="another", attempts=attempts)
            assert taken(file) == free
        monkeypatch.setenv(name, "none")
        left_by(file, machine="another", attempts={f"{name}=none": 0})
        assert not taken(file)
        monkeypatch.delenv(name)


def test_of_many_that_find_it_left_one_has_it(tmp_path: Path, file: Path):
    for _ in range(20):
        left_by(file, started=1)
        together, tried = threading.Barrier(6), threading.Barrier(6)
        won: list[bool] = []

        def attempt(together: Any = together, tried: Any = tried, won: Any = won) -> None:
            together.wait(10)
            try:
                with lock.held(tmp_path):
                    won.append(True)
                    tried.wait(10)
            except ConfigError:
                tried.wait(10)

        threads = [threading.Thread(target=attempt) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert won == [True]
        assert list(tmp_path.iterdir()) == []


def test_a_takeover_that_was_cut_off_does_not_last(tmp_path: Path, file: Path):
    left_by(file, started=1)
    guard = tmp_path / f"{lock.NAME}-takeover"
    guard.touch()
    touched_before(guard, 2 * lock.BEAT)
    assert taken(file)


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_run_keeps_it_fresh_and_notices_that_it_is_lost(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(lock, "BEAT", 0.01)
    with lock.held(tmp_path):
        os.utime(file, (0, 0))
        wait_for(lambda: file.stat().st_mtime > 0)
        file.write_text("{}")
        wait_for(lambda: "another run has taken it over" in caplog.text)
    assert file.read_text() == "{}"
    assert caplog.text.count("no longer holds") == 1
