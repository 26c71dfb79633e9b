"""What horovodrun's variables say about a process, and what is wrong with them."""

from __future__ import annotations

import pytest

from unipar.errors import ConfigError
from unipar.launch import detect

HOROVODRUN = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
    "HOROVOD_HOSTNAME": "node1",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "1",
}


def test_a_meeting_point_of_the_users_is_taken():
    placement = detect({**HOROVODRUN, "MASTER_ADDR": "node0", "MASTER_PORT": "29500"})
    assert placement is not None
    assert (placement.rank, placement.size) == (3, 4)
    assert (placement.local_rank, placement.local_size) == (1, 2)
    assert (placement.node_rank, placement.num_nodes) == (1, 2)
    assert placement.init_method == "tcp://node0:29500"


def test_one_process_may_start_its_own():
    assert detect({**HOROVODRUN, "HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}) is None


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"HOROVOD_ELASTIC": "1"}, "max_restarts"),
        ({"HOROVOD_LOCAL_SIZE": ""}, "HOROVOD_LOCAL_SIZE is not set"),
        ({"HOROVOD_RANK": "4"}, "must be at most 3"),
        ({}, "does not answer"),
    ],
)
def test_what_cannot_be_joined_is_refused(variables, words):
    with pytest.raises(ConfigError, match=words):
        detect({**HOROVODRUN, **variables})
