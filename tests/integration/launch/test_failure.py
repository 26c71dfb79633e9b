"""What the user sees when a worker fails, and that nothing outlives it."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from unipar.errors import ConfigError, NonFiniteLossError, WorkerError
from unipar.launch import mark, run
from unipar.launch.group import WorkerGroup
from unipar.world import joined

pytestmark = pytest.mark.timeout(120)


def failing(action, *, ranks=(1,)):
    """A run in which some ranks do ``action`` in step 3 while the others go on to a collective."""

    def fn(placement):
        with joined(placement) as world:
            for step in range(1, 5):
                mark(step, "forward")
                if step == 3 and world.rank in ranks:
                    action()
                dist.all_reduce(torch.ones(1))

    return fn


def caught(fn, **options) -> WorkerError:
    # A collective waits half an hour for a rank, and a test has a fraction of that.
    with pytest.raises(WorkerError) as info:
        run(fn, devices=2, **options)
    assert len(str(info.value).splitlines()) < 40
    return info.value


def test_the_rank_that_raised_is_named_and_not_the_one_it_left_alone():
    def action():
        print("about to fail")
        raise ValueError("bad batch")

    error = caught(failing(action))
    assert (error.rank, error.step) == (1, 3)
    message = str(error)
    assert message.startswith("Rank 1 of 2 failed in step 3 (forward): ValueError: bad batch\n")
    assert 'raise ValueError("bad batch")' in error.worker_traceback
    assert "in action" in message
    assert "entry.py" not in message
    # Gloo of torch 2.8 says that it is connected.
    assert re.search(r"Last output of rank 1:\n(\[Gloo\].*\n)*about to fail", message)


def test_a_failure_that_the_agent_of_torch_sees_first_is_explained(monkeypatch):
    looks = []

    def failures(group):
        # The workers end just after the look that finds none.
        while not looks and group.running():
            time.sleep(0.01)
        looks.append(seen(group))
        return looks[-1] if len(looks) > 1 else []

    seen = WorkerGroup.failures
    monkeypatch.setattr(WorkerGroup, "failures", failures)

    def action():
        raise ValueError("bad batch")

    error = caught(failing(action, ranks=(0, 1)))
    assert looks[0]
    assert "ValueError: bad batch" in str(error)


def test_frames_of_libraries_are_cut():
    error = caught(failing(lambda: torch.nn.Linear(2, 2)(torch.ones(3))))
    assert "in failing" not in error.worker_traceback
    assert "more inside libraries" in error.worker_traceback
    assert "module.py" not in error.worker_traceback
    assert "test_failure.py" in error.worker_traceback
    assert "mat1 and mat2" in str(error).splitlines()[0] or "shapes" in str(error)


def test_a_killed_rank_is_the_cause():
    error = caught(failing(lambda: os.kill(os.getpid(), signal.SIGKILL)))
    assert (error.rank, error.step) == (1, 3)
    assert str(error).startswith("Rank 1 of 2 failed in step 3 (forward): was killed by SIGKILL")
    assert "memory" in str(error)


@pytest.mark.parametrize(
    "allocate", [pytest.param(bytearray, marks=pytest.mark.thorough), torch.ones]
)
def test_running_out_of_memory_says_what_to_do(allocate):
    error = caught(failing(lambda: allocate(1 << 50)))
    assert error.rank == 1
    assert "smaller micro_batch_size" in str(error)


@pytest.mark.thorough
def test_a_rank_that_leaves_with_a_status():
    error = caught(failing(lambda: os._exit(7)))
    assert "exited with status 7 without a Python error" in str(error)


def test_a_rank_that_leaves_with_status_0_before_its_function_returns():
    error = caught(failing(lambda: os._exit(0)))
    assert (error.rank, error.step) == (1, 3)
    assert "exited with status 0 without a Python error" in str(error)


def test_a_rank_that_returns_while_others_wait():
    error = caught(failing(lambda: sys.exit(0)))
    assert error.rank == 0
    assert "a collective that rank 1 did not take part in, having already returned" in str(error)


def test_the_librarys_own_errors_arrive_as_they_are():
    def action():
        raise NonFiniteLossError("loss is nan at step 3", step=3)

    with pytest.raises(NonFiniteLossError, match=r"^loss is nan at step 3$") as info:
        run(failing(action), devices=2)
    assert info.value.step == 3


def test_a_module_that_workers_cannot_import_is_named(tmp_path, monkeypatch):
    (tmp_path / "hidden_module.py").write_text("def fn(placement): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import hidden_module  # pyright: ignore[reportMissingImports]

    sys.path.remove(str(tmp_path))
    with pytest.raises(ConfigError, match=r"hidden_module.*\n?.*PYTHONPATH"):
        run(hidden_module.fn, devices=2)


def test_the_children_of_a_killed_worker_end_too(tmp_path, still_running):
    pids = tmp_path / "pids"
    pids.mkdir()

    def fn(placement):
        loader = torch.utils.data.DataLoader(range(1000), num_workers=2)  # pyright: ignore[reportArgumentType]
        for _ in loader:
            for process in [psutil.Process(), *psutil.Process().children()]:
                (pids / str(process.pid)).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    caught(fn)
    numbers = [int(path.name) for path in pids.iterdir()]
    assert len(numbers) >= 3
    assert still_running(numbers) == []
    shared = [path.name for path in Path("/dev/shm").iterdir()]
    assert not [name for name in shared if any(f"_{number}_" in name for number in numbers)]


def test_a_killed_rank_restarts_the_group(caplog):
    def fn(placement):
        with joined(placement) as world:
            total = torch.ones(1)
            dist.all_reduce(total)
            if world.rank == 1 and placement.restart == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(total)
            return total.item(), placement.restart

    assert run(fn, devices=2, max_restarts=2) == (4.0, 1)
    assert "Rank 1 of 2 failed" in caplog.text
    assert "1 restarts left" in caplog.text


def test_the_last_failure_is_the_one_reported():
    def fn(placement):
        raise ValueError(f"attempt {placement.restart}")

    assert "attempt 1" in str(caught(fn, max_restarts=1))


def test_a_config_error_is_not_retried(tmp_path):
    def fn(placement):
        (tmp_path / f"attempt-{placement.restart}").touch()
        raise ConfigError("devices do not divide")

    with pytest.raises(ConfigError, match=r"^devices do not divide$") as caught:
        run(fn, devices=2, max_restarts=3)
    frames = "".join(traceback.format_tb(caught.value.__traceback__))
    assert "torch/distributed" not in frames, "what torch's agent does is no help to the user"
    assert not (tmp_path / "attempt-1").exists()


def test_a_hang_names_who_waited_who_is_missing_and_where():
    def stuck():
        time.sleep(60)

    # Longer than one rank may take to start after the other where the machine is busy.
    error = caught(failing(stuck), timeout=6)
    message = str(error)
    assert message.startswith(
        "Rank 1 of 2 stopped taking part: rank 0 waited in step 3 (forward) for 6 s"
    )
    assert (error.rank, error.step) == (1, 3)
    assert "Rank 1 was last seen in step 3 (forward)" in message
    assert "in stuck" in error.worker_traceback
    assert "raise `timeout`" in message


def test_a_stopped_rank_is_named_where_an_asynchronous_collective_waits():
    def fn(placement):
        with joined(placement) as world:
            mark(3, "backward")
            if world.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            # Of two at once, gloo says of the second only that the first has timed out.
            works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(2)]
            time.sleep(8)
            for work in reversed(works):
                assert work is not None
                work.wait()

    error = caught(fn, timeout=6)
    assert (error.rank, error.step) == (1, 3)
    assert "Rank 1 was last seen in step 3 (backward)" in str(error)
    assert "does not answer when asked where it is" in str(error)


def test_a_barrier_too_many():
    def fn(placement):
        with joined(placement) as world:
            mark(3, "forward")
            if world.rank == 1:
                dist.barrier()
            mark(3, "backward")
            dist.all_reduce(torch.ones(1))
            dist.barrier()

    error = caught(fn, timeout=4)
    message = str(error)
    assert error.rank == 1, message
    assert re.search("came too late, or to another collective|already returned", message)
    assert "Every rank must run the same collectives" in message


def test_an_interrupt_of_one_rank_is_told_from_the_failures_that_follow():
    error = caught(failing(lambda: os.kill(os.getpid(), signal.SIGINT)))
    assert (error.rank, error.step) == (1, 3)
    assert str(error).startswith("Rank 1 of 2 failed in step 3 (forward): KeyboardInterrupt")


def test_a_rank_that_never_joins_is_missing_too():
    def fn(placement):
        if placement.rank == 1:
            time.sleep(60)
        with joined(placement):
            pass

    message = str(caught(fn, timeout=2))
    assert message.startswith(
        "Rank 1 of 2 stopped taking part: rank 0 waited before the first step"
    )


@pytest.mark.usefixtures("new_interpreters")
def test_no_noise_but_the_error(script):
    done = script.run("""
        import logging
        logging.basicConfig(level=logging.INFO)

        def fn(placement):
            with joined(placement) as world:
                if world.rank == 1:
                    raise ValueError("bad batch")
                dist.all_reduce(torch.ones(1))
        try:
            run(fn, devices=2)
        except WorkerError as error:
            print(str(error).splitlines()[0])
    """)
    assert done.stdout == "Rank 1 of 2 failed before the first step: ValueError: bad batch\n"
    assert done.stderr == ""
