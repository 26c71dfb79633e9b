"""A run that DeepSpeed itself has saved goes on under unipar, whatever the strategy."""

from __future__ import annotations

import itertools
import logging
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unipar import Session
from unipar.checkpoint import from_framework
from unipar.compat import deepspeed
from unipar.compat.run import current
from unipar.data import Loader
from unipar.errors import CheckpointError, ConfigError
from unipar.state import named_weights
from unipar.testing import portability
from unipar.testing.pool import WorldPools
from unipar.testing.portability import BATCH, HALF, RELATIVE, STEPS, Language
from unipar.world import Placement, join
from unipar_deepspeed import files, framework, saved

pytestmark = pytest.mark.slow

SCENARIOS = {
    "0": {"zero_optimization": {"stage": 0}},
    "1": {"zero_optimization": {"stage": 1}},
    "2": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    "3": {
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 300,
            "stage3_param_persistence_threshold": 0,
        }
    },
    "2-bf16": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
    "0-bf16": {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}},
}


def endless(loader: Loader) -> Iterator[Any]:
    while True:
        yield from loader


def batches_of(placement: Placement) -> Iterator[Any]:
    """A rank's parts of the run's batches."""
    loader = Loader(
        portability.data(),
        global_batch_size=BATCH,
        shuffle=True,
        data_rank=placement.rank,
        data_size=placement.size,
    )
    return endless(loader)


def step_by(engine: Any, own: Any, placement: Placement) -> float:
    """The loss of a batch of which this is a rank's part, by which an engine steps."""
    loss = portability.loss_sum(engine, own.data)
    total, count = loss.total.detach().clone(), torch.as_tensor(loss.count).clone()
    if placement.size > 1:
        dist.all_reduce(total)
        dist.all_reduce(count)
    engine.backward(loss.total * placement.size / count)
    engine.step()
    return (total / count).item()


def train_plainly(placement: Placement, asked: dict[str, Any], directory: Path) -> list[float]:
    """The first half of the run, by DeepSpeed's own calls; and its checkpoint."""
    world = join(placement)
    environment = framework.start(world)
    model = Language()
    optimizer = portability.make_optimizer(model.named_parameters())
    config = {
        "train_micro_batch_size_per_gpu": BATCH // world.size,
        "gradient_clipping": 0.5,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
        **asked,
    }
    engine, *_ = framework.load().initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=portability.make_scheduler(optimizer),
        config=config,
    )
    losses = []
    for (own,) in itertools.islice(batches_of(placement), HALF):
        losses.append(step_by(engine, own, placement))
    engine.save_checkpoint(str(directory), client_state={"epoch": 1, "notes": ["plain", 1.5]})
    engine.destroy()
    framework.stop(environment)
    world.leave()
    return losses


@pytest.fixture(scope="module")
def plain(world_pool: WorldPools, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What plain DeepSpeed has saved on two ranks."""
    found = {}
    for name, asked in SCENARIOS.items():
        found[name] = tmp_path_factory.mktemp(name)
        for losses in world_pool(2).run(train_plainly, asked, found[name]):
            if "bf16" not in name:
                assert losses == pytest.approx(portability.uninterrupted()[:HALF], rel=RELATIVE)
    return found


def go_on(placement: Placement, strategy: str, path: Path) -> tuple[int, list[float]]:
    with Session(strategy, device="cpu", placement=placement) as session:
        engine, loader = portability.prepare(session, elsewhere=True)
        step = session.load(path, loader=loader)
        batches = itertools.islice(endless(loader), step, STEPS)
        return step, [engine.train_step(batch, portability.loss_sum).loss for batch in batches]


@pytest.mark.parametrize("stage", ["1", "2", "3"])
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("single", 1), ("zero3", 2), pytest.param("fsdp", 4, marks=pytest.mark.thorough)],
)
def test_goes_on_as_if_undisturbed(
    plain: dict[str, Path],
    world_pool: WorldPools,
    tmp_path: Path,
    stage: str,
    strategy: str,
    ranks: int,
) -> None:
    path = from_framework("deepspeed", plain[stage], tmp_path)
    expected = portability.uninterrupted()[HALF:]
    for step, losses in world_pool(ranks).run(go_on, strategy, path):
        assert step == HALF
        assert losses == pytest.approx(expected, rel=RELATIVE)


# -- scripts that DeepSpeed's face runs ------------------------------------------------------------


def by_face(placement: Placement, strategy: str, act: Callable[..., Any], *args: Any) -> Any:
    """Act with :mod:`unipar.compat.deepspeed`, under a strategy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNIPAR_STRATEGY", strategy)
        patch.setenv("DS_ACCELERATOR", "cpu")
        current.stand(placement, Path("unipar.yaml"))
        try:
            return act(current.placement(), deepspeed, *args)
        finally:
            current.close()


def by_deepspeed(placement: Placement, act: Callable[..., Any], *args: Any) -> Any:
    """Act with DeepSpeed itself."""
    world = join(placement)
    environment = framework.start(world)
    try:
        return act(placement, framework.load(), *args)
    finally:
        framework.stop(environment)
        world.leave()


def go_on_with(placement: Placement, module: Any, directory: Path, stage: int) -> Any:
    model = Language(elsewhere=True)
    optimizer = portability.make_optimizer(model.named_parameters())
    engine, *_ = module.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=portability.make_scheduler(optimizer),
        config={
            "train_micro_batch_size_per_gpu": BATCH // placement.size,
            "gradient_clipping": 0.5,
            "zero_optimization": {"stage": stage},
        },
    )
    _, kept = engine.load_checkpoint(str(directory))
    losses = []
    for (own,) in itertools.islice(batches_of(placement), engine.global_steps, STEPS):
        losses.append(step_by(engine, own, placement))
    return kept, losses


