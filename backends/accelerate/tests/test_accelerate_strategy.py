"""What a user of Accelerate meets: its Accelerator, its options, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unipar import Session, fit
from unipar.errors import ConfigError
from unipar.testing.pool import WorldPools
from unipar.world import Placement
from unipar_accelerate import installed

SMALL_RUN = Path(__file__).with_name("accelerate_small_run.py")
DATA = (torch.randn(64, 4), torch.randn(64, 1))


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(48, 4, generator=generator)
    return x, x.sum(dim=1, keepdim=True)


def train(session: Session, micro_batch_size: int | None = None, seed: int = 0) -> Any:
    engine: Any = session.prepare(build(seed), optimizer=sgd, max_grad_norm=0.5)
    loader = session.loader(samples(), global_batch_size=8, micro_batch_size=micro_batch_size)
    return engine, [engine.train_step(batch, loss_fn).loss for batch in loader]


def losses_under(placement: Placement, strategy: str) -> list[float]:
    with Session(strategy, device="cpu", placement=placement) as session:
        return train(session, micro_batch_size=2)[1]


def meeting_at(placement: Placement, run: str) -> Placement:
    """Each group of a process meets at a place of its own."""
    return replace(placement, init_method=f"{placement.init_method}-{run}")


# -- the Accelerator -------------------------------------------------------------------------------


def use_accelerator(placement: Placement) -> dict[str, Any]:
    """What a team's own code does with its Accelerator, in two sessions of one process."""
    import torch.distributed as dist
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    found: dict[str, Any] = {}
    for precision in ("bf16", "fp32"):
        place = meeting_at(placement, precision)
        with Session("accelerate", device="cpu", precision=precision, placement=place) as session:
            engine, losses = train(session)
            accelerator = engine.accelerator
            rank = torch.tensor([float(accelerator.process_index)])
            accelerator.wait_for_everyone()
            own = Accelerator()
            schedule = torch.optim.lr_scheduler.LambdaLR(sgd(build().named_parameters()), float)
            prepared = accelerator.prepare(schedule)
            prepared.step()
            found = {
                "losses": losses,
                "precision": accelerator.mixed_precision,
                "ranks": accelerator.gather(rank).tolist(),
                "mean": accelerator.reduce(rank, "mean").item(),
                "wrapped": isinstance(engine.reducer.ddp, DistributedDataParallel),
                "is plain": type(accelerator.unwrap_model(engine.model)) is nn.Sequential,
                "main": accelerator.is_main_process,
                "processes": own.num_processes,
                "scheduler steps": schedule.last_epoch,
                "group": dist.get_world_size(),
            }
        assert not AcceleratorState._shared_state
        assert not PartialState._shared_state
    return found


def test_the_accelerator_is_there_and_knows_the_run(world_pool: WorldPools) -> None:
    first, second = world_pool(2).run(use_accelerator)
    (expected,) = world_pool(1).run(losses_under, "single")
    for own, main in ((first, True), (second, False)):
        assert own["losses"] == pytest.approx(expected, rel=1e-5)
        assert own["precision"] == "no"
        assert own["ranks"] == [0.0, 1.0]
        assert own["mean"] == 0.5
        assert own["wrapped"]
        assert own["is plain"]
        assert own["main"] is main
        assert own["processes"] == own["group"] == 2
        assert own["scheduler steps"] == 1


def with_accelerator_made_before(placement: Placement, cpu: bool) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    import unipar.world
    from unipar_accelerate.framework import _placed

    world = unipar.world.join(placement)
    try:
        with _placed(placement) if cpu else torch.inference_mode():
            own = Accelerator(cpu=cpu)
        with Session("accelerate", device="cpu", placement=placement) as session:
            losses = train(session)[1]
        return losses, own.num_processes
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        world.leave()


def test_an_accelerator_made_before_is_taken_over(world_pool: WorldPools) -> None:
    (expected,) = world_pool(1).run(losses_under, "single")
    for losses, processes in world_pool(2).run(with_accelerator_made_before, True):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert processes == 2


def test_an_accelerator_made_before_that_trains_alone_is_refused(world_pool: WorldPools) -> None:
    with pytest.raises(ConfigError, match=r"would not be synchronized.*cpu=True"):
        world_pool(2).run(with_accelerator_made_before, False)


def accumulate_by_accelerate(placement: Placement, how: str) -> None:
    from accelerate import Accelerator

    with Session("accelerate", device="cpu", placement=placement) as session:
        if how == "after":
            engine, _ = train(session)
        Accelerator(gradient_accumulation_steps=4)
        if how == "before":
            train(session)
        else:
            batch = next(iter(session.loader(samples(), global_batch_size=8)))
            engine.train_step(batch, loss_fn)  # pyright: ignore[reportPossiblyUnboundVariable]


