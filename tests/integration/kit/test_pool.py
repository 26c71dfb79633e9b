"""The pool of ranks that distributed tests run in."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import torch
import torch.distributed as dist

from unipar.errors import ConfigError
from unipar.testing.pool import RemoteTraceback, TaskFailed, WorkerPool, WorldPools
from unipar.world import Placement, joined


def add_up(placement: Placement, value: float) -> tuple[int, float]:
    print("printing disturbs nobody")
    with joined(placement) as world:
        tensor = torch.tensor(value + world.rank)
        dist.all_reduce(tensor)
        return os.getpid(), tensor.item()


def raise_on_rank_1(placement: Placement) -> None:
    with joined(placement) as world:
        if world.rank == 1:
            raise ConfigError("rank 1 will not have it")
        world.barrier()


def hang_on_rank_1(placement: Placement) -> None:
    with joined(placement) as world:
        if world.rank == 1:
            time.sleep(60)
        world.barrier()


def die_on_rank_1(placement: Placement) -> None:
    if placement.rank == 1:
        print("about to die", flush=True)
        os._exit(7)
    time.sleep(60)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(2)
    yield pool
    pool.close()


def test_processes_serve_many_tasks(pool: WorkerPool) -> None:
    first = pool.run(add_up, 1.0)
    second = pool.run(add_up, 2.0)
    assert [value for _, value in first + second] == [3.0, 3.0, 5.0, 5.0]
    assert [pid for pid, _ in first] == [pid for pid, _ in second]


def test_closures_are_carried(pool: WorkerPool) -> None:
    offset = 10

    def rank_and_offset(placement: Placement) -> int:
        return placement.rank + offset

    assert pool.run(rank_and_offset) == [10, 11]


def test_error_is_the_rank_s_own_and_the_pool_goes_on(pool: WorkerPool) -> None:
    with pytest.raises(ConfigError, match="rank 1 will not have it") as caught:
        pool.run(raise_on_rank_1)
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert "rank 1:" in str(cause)
    assert "in raise_on_rank_1" in str(cause)
    assert [value for _, value in pool.run(add_up, 1.0)] == [3.0, 3.0]


def test_hanging_task_is_ended_and_says_where(pool: WorkerPool) -> None:
    (before, _), _ = pool.run(add_up, 1.0)
    with pytest.raises(TaskFailed, match=r"did not end within 3 s on ranks \[0, 1\]") as caught:
        pool.run(hang_on_rank_1, timeout=3.0)
    assert "in hang_on_rank_1" in str(caught.value)
    assert not psutil.pid_exists(before)
    assert [value for _, value in pool.run(add_up, 1.0)] == [3.0, 3.0]


def test_death_of_a_rank_is_told_with_what_it_printed(pool: WorkerPool) -> None:
    with pytest.raises(TaskFailed, match=r"rank 1 died \(exit code 7\)\nabout to die"):
        pool.run(die_on_rank_1)


def crash_in_a_thread(placement: Placement) -> None:
    def read_nowhere() -> None:
        # It would be a file of the size of the process.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.string_at(0)

    thread = threading.Thread(target=read_nowhere)
    thread.start()
    thread.join()


def test_crash_is_told_with_the_thread_in_which_it_was(pool: WorkerPool) -> None:
    with pytest.raises(
        TaskFailed,
        match=r"died \(exit code -11\)\nFatal Python error: Segmentation fault(?s:.)*"
        r"Current thread(?s:.)* in read_nowhere\n",
    ):
        pool.run(crash_in_a_thread)


def test_closing_ends_the_processes() -> None:
    pools = WorldPools()
    ((pid, _),) = pools(1).run(add_up, 1.0)
    pools.close()
    assert not psutil.pid_exists(pid)


def test_workers_end_with_a_killed_parent(still_running) -> None:
    script = (
        "import os, signal, time\n"
        "from unipar.testing.pool import WorkerPool\n"
        "pool = WorkerPool(2)\n"
        "print(*pool.run(lambda placement: os.getpid()), flush=True)\n"
        "import threading\n"
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
        "pool.run(lambda placement: time.sleep(60))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    assert still_running(pids) == [], "workers outlive the process that started them"
