"""Which failures are causes and which are echoes, and what survives the way to the caller."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from unipar.errors import CheckpointError, DataError
from unipar.launch.blame import ECHOES, Kind, classify, classify_output
from unipar.launch.failure import Failure, cause, read_failure, write_failure
from unipar.launch.rundir import Attempt

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"


class HorovodInternalError(RuntimeError):
    """Horovod's own is known by its name."""


HorovodInternalError.__module__ = "horovod.common.exceptions"
SHUT_DOWN = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt "
    "to allreduce, allgather or broadcast a tensor after one of the ranks finished execution."
)
WATCHDOG = (
    "[rank1]:[E513 13:25:57.714781669 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=532339, OpType=BROADCAST, NumelIn=5164000, "
    "NumelOut=5164000, Timeout(ms)=1800000) ran for 1800042 milliseconds before timing out."
)
NCCL = "NCCL error in: …/ProcessGroupNCCL.cpp:1970, remote process exited or there was a network"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError(GLOO + "pair.cc:537] Read error: Connection reset by peer."), Kind.LOST),
        (RuntimeError(GLOO + "pair.cc:534] Connection closed by peer"), Kind.LOST),
        (
            RuntimeError(GLOO + "unbound_buffer.cc:78] Timed out waiting 2000ms for recv"),
            Kind.TIMEOUT,
        ),
        (
            RuntimeError(GLOO + "unbound_buffer.cc:129] Timed out waiting 2000ms for send"),
            Kind.TIMEOUT,
        ),
        (RuntimeError("Application timeout caused pair closure"), Kind.TIMEOUT),
        (
            # As a communication hook of DDP's hands it on.
            RuntimeError(
                "Got the following error when running the callback: RuntimeError: "
                "Application timeout caused pair closure\n\nAt:\n  hook.py(1): land"
            ),
            Kind.TIMEOUT,
        ),
        (dist.DistStoreError("wait timeout after 2000ms, keys: /default_pg/0"), Kind.TIMEOUT),
        (dist.DistNetworkError("Connection was likely closed"), Kind.LOST),
        (RuntimeError(GLOO + "pair.cc] op.preamble.length <= op.nbytes. 8 vs 4"), Kind.APART),
        (dist.DistBackendError(NCCL + " error"), Kind.LOST),
        (dist.DistBackendError("NCCL communicator was aborted on rank 1."), Kind.LOST),
        (dist.DistBackendError(WATCHDOG), Kind.TIMEOUT),
        (dist.DistBackendError("NCCL error: invalid usage, ncclInvalidUsage"), Kind.ERROR),
        (HorovodInternalError(SHUT_DOWN), Kind.LOST),
        (RuntimeError("MPI_ERR_PROC_FAILED: Process Failure"), Kind.LOST),
        (RuntimeError("request timed out while reading the labels"), Kind.ERROR),
        (ConnectionResetError("Connection reset by peer"), Kind.ERROR),
        (ValueError("bad batch"), Kind.ERROR),
        (KeyboardInterrupt(), Kind.INTERRUPT),
    ],
)
def test_an_echo_of_another_ranks_failure_is_told_from_a_cause(error, kind):
    assert classify(error) is kind


@pytest.mark.parametrize("wrapper", [ValueError, CheckpointError])
def test_an_echo_that_other_code_has_wrapped_is_still_one(wrapper):
    error = wrapper("step failed")
    error.__cause__ = RuntimeError(GLOO + "pair.cc:534] Connection closed by peer")
    assert classify(error) is Kind.LOST


def test_what_names_a_time_counts_before_what_names_a_connection():
    error = dist.DistNetworkError("Horovod's reduction of gradients: timed out after 6 s")
    error.__cause__ = HorovodInternalError(SHUT_DOWN)
    assert classify(error) is Kind.TIMEOUT


def test_the_output_of_a_rank_that_nccl_has_aborted():
    assert classify_output(f"step 7\n{WATCHDOG}\nterminate called") is Kind.TIMEOUT
    assert classify_output("terminate called: connection timed out") is Kind.ERROR


def test_every_text_says_where_it_is_from():
    for echo in ECHOES:
        assert any(char.isdigit() for char in echo.source), "the version"
        assert "seen" in echo.source


def test_a_cause_comes_before_an_earlier_echo():
    echo = Failure(0, Kind.LOST, 1.0, "RuntimeError: Connection closed by peer")
    late = Failure(2, Kind.ERROR, 3.0, "ValueError: second")
    true = Failure(1, Kind.ERROR, 2.0, "was killed by SIGKILL")
    assert cause([echo, late, true]) is true


class Strict(DataError):
    def __init__(self, *, index: int) -> None:
        super().__init__(f"item {index} raised")
        self.index = index
        self.stream = open(__file__)  # noqa: SIM115 - something that cannot be sent


def test_an_error_keeps_its_class_message_and_attributes(tmp_path):
    attempt = Attempt(tmp_path)
    error = Strict(index=4)
    write_failure(error, attempt, 1)
    error.stream.close()
    failure = read_failure(attempt, 1)
    assert failure is not None
    assert type(failure.error) is Strict
    assert str(failure.error) == "item 4 raised"
    assert failure.error.index == 4


def test_who_failed_first_does_not_depend_on_the_clocks_of_hosts(tmp_path, monkeypatch):
    attempt, now = Attempt(tmp_path), time.time
    for rank, ahead in enumerate((3600, 0)):
        # The second is an hour behind the first, and fails a moment later.
        monkeypatch.setattr(time, "time", lambda ahead=ahead: now() + ahead)
        write_failure(ValueError(f"of rank {rank}"), attempt, rank)
        time.sleep(0.05)
    failures = [read_failure(attempt, rank) for rank in range(2)]
    assert cause([one for one in failures if one]).rank == 0


def test_the_chain_of_causes_is_kept_and_a_long_message_is_cut(tmp_path):
    attempt = Attempt(tmp_path)
    try:
        try:
            {}["missing"]
        except KeyError as inner:
            raise ValueError("x" * 10_000) from inner
    except ValueError as error:
        write_failure(error, attempt, 0)
    failure = read_failure(attempt, 0)
    assert failure is not None
    assert "KeyError: 'missing'" in failure.traceback
    assert len(failure.title) < 2100
    assert failure.error is None


def test_an_error_on_an_instruction_without_a_line_is_told(tmp_path):
    """As an interrupt is that comes between two lines."""

    def fails():
        raise KeyboardInterrupt

    # CPython, Objects/locations.md: code 15 is of an entry without a location, of 8 units each.
    units = len(fails.__code__.co_code) // 2
    table = b"".join(bytes([0x80 | 15 << 3 | min(8, left) - 1]) for left in range(units, 0, -8))
    fails.__code__ = fails.__code__.replace(co_linetable=table)
    attempt = Attempt(tmp_path)
    try:
        fails()
    except KeyboardInterrupt as error:
        write_failure(error, attempt, 0)
    failure = read_failure(attempt, 0)
    assert failure is not None
    assert f'File "{__file__}", in fails' in failure.traceback
