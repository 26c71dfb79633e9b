"""Whatever ends a save, the checkpoint before it can be loaded. Real processes, killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from unipar.checkpoint import load, newest, save, verify
from unipar.errors import CheckpointError
from unipar.state import TensorState
from unipar.world import World

pytestmark = pytest.mark.usefixtures("forked_programs")

PROGRAM = """
    import sys, torch
    from unipar.checkpoint import save, save_async
    from unipar.errors import CheckpointError
    from unipar.state import EngineState, LocalState
    from unipar.world import Placement, World

    class Engine:
        optimizer = lr_scheduler = None

        def __init__(self, value):
            self.weights = {f"w{i}": torch.full((250_000,), float(value)) for i in range(8)}

        def export_state(self):
            return EngineState([LocalState.of(n, t) for n, t in self.weights.items()])

    directory, alone = sys.argv[1], World(Placement())
    torch.set_num_threads(1)
"""


def _start(directory: Path, body: str, **options: Any) -> subprocess.Popen[str]:
    source = textwrap.dedent(PROGRAM) + textwrap.dedent(body)
    return subprocess.Popen(
        [sys.executable, "-c", source, str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **options,
    )


def _run(directory: Path, body: str, **options: Any) -> str:
    process = _start(directory, body, **options)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


# One process that has imported torch forks a child for each trial; children save without end, each
# step twice, so that half of the saves replace a step that is there.
FORKS = """
    import os
    for line in sys.stdin:
        directory, _, first = line.strip().rpartition(" ")
        child = os.fork()
        if child == 0:
            step = int(first)
            print(os.getpid(), flush=True)
            while True:
                step += 1
                save(directory, {"m": Engine(step)}, alone, step=step)
                print("saved", step, flush=True)
                save(directory, {"m": Engine(step)}, alone, step=step)
        os.waitpid(child, 0)
        print("killed", flush=True)
