"""``unipar.launch.run`` when all goes well, and what it refuses to start."""

from __future__ import annotations

import gc
import os
import pty
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from unipar.errors import ConfigError
from unipar.launch import run
from unipar.world import joined

pytestmark = pytest.mark.timeout(120)


def test_a_closure_runs_on_every_rank_and_rank_0s_value_returns():
    base = torch.tensor([10.0])

    def fn(placement):
        with joined(placement) as world:
            total = base + world.rank
            dist.all_reduce(total)
            return total, placement, os.environ["OMP_NUM_THREADS"], gc.isenabled(), os.getpid()

    total, placement, threads, collects, pid = run(fn, devices=2, timeout=30)
    assert total.item() == 21.0
    assert (placement.rank, placement.size, placement.local_size) == (0, 2, 2)
    assert (placement.timeout, placement.restart) == (30, 0)
    assert threads == "1"
    assert collects
    assert pid != os.getpid()


@pytest.mark.usefixtures("new_interpreters")
def test_threads_share_the_cores_unless_the_user_has_set_them(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    cores = len(os.sched_getaffinity(0))
    assert run(lambda p: torch.get_num_threads(), devices=2) == max(1, cores // 2)


def test_a_script_without_a_main_guard_is_not_run_again(script, tmp_path):
    (tmp_path / "beside.py").write_text("def triple(x):\n    return 3 * x\n")
    done = script.run("""
        import beside
        print("once")

        class Result:
            def __init__(self, value):
                self.value = value

        def fn(placement):
            print("out", placement.rank)
            print("err", placement.rank, file=sys.stderr)
            return Result(beside.triple(placement.size))

        result = run(fn, devices=2)
        print(isinstance(result, Result), result.value)
    """)
    assert done.stdout.splitlines() == ["once", "out 0", "True 6"]
    assert done.stderr == "err 0\n"
    assert done.returncode == 0


@pytest.mark.usefixtures("new_interpreters")
def test_python_dash_c(tmp_path):
    code = "from unipar.launch import run; k = 5; print(run(lambda p: p.size + k, devices=2))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("7\n", "")


@pytest.mark.usefixtures("new_interpreters")
def test_a_stray_torch_in_the_working_directory_is_not_imported(script, tmp_path):
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    for name in ("torch", "json", "unipar"):
        (cwd / f"{name}.py").write_text("raise RuntimeError('stray')\n")
    done = script.run("print(run(lambda p: p.size, devices=2))", cwd=cwd)
    assert (done.stdout, done.stderr) == ("2\n", "")


def test_rank_0_keeps_the_terminal(script):
    ours, theirs = pty.openpty()
    process = script.start(
        "run(lambda p: print('tty', sys.stdout.isatty(), sys.stderr.isatty()), devices=2)",
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    assert process.wait(timeout=60) == 0
    assert b"tty True True" in os.read(ours, 4096)
    os.close(ours)


def test_it_runs_in_a_thread():
    values = []
    thread = threading.Thread(target=lambda: values.append(run(lambda p: p.size, devices=2)))
    thread.start()
    thread.join(60)
    assert values == [2]


def test_the_callers_signal_handlers_and_environment_are_put_back():
    import signal

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in numbers]
    environ = dict(os.environ)
    run(lambda p: None, devices=1)
    assert [signal.getsignal(number) for number in numbers] == before
    assert dict(os.environ) == environ


def test_system_exit_0_ends_well():
    assert run(lambda p: sys.exit(0), devices=1) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 0}, r"devices=0; give 1 or more"),
        ({"devices": 4, "num_nodes": 2}, r"(?s)torchrun --nnodes=2 --nproc-per-node=4.*srun"),
    ],
)
def test_what_cannot_be_started_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        run(lambda p: None, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_devices_that_are_not_there_are_refused():
    with pytest.raises(ConfigError, match="no device of type cuda; use device='cpu'"):
        run(lambda p: None, devices=2, device_type="cuda")


def test_what_cannot_be_sent_is_refused_before_any_process_starts():
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"cannot be sent what they need: .*lock"):
        run(lambda p: lock, devices=2)


def test_a_value_that_cannot_come_back_is_named():
    with pytest.raises(ConfigError, match="Rank 0 returned a generator"):
        run(lambda p: (i for i in range(3)), devices=2)