def told(placement: Placement, module: Any, directory: Path) -> list[str]:
    """What a script is warned of that goes on from a checkpoint."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("unipar").addHandler(handler)
    try:
        go_on_with(placement, module, directory, 0)
    finally:
        logging.getLogger("unipar").removeHandler(handler)
    return said


@pytest.mark.parametrize(("strategy", "stage", "ranks"), [("zero2", 2, 2), ("fsdp", 3, 2)])
def test_a_migrated_script_goes_on_as_if_undisturbed(
    plain: dict[str, Path],
    world_pool: WorldPools,
    tmp_path: Path,
    strategy: str,
    stage: int,
    ranks: int,
) -> None:
    from_framework("deepspeed", plain[str(stage)], tmp_path)
    expected = portability.uninterrupted()[HALF:]
    found = world_pool(ranks).run(by_face, strategy, go_on_with, tmp_path, stage)
    for kept, losses in found:
        assert kept == {"epoch": 1, "notes": ["plain", 1.5]}
        assert losses == pytest.approx(expected, rel=RELATIVE)


def scheduled(placement: Placement, module: Any, directory: Path, saves: bool) -> Any:
    """Train a model of five elements by a schedule of DeepSpeed's, and what goes on of it."""
    torch.manual_seed(int(saves))
    model = torch.nn.Linear(4, 1)
    schedule = {"warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 4}
    engine, *_ = module.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
            "scheduler": {"type": "WarmupDecayLR", "params": {**schedule, "total_num_steps": 9}},
        },
    )
    found = []
    if not saves:
        kept = engine.load_checkpoint(str(directory))[1]
        found += [engine.global_steps, engine.global_samples, *kept["seen"].tolist()]
    x = torch.arange(8.0).view(2, 4) / 8 + placement.rank
    for _ in range(3):
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        found += [loss.item(), *engine.get_lr()]
    if saves:
        engine.save_checkpoint(str(directory), tag="t", client_state={"seen": torch.ones(2)})
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_schedule_of_deepspeeds_goes_on_by_its_face_alone(
    world_pool: WorldPools, tmp_path: Path, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    pool = world_pool(ranks)
    pool.run(by_deepspeed, scheduled, tmp_path / "own", True)
    expected = pool.run(by_deepspeed, scheduled, tmp_path / "own", False)
    path = from_framework("deepspeed", tmp_path / "own", tmp_path / "own/t-unipar")
    assert "alone finds the state of DeepSpeed's own scheduler and client_state" in caplog.text
    found = pool.run(by_face, "zero2", scheduled, tmp_path / "own/t-unipar", False)
    assert found == [pytest.approx(one) for one in expected]
    assert found == pool.run(by_face, "zero2", scheduled, path, False)


def loads_nothing(placement: Placement, module: Any, directory: Path) -> None:
    model = torch.nn.Linear(4, 1)
    engine, *_ = module.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={"train_micro_batch_size_per_gpu": 2},
    )
    engine.load_checkpoint(str(directory))


def test_what_no_engine_has_saved_is_refused_in_words(
    plain: dict[str, Path], world_pool: WorldPools, tmp_path: Path
) -> None:
    path = from_framework("deepspeed", plain["2"], tmp_path)
    (path / "engine.pt").unlink()
    with pytest.raises(CheckpointError, match=r"has no engine\.pt.*load_module_only=True"):
        world_pool(2).run(by_face, "ddp", loads_nothing, tmp_path)
    with pytest.raises(CheckpointError, match=r"engine\.load_checkpoint\('.*-unipar'\)"):
        world_pool(2).run(by_face, "ddp", loads_nothing, plain["2"])