def test_a_loss_is_not_divided_twice(world_pool: WorldPools) -> None:
    """Accelerate's accumulation is shared by all Accelerators of a process."""
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps=4.*micro_batch_size"):
        world_pool(2).run(accumulate_by_accelerate, "after")
    world_pool(2).run(accumulate_by_accelerate, "before")


def two_precisions(placement: Placement) -> None:
    from accelerate import Accelerator

    with Session("accelerate", device="cpu", placement=placement, precision="bf16") as session:
        Accelerator(cpu=True)
        train(session)


def test_one_process_has_one_precision(world_pool: WorldPools) -> None:
    with pytest.raises(ConfigError, match=r"bf16.*mixed_precision='no'.*the same"):
        world_pool(2).run(two_precisions)


def twice(placement: Placement) -> list[float]:
    """One module, prepared for another run after a first one."""
    module, losses = build(), []
    for run in ("first", "second"):
        place = meeting_at(placement, run)
        with Session("accelerate", device="cpu", placement=place) as session:
            engine: Any = session.prepare(module, optimizer=sgd)
            batch = next(iter(session.loader(samples(), global_batch_size=8)))
            losses.append(engine.train_step(batch, loss_fn).loss)
            wrapped = isinstance(engine.reducer.ddp, DistributedDataParallel)
        assert wrapped
        assert "_is_accelerate_prepared" not in module.__dict__
    return losses


def test_a_module_can_be_prepared_again(world_pool: WorldPools) -> None:
    (first, second), _ = world_pool(2).run(twice)
    assert second < first


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    [
        "accelerate:bucket_cap_mb=1,gradient_as_bucket_view=false",
        "accelerate:static_graph=true",
        "accelerate:find_unused_parameters=true,broadcast_buffers=false",
    ],
)
def test_options_train_the_same_run(world_pool: WorldPools, strategy: str) -> None:
    (expected,) = world_pool(1).run(losses_under, "single")
    for losses in world_pool(2).run(losses_under, strategy):
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("compression", ["fp16", "power_sgd"])
def test_compression_loses_what_it_says(world_pool: WorldPools, compression: str) -> None:
    (expected,) = world_pool(1).run(losses_under, "single")
    native = ""
    if compression == "power_sgd":
        native = ',native={"comm_state_option":{"start_powerSGD_iter":2}}'
    strategy = f"accelerate:compression={compression}{native}"
    for losses in world_pool(2).run(losses_under, strategy):
        assert losses != pytest.approx(expected, rel=1e-6)
        assert losses == pytest.approx(expected, rel=0.05)


def settings(directory: Path, **changed: Any) -> dict[str, Any]:
    quiet = {"progress": False, "output_dir": directory, "loss": loss_fn}
    return {"device": "cpu", "devices": 2, "global_batch_size": 16, "steps": 4, **quiet, **changed}


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("accelerate:plugin=fsdp", r"needs a GPU.*plain DDP.*strategy='fsdp'"),
        ("accelerate:plugin=megatron", r"plugin.*ddp.*fsdp.*deepspeed"),
        ("accelerate:wrap=none", r"wrap means nothing with plugin='ddp'.*plugin='fsdp'"),
        ("accelerate:plugin=fsdp,static_graph=true", r"static_graph means nothing.*'fsdp'"),
        ("accelerate:compression=bf16", r"needs a GPU.*'fp16'"),
        ('accelerate:native={"mixed_precision":"bf16"}', r"native.*the run's precision"),
        ('accelerate:native={"static_graph":true}', r"native.*option 'static_graph'"),
        ('accelerate:native={"gradient_accumulation_steps":2}', r"native.*micro_batch_size"),
        ('accelerate:native={"project_dirs":"x"}', r"Did you mean 'project_dir'"),
        ("accelerate:static_graf=true", r"Did you mean 'static_graph'"),
        ("accelerate:tp=2", r"tp=2 cannot be had: .*divides no layers.*'mesh:tp=2'.*'zero2:tp=2'"),
        ("accelerate:plugin=fsdp,cp=2", r"cp=2 cannot be had: .*FSDP2.*plain DDP.*'mesh:cp=2'"),
        ("accelerate:sp=2", r"sp=2 cannot be had: .*Ulysses.*'mesh:cp=2,cp_kind=ulysses'"),
        ("accelerate:pp=2", r"pp=2 cannot be had: .*inference alone.*'mesh:pp=2'"),
        ("accelerate:ep=2", r"ep=2 cannot be had: .*divides no experts.*'mesh:ep=2'"),
        (
            'accelerate:plugin=deepspeed,deepspeed={"tp":2}',
            r"tp=2 is not proved where Accelerate calls.*'deepspeed:stage=2,tp=2', or 'mesh:tp=2'",
        ),
        ('accelerate:native={"parallelism_config":{"tp_size":2}}', r"native.*'mesh' divides"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, strategy: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(build(), DATA, strategy=strategy, **settings(tmp_path))
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        ("ACCELERATE_USE_FSDP", "true", "plugin='fsdp'"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "the strategy 'mesh'"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "plugin='deepspeed'"),
        ("ACCELERATE_MIXED_PRECISION", "bf16", "precision"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "micro_batch_size"),
        ("ACCELERATE_DYNAMO_BACKEND", "inductor", "compile"),
        ("ACCELERATE_TORCH_DEVICE", "meta", "device"),
    ],
)
def test_what_the_environment_sets_is_not_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, place: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}={value}.*{place}"):
        fit(build(), DATA, strategy="accelerate", **settings(tmp_path))


