"""What is read from the directory of a run that another program has started."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from unipar.errors import ConfigError, DataError, Terminated, WorkerError
from unipar.launch.entry import REFUSED
from unipar.launch.failure import write_failure
from unipar.launchers import Task
from unipar.launchers.shared import SharedRun, Tail


def run_of(directory: Path, fn: Any = None) -> SharedRun:
    return SharedRun(
        Task(
            fn=fn or (lambda placement: placement.rank),
            devices=2,
            num_nodes=1,
            device_type="cpu",
            timeout=60.0,
            max_restarts=0,
            grace_period=25.0,
            save_signal=None,
            directory=directory,
        )
    )


def fail(run: SharedRun, rank: int, error: BaseException) -> None:
    try:
        raise error
    except BaseException as raised:
        write_failure(raised, run.attempt, rank)


def leave(run: SharedRun, *ranks: int, value: Any = None) -> None:
    for rank in ranks:
        run.attempt.returned(rank).touch()
    if 0 in ranks:
        run.files.result.write_bytes(cloudpickle.dumps(value))


def test_what_rank_0_returned(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    leave(run, 0, 1, value={"loss": 1.0})
    assert run.result("it ended") == {"loss": 1.0}


def test_the_cause_among_failures(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    fail(run, 0, RuntimeError("[/x/gloo/transport] Connection closed by peer"))
    fail(run, 1, ValueError("the cause"))
    with pytest.raises(WorkerError, match=r"(?s)Rank 1 of 2 failed .*ValueError: the cause") as got:
        run.result("it ended")
    assert got.value.rank == 1


def test_errors_of_ours_come_as_they_are(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    fail(run, 1, DataError("no samples"))
    with pytest.raises(DataError, match="no samples"):
        run.result("it ended")


def test_a_rank_that_says_nothing_is_to_blame_for_those_that_were_ended(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    fail(run, 0, Terminated(signal.SIGTERM))
    run.attempt.log(1).write_text("its last line\n")
    said = r"(?s)Rank 1 of 2 ended without a word: mpirun exited with status 9.*its last line"
    with pytest.raises(WorkerError, match=said):
        run.result("mpirun exited with status 9.")


def timed_out(run: SharedRun, rank: int) -> None:
    """A rank that asked the store whom it waited for."""
    try:
        try:
            raise RuntimeError("[/x/gloo/transport] Timed out waiting 2000ms for recv operation")
        except RuntimeError as error:
            raise WorkerError("rank 1 was last seen in step 6, on b", rank=1) from error
    except WorkerError as error:
        write_failure(error, run.attempt, rank)


def test_who_is_to_blame_as_a_rank_has_found_out(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    assert not run.has_failed()
    timed_out(run, 0)
    assert run.has_failed()
    # The host of rank 1 is frozen: its command has not ended.
    with pytest.raises(WorkerError, match=r"^rank 1 was last seen in step 6, on b$") as got:
        run.result("torchrun on a exited with status 1.", [0])
    assert got.value.rank == 1


def test_a_command_that_has_ended_says_more_of_its_ranks(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    timed_out(run, 0)
    said = "Rank 1 of 2 ended without a word: torchrun on b exited with status 137"
    with pytest.raises(WorkerError, match=said):
        run.result("torchrun on b exited with status 137.", [0, 1])


def test_a_rank_that_leaves_as_if_all_were_well_is_not_said_to_be_another(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    fail(run, 0, Terminated(signal.SIGTERM))
    said = (
        r"^Rank 1 of 2 ended without a word\. Of others is known: on a, rank 0 exited with status 1"
    )
    with pytest.raises(WorkerError, match=said):
        run.result("on a, rank 0 exited with status 1", [0])


def test_a_run_that_was_asked_to_end_has_no_culprit(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.interrupt(signal.SIGTERM)
    fail(run, 0, Terminated(signal.SIGTERM))
    with pytest.raises(Terminated):
        run.result("it ended")


def test_a_signal_to_all_ranks_is_no_failure(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    for rank in range(2):
        fail(run, rank, Terminated(signal.SIGTERM))
    with pytest.raises(Terminated):
        run.result("it ended")


def test_nobody_came(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"Ranks 0, 1 of 2 ended without a word: no such host"):
        run_of(tmp_path).result("no such host")


def test_a_function_that_cannot_travel(tmp_path: Path) -> None:
    file = (tmp_path / "open").open("w")
    with pytest.raises(ConfigError, match=r"cannot be sent what they need"):
        run_of(tmp_path, lambda placement: file)


def start(run: SharedRun) -> subprocess.CompletedProcess[str]:
    return subprocess.run(run.command, capture_output=True, text=True, timeout=60)


def test_other_versions_are_refused_on_the_machine_that_has_them(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    text = run.files.start.read_text()
    run.files.start.write_text(text.replace('"torch": "', '"torch": "9'))
    ended = start(run)
    assert ended.returncode == 1
    assert "torch 2" in ended.stderr
    assert ", not 92" in ended.stderr


def test_a_directory_that_is_not_shared(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.files.start.unlink()
    ended = start(run)
    assert "is not there on" in ended.stderr
    assert "set output_dir to such a place" in ended.stderr


def test_a_text_is_read_as_it_grows(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    assert tail.read() == ""
    tail.path.write_bytes("grö".encode()[:-1])
    assert tail.read() == "gr"
    with tail.path.open("ab") as file:
        file.write("grö".encode()[-1:] + b"n\n")
    assert tail.read() == "ön\n"
    assert tail.read() == ""


def test_what_a_rank_has_noted_and_dealt_with_is_no_failure(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    fail(run, 1, MemoryError("caught, and tried again with less"))
    run.attempt.record(1).rename(run.attempt.note(1))
    leave(run, 0, 1, value="done")
    assert run.result("it ended") == "done"


def test_a_rank_begins_once_in_a_start(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.attempt.log(0).touch()
    ended = start(run)
    assert ended.returncode == REFUSED
    assert "has begun once in this start of the run" in ended.stderr
