"""The program that runs the suites: nothing is lost, mixed up, passed over or left behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[1] / "side_by_side.py"


def start(*commands: str, lanes: int = 2) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), "--lanes", str(lanes), *commands],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 30
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return path.read_text()


def test_outputs_are_whole_and_not_mixed() -> None:
    talk = "sh -c 'for i in 1 2 3; do echo {0}$i; echo {0}$i >&2; sleep 0.1; done'"
    run = start(*(talk.format(name) for name in "abc"))
    out, _ = run.communicate(timeout=60)
    assert run.returncode == 0, out
    for name in "abc":
        said = "".join(f"{name}{i}\n" * 2 for i in (1, 2, 3))
        assert f"{talk.format(name)}\n{said}" in out
    assert out.splitlines()[-1].startswith("==> all passed")


def test_a_table_says_what_each_has_taken(tmp_path: Path) -> None:
    busy, done = tmp_path / "busy.py", tmp_path / "done"
    busy.write_text(
        "import sys, time\nwhile time.process_time() < 0.95:\n    pass\nopen(sys.argv[1], 'w')\n"
    )
    # Of what a command has started, too, and of what it has not waited for.
    run = start(
        "idle=sleep 0.5",
        f"busy=sh -c '{sys.executable} {busy} {tmp_path}/other; true'",
        f"orphan=sh -c 'setsid {sys.executable} {busy} {done} & "
        f"while ! test -e {done}; do sleep 0.1; done'",
    )
    out, _ = run.communicate(timeout=60)
    assert run.returncode == 0, out
    rows = re.findall(r"^==> +(?:\d+ +)?(\d+)  (.+)$", out, re.MULTILINE)
    assert [name for _, name in rows] == ["idle", "busy", "orphan", "in all"], out
    assert [int(seconds) for seconds, _ in rows] == [0, 1, 1, 2]


def test_what_a_command_leaves_running_is_named_and_ended(
    tmp_path: Path, still_running: Callable[[Iterable[int]], list[int]]
) -> None:
    mark = tmp_path / "pid"
    run = start(f"sh -c 'setsid sleep 300 & echo $! > {mark}'")
    out, _ = run.communicate(timeout=60)
    assert run.returncode == 0, out
    assert "==> left running, and ended: sleep 300" in out
    assert still_running([int(mark.read_text())]) == []


def test_two_run_at_once(tmp_path: Path) -> None:
    meet = "sh -c 'touch {0}; while [ ! -e {1} ]; do sleep 0.05; done'"
    here, there = tmp_path / "here", tmp_path / "there"
    run = start(meet.format(here, there), meet.format(there, here))
    run.communicate(timeout=60)
    assert run.returncode == 0


def test_a_failure_fails_the_whole_and_ends_the_others(
    tmp_path: Path, still_running: Callable[[Iterable[int]], list[int]]
) -> None:
    mark = tmp_path / "pid"
    sleeper = f"sh -c 'echo $$ > {mark}; exec sleep 300'"
    failing = f"sh -c 'while [ ! -s {mark} ]; do sleep 0.05; done; echo it broke; exit 3'"
    run = start(sleeper, failing, "echo never", lanes=2)
    out, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    assert re.search(rf"failed \(3\) after \d+ s: {re.escape(failing)}\nit broke\n", out)
    assert re.search(rf"==> ended after \d+ s: {re.escape(sleeper)}", out)
    assert "echo never" not in out
    assert still_running([int(mark.read_text())]) == []


def test_an_interrupt_ends_everything(
    tmp_path: Path, still_running: Callable[[Iterable[int]], list[int]]
) -> None:
    mark = tmp_path / "pid"
    run = start(f"sh -c 'echo $$ > {mark}; echo partly; exec sleep 300'")
    pid = int(wait_for(mark))
    run.send_signal(signal.SIGINT)
    out, problem = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "partly" in out
    assert "Traceback" not in problem
    assert still_running([pid]) == []