"""


def test_killed_at_any_moment_the_last_whole_checkpoint_is_there(
    tmp_path: Path, make_engine: Callable[..., Any], alone: World
) -> None:
    moments = random.Random(0)
    interrupted = 0
    with _start(tmp_path, FORKS, stdin=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        for trial in range(25):
            directory = tmp_path / f"run-{trial}"
            parent.stdin.write(f"{directory} {100 * trial}\n")
            parent.stdin.flush()
            child = int(parent.stdout.readline())
            last = int(parent.stdout.readline().removeprefix("saved "))
            time.sleep(moments.uniform(0, 0.06))
            os.kill(child, signal.SIGKILL)
            while (said := parent.stdout.readline()) != "killed\n":
                last = int(said.removeprefix("saved "))
            interrupted += any(path.name.startswith(".") for path in directory.iterdir())

            found = newest(directory)
            assert found is not None
            step = int(found.name[-8:])
            assert step >= last, "a checkpoint that was reported is gone"
            verify(found)
            weights = {f"w{i}": torch.zeros(250_000) for i in range(8)}
            load(directory, {"m": make_engine(weights)}, alone)
            assert all(bool((weight == step).all()) for weight in weights.values())

            save(directory, {"m": make_engine(weights)}, alone, step=step + 1)
            assert not [path.name for path in directory.iterdir() if path.name.startswith(".")]
            shutil.rmtree(directory)
        parent.stdin.close()
    assert interrupted >= 5, "the kills came too seldom during a save to show anything"


# A child dies before its n-th change to the filesystem, for each n that there is. Python itself
# tells of every one, so no moment between two of them is left out.
STEPS = """
    import os
    CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
    left = [None]

    def die(event, arguments):
        if left[0] is not None and event in CHANGES:
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)

    sys.addaudithook(die)
    for line in sys.stdin:
        directory, _, count = line.strip().rpartition(" ")
        child = os.fork()
        if child == 0:
            left[0] = int(count)
            save(directory, {"m": Engine(2)}, alone, step=1)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_step_is_never_gone_while_it_is_saved_anew(
    tmp_path: Path, make_engine: Callable[..., Any], alone: World
) -> None:
    weights = {f"w{i}": torch.ones(250_000) for i in range(8)}
    target = {name: torch.zeros(250_000) for name in weights}
    found: list[float] = []
    status = -1
    with _start(tmp_path, STEPS, stdin=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        for count in range(1, 200):
            directory = tmp_path / str(count)
            save(directory, {"m": make_engine(weights)}, alone, step=1)
            parent.stdin.write(f"{directory} {count}\n")
            parent.stdin.flush()
            status = int(parent.stdout.readline())
            load(directory, {"m": make_engine(target)}, alone)
            values = {float(tensor[0]) for tensor in target.values()}
            assert all(bool((tensor == tensor[0]).all()) for tensor in target.values())
            assert values in ({1.0}, {2.0}), "parts of two saves"
            found += values
            shutil.rmtree(directory)
            if status == 0:
                break
        parent.stdin.close()
    assert status == 0
    assert found == sorted(found), "the old step came back after the new one was there"
    assert found[0] == 1.0
    assert found[-1] == 2.0
    assert len(found) > 15, "the deaths came too seldom to show anything"


def _save_twice(limit: str) -> str:
    return f"""
        engine = Engine(1)
        save(directory, {{"m": engine}}, alone, step=1)
        {limit}
        try:
            save(directory, {{"m": engine}}, alone, step=2)
        except CheckpointError as error:
            print(error)
        assert all(bool((weight == 1).all()) for weight in engine.weights.values())
    """


def test_a_disk_that_takes_no_more_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000,) * 2)"
    said = _run(tmp_path, _save_twice(limit))
    assert "Could not save step 2: rank 0 failed: cannot write" in said
    assert "m/weights/rank-00000.safetensors: File too large" in said
    assert f"the newest good checkpoint is {tmp_path / 'step-00000001'}" in said
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    verify(tmp_path)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs to mount a small disk")
def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting is not permitted here")
    try:
        said = _run(tmp_path, _save_twice(""))
        assert "No space left on device" in said
        assert "rank-00000.safetensors" in said
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
        verify(tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_directory_that_may_not_be_written_is_named() -> None:
    limit = "import os; os.chmod(directory, 0o555); os.geteuid() or os.seteuid(65534)"
    # The folder above tmp_path is closed to others by any pytest that starts meanwhile.
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        directory.chmod(0o777)
        said = _run(directory, _save_twice(limit))
        assert "Permission denied" in said
        assert f"cannot write {directory}" in said
        assert "step-00000001" in said
        verify(directory)


def test_a_file_in_the_place_of_the_directory_is_named(
    tmp_path: Path, make_engine: Callable[..., Any], alone: World
) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(CheckpointError, match=r"cannot write .*runs.*there is no checkpoint yet"):
        save(tmp_path / "runs", {"m": make_engine({"w": torch.ones(1)})}, alone, step=1)


@pytest.mark.usefixtures("new_interpreters")
def test_a_process_does_not_exit_before_its_background_save(tmp_path: Path) -> None:
    _run(tmp_path, 'save_async(directory, {"m": Engine(3)}, alone, step=3)')
    assert newest(tmp_path) == tmp_path / "step-00000003"
    verify(tmp_path)


def test_an_error_on_one_rank_is_raised_on_all_and_leaves_nothing(
    tmp_path: Path, make_engine: Callable[..., Any], ranks: Callable[..., list[Any]]
) -> None:
    good = ranks(
        2, lambda world: save(tmp_path, {"m": make_engine({"w": torch.ones(4)})}, world, step=1)
    )[0]

    def save_badly(world: Any) -> Any:
        engine = make_engine({"v": torch.ones(4), "w": torch.ones(4)})
        if world.rank == 1:
            v, w = engine._states(engine.weights)
            broken = _Broken(v.name, v.shape, v.dtype, v.boxes)
            engine._states = lambda tensors: [broken, w] if tensors else []
        return save(tmp_path, {"m": engine}, world, step=2)

    for error in ranks(2, save_badly):
        assert isinstance(error, CheckpointError)
        assert "rank 1 failed: cannot read tensor 'v': lost" in str(error)
        assert str(good) in str(error)
    assert [path.name for path in tmp_path.iterdir()] == [good.name]


class _Broken(TensorState):
    def read(self) -> Sequence[torch.Tensor]:
        raise RuntimeError("lost")

    def write(self, tensors: Sequence[torch.Tensor]) -> None:
        raise RuntimeError("lost")