# -- installation ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "version", "reason"),
    [
        (None, "", r"Accelerate is not installed\."),
        (object(), "1.2.1", r"Accelerate 1\.2\.1 is installed, and this backend works with 1\.15"),
    ],
    ids=["missing", "old"],
)
def test_a_missing_or_wrong_accelerate_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: object, version: str, reason: str
) -> None:
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(installed.metadata, "version", lambda name: version)
    with pytest.raises(ConfigError, match=reason + r".* To fix it: unipar install accelerate"):
        fit(build(), DATA, strategy="accelerate", **settings(tmp_path))


@pytest.mark.usefixtures("new_interpreters")
def test_a_broken_accelerate_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate/__init__.py").write_text("raise OSError('libtorch.so: no such file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"fails to import: OSError: libtorch.*unipar install"):
        fit(build(), DATA, strategy="accelerate", **settings(tmp_path / "run"))


@pytest.mark.usefixtures("new_interpreters")
def test_the_strategy_is_found_without_importing_accelerate() -> None:
    code = (
        "import sys; from unipar.strategy import registry; s = registry.resolve('accelerate'); "
        "s.availability(); s.capabilities(); s.recipe(); sys.exit('accelerate' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- a run -----------------------------------------------------------------------------------------


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SMALL_RUN), *arguments], capture_output=True, text=True, timeout=150
    )


@pytest.mark.usefixtures("new_interpreters")
def test_a_run_prints_nothing_of_accelerates() -> None:
    done = run("warning")
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("steps: 6\n", "")


def test_a_rank_that_is_killed_ends_the_run_with_a_report() -> None:
    done = run("warning", "kill")
    assert done.returncode != 0
    assert "Rank 1 of 2 failed" in done.stderr
    assert "SIGKILL" in done.stderr


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_skips_the_step_and_the_schedule(fused: bool) -> None:
    """Accelerate itself takes each step of a fused optimizer as taken."""

    def optimizer(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named], lr=0.1, fused=fused)

    with Session("accelerate", device="cpu", precision="fp16") as session:
        schedule = {"name": "exponentiallr", "gamma": 0.5}
        engine: Any = session.prepare(
            build(), optimizer=optimizer, lr_scheduler=schedule, max_grad_norm=1.0
        )
        first, second, *_ = session.loader(DATA, global_batch_size=16)
        huge = engine.train_step(first, lambda model, batch: loss_fn(model, batch) * 1e30)
        assert (huge.skipped, engine.optimizer.param_groups[0]["lr"]) == (True, 0.1)
        assert not engine.train_step(second, loss_fn).skipped
        assert engine.optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("clip", [None, 1.0])
def test_an_overflow_skips_a_fused_step_where_the_scale_never_changes(clip: float | None) -> None:
    static = {"initial": 128, "growth_factor": 1, "backoff_factor": 1}
    with Session("accelerate", device="cpu", precision="fp16", loss_scale=static) as session:
        engine = session.prepare(
            nn.Linear(3, 2), optimizer={"name": "sgd", "lr": 0.01, "fused": True},
            global_batch_size=4, max_grad_norm=clip,
        )  # fmt: skip
        skipped = []
        for size in (1.0, 1e4, 1.0):
            engine.backward(engine(torch.full((4, 3), size)).float().square().mean(), num_items=4)
            skipped.append(engine.step().skipped)
    assert skipped == [False, True, False]