@pytest.mark.thorough
def test_stage_0_gives_its_weights_and_says_so(
    plain: dict[str, Path], world_pool: WorldPools, tmp_path: Path
) -> None:
    command = ["-m", "unipar", "convert", "--from", "deepspeed"]
    done = subprocess.run(
        [sys.executable, *command, str(plain["0"] / f"global_step{HALF}"), str(tmp_path / "new")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "only weights are taken over" in done.stderr
    path = tmp_path / f"new/step-{HALF:08}"
    assert f"wrote {path}" in done.stdout
    ((step, losses),) = world_pool(1).run(go_on, "single", path)
    assert step == HALF
    assert losses[0] == pytest.approx(portability.uninterrupted()[HALF], rel=RELATIVE)
    assert "holds weights alone: the optimizer starts over" in " ".join(
        world_pool(1).run(by_face, "single", told, path)[0]
    )


def test_master_weights_are_taken_not_rounded_ones(plain: dict[str, Path]) -> None:
    state = saved.read(plain["2-bf16"])
    weights = {tensor.name: tensor.read()[0] for tensor in state.weights}
    assert weights.keys() == named_weights(Language())[0].keys()
    assert state.aliases == {"head.weight": "embedding.weight"}
    assert all(value.dtype == torch.float32 for value in weights.values())
    trained = weights["embedding.weight"]
    assert not torch.equal(trained, trained.bfloat16().float())


@pytest.mark.usefixtures("new_interpreters")
def test_reading_does_not_import_deepspeed(plain: dict[str, Path]) -> None:
    code = (
        "import sys; from pathlib import Path; from unipar_deepspeed import saved; "
        "saved.read(Path(sys.argv[1])); sys.exit('deepspeed' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(plain["3"])], check=True, timeout=60)


# -- what cannot be taken over ---------------------------------------------------------------------


@pytest.fixture
def copy(plain: dict[str, Path], tmp_path: Path) -> Path:
    """One step's directory, to be damaged."""
    return Path(shutil.copytree(plain["2"] / f"global_step{HALF}", tmp_path / "copy"))


def test_half_precision_without_masters_is_refused(plain: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match=r"in half precision.*stage 1"):
        saved.read(plain["0-bf16"])


def test_a_missing_rank_is_named(copy: Path) -> None:
    (copy / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"saved by 2 ranks, and has 1 files"):
        saved.read(copy)


def test_a_damaged_file_is_named(copy: Path) -> None:
    file = copy / "mp_rank_00_model_states.pt"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states\.pt is damaged"):
        saved.read(copy)


class Surprise:
    def __reduce__(self) -> Any:
        return print, ("this ran",)


def test_nothing_in_a_file_is_run(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = copy / "mp_rank_00_model_states.pt"
    contents = torch.load(file, weights_only=True)
    torch.save({**contents, "mine": Surprise()}, file)
    with pytest.raises(CheckpointError, match=r"objects that are not unpickled.*print"):
        saved.read(copy)
    assert "this ran" not in capsys.readouterr().out


class Member:
    """Stored as Python 3.11 to 3.11.3 stores a member of an enumeration."""

    def __init__(self, kind: Any, name: str) -> None:
        self.kind, self.name = kind, name

    def __reduce__(self) -> Any:
        return getattr, (self.kind, self.name)


def test_an_enumeration_of_an_older_python_is_read_and_no_other_attribute(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type("ZeroStageEnum", (), {"__module__": "deepspeed.runtime.zero.config"})
    config = types.ModuleType("deepspeed.runtime.zero.config")
    config.ZeroStageEnum = kind  # pyright: ignore[reportAttributeAccessIssue]
    file = copy / "mp_rank_00_model_states.pt"
    contents = torch.load(file, weights_only=True)
    with monkeypatch.context() as patch:
        for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero"):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        patch.setitem(sys.modules, config.__name__, config)
        torch.save({**contents, "stage": Member(kind, "gradients")}, file)
    assert files.load(file)["stage"].args == ("gradients",)
    torch.save({**contents, "mine": Member(torch.Tensor, "numpy")}, file)
    with pytest.raises(CheckpointError, match=r"objects that are not unpickled.*getattr"):
        saved.read(copy)


def test_model_parallel_checkpoints_are_refused(copy: Path) -> None:
    (copy / "mp_rank_01_model_states.pt").touch()
    with pytest.raises(CheckpointError, match=r"tensor-parallel"):
        saved.read(copy)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no checkpoint of DeepSpeed's"):
        from_framework("deepspeed", tmp_path, tmp_path / "new")
    with pytest.raises(ConfigError, match=r"'ddp' reads no checkpoints of a framework's own"):
        from_framework("ddp", tmp_path, tmp_path / "new")
