"""Which failures are causes and which are echoes, and what survives the way to the caller."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from unipar.errors import CheckpointError, DataError
from unipar.launch.failure import Failure, Kind, cause, classify, read_failure, write_failure
from unipar.launch.rundir import Attempt

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError(GLOO + "pair.cc:537] Read error: Connection reset by peer."), Kind.LOST),
        (RuntimeError(GLOO + "pair.cc:534] Connection closed by peer"), Kind.LOST),
        (RuntimeError(GLOO + "unbound_buffer.cc:78] Timed out waiting 2000ms"), Kind.TIMEOUT),
        (dist.DistStoreError("wait timeout after 2000ms, keys: /default_pg/0"), Kind.TIMEOUT),
        (dist.DistNetworkError("Connection was likely closed"), Kind.LOST),
        (RuntimeError(GLOO + "pair.cc] op.preamble.length <= op.nbytes. 8 vs 4"), Kind.ERROR),
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
