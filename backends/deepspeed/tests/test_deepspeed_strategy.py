"""What a user of DeepSpeed meets: options, refusals, memory, a quiet terminal, lost processes."""

from __future__ import annotations

import gc
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unipar import Callback, Session, fit
from unipar.data.batch import Batch, MicroBatch
from unipar.errors import CheckpointError, ConfigError, WorkerError
from unipar.strategy import EngineSpec, Strategy
from unipar.strategy.registry import resolve
from unipar.testing.harness import on_strategy
from unipar.testing.kit import Kit, Target
from unipar.testing.pool import WorldPools
from unipar.testing.scenarios import Scenario, warmup_and_decay
from unipar.world import Placement, World
from unipar_deepspeed import framework
from unipar_deepspeed.config import deepspeed_config
from unipar_deepspeed.options import DeepSpeedOptions, ZeRO3Options
from unipar_deepspeed.strategy import DeepSpeedStrategy

DATA = (torch.randn(64, 4), torch.randint(0, 2, (64,)))


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def build(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))


def settings(directory: Path, **changed: Any) -> dict[str, Any]:
    quiet = {"progress": False, "output_dir": directory, "loss": loss_fn}
    return {"device": "cpu", "devices": 2, "global_batch_size": 16, "steps": 4, **quiet, **changed}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def one_after_another(placement: Placement) -> None:
    # Of three dimensions, for DeepSpeed's linear layer fuses the bias of two.
    batch = Batch((MicroBatch(torch.ones(8, 3, 4), 8),), 8)
    own = nn.functional.linear
    for strategy, keeping in (("zero3", "off"), ("ddp", "selective")):
        with Session(strategy, device="cpu", placement=placement) as session:
            net = nn.Sequential(Residual(), Residual())
            engine = session.prepare(net, optimizer="sgd", activation_checkpointing=keeping)
            engine.train_step(batch, lambda model, x: model(x).square().mean())
    assert nn.functional.linear is own


def test_stage_3_leaves_torchs_linear_layers_to_the_next_session(world_pool: WorldPools) -> None:
    world_pool(1).run(one_after_another)


def named_under_stage_3(placement: Placement) -> list[str]:
    seen: list[str] = []

    def naming(model: Any, batch: Any) -> torch.Tensor:
        seen.extend(name for name, _ in model.named_parameters())
        return loss_fn(model, batch)

    with Session("zero3", device="cpu", placement=placement) as session:
        engine = session.prepare(build(), optimizer="sgd")
        engine.train_step(Batch((MicroBatch(DATA, len(DATA[0])),), placement.size * 64), naming)
    return seen


def test_a_loss_may_name_parameters_that_ranks_divide(world_pool: WorldPools) -> None:
    """The kit lets a strategy that divides them refuse their names, too."""
    names = [name for name, _ in build().named_parameters()]
    assert world_pool(2).run(named_under_stage_3) == [names, names]


# -- optimizers ------------------------------------------------------------------------------------


def test_an_optimizer_that_needs_whole_tensors_is_refused(tmp_path: Path) -> None:
    message = r"zero1: the optimizer Adafactor cannot be used .*% off .*whole \(.*ddp"
    with pytest.raises(ConfigError, match=message):
        fit(build(), DATA, strategy="zero1", optimizer="adafactor", **settings(tmp_path))


def adagrad(named: Any) -> torch.optim.Optimizer:
    named = list(named)
    matrices = [p for _, p in named if p.ndim > 1]
    others = {"params": [p for _, p in named if p.ndim < 2], "lr": 0.004}
    return torch.optim.Adagrad([{"params": matrices}, others], lr=0.01)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_adagrad_keeps_its_groups_and_follows_the_scheduler(
    strategy: str, world_pool: WorldPools
) -> None:
    # DeepSpeed builds it once more, from its defaults alone.
    scenario = Scenario(optimizer=adagrad, scheduler=warmup_and_decay, num_steps=6)
    kit = Kit(Target.named(strategy), 2, world_pool)
    (run,) = kit.train(scenario)
    kit.check(run, scenario)


# -- what is refused before any process starts -----------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("deepspeed:stage=4", r"stage.*0, 1, 2 or 3"),
        ("deepspeed:stage=2,offload_parameters=true", r"offload_parameters .*stage 2.*Set stage=3"),
        ("zero1:prefetch_bucket_size=5", r"prefetch_bucket_size means nothing in ZeRO stage 1"),
        ("deepspeed:stage=0,offload_optimizer=true", r"offload_optimizer .*stage 0"),
        ("zero2:stage=2", r"stage"),
        ("zero2:offload_optimiser=true", r"offload_optimiser.*Did you mean 'offload_optimizer'"),
        ("zero1:overlap_comm=true", r"overlap_comm=true needs a GPU"),
        ('zero1:native={"bf16":{"enabled":true}}', r"native sets DeepSpeed's 'bf16'.* precision"),
        ('zero2:native={"prescale_gradients":true}', r"'prescale_gradients', .* which sums"),
        (
            'zero3:native={"zero_optimization":{"stage3_max_live_parameters":9}}',
            r"'zero_optimization.stage3_max_live_parameters', which .* max_live_parameters",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, strategy: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(build(), DATA, strategy=strategy, **settings(tmp_path))
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_parameter_without_dimensions_is_refused(tmp_path: Path) -> None:
    model = build()
    model.scale = nn.Parameter(torch.tensor(1.0))  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ConfigError, match=r"'scale' has no dimension.*shape \(1,\)"):
        fit(model, DATA, strategy="zero1", **settings(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_weights_that_float32_cannot_hold_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=rf"zero2: parameter '.*' is {dtype}.*strategy='ddp'"):
        fit(build().to(dtype), DATA, strategy="zero2", **settings(tmp_path))


class Given:
    """An output that DeepSpeed does not look into."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class Giving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = build()

    def forward(self, x: torch.Tensor) -> Given:
        return Given(self.layers(x))


def test_an_output_that_stage_3_does_not_look_into_is_refused(tmp_path: Path) -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]).logits, batch[1])

    with pytest.raises(ConfigError, match=r"the model \(Giving\) gives a Given, .*Give a tensor"):
        fit(Giving(), DATA, strategy="zero3", **settings(tmp_path, loss=loss))


def test_steps_that_zero_drops_cannot_be_kept(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ZeRO drops a step.*on_nan='skip'"):
        fit(build(), DATA, strategy="zero2", on_nan="ignore", **settings(tmp_path))


def test_several_models_are_refused() -> None:
    assert not DeepSpeedStrategy(DeepSpeedOptions()).capabilities().several_engines


@pytest.mark.parametrize(
    ("found", "version", "reason"),
    [
        (None, "", r"DeepSpeed is not installed\."),
        (object(), "0.16.2", r"DeepSpeed 0\.16\.2 is installed, and this backend works with 0\.19"),
    ],
    ids=["missing", "old"],
)
def test_a_missing_or_wrong_deepspeed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: object, version: str, reason: str
) -> None:
    monkeypatch.setattr(framework.importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(framework.metadata, "version", lambda name: version)
    with pytest.raises(ConfigError, match=reason + r".* To fix it: unipar install deepspeed"):
        fit(build(), DATA, strategy="zero1", **settings(tmp_path))


@pytest.mark.usefixtures("new_interpreters")
def test_a_broken_deepspeed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed/__init__.py").write_text("raise OSError('libaio.so.1: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"fails to import: OSError: libaio.*unipar install"):
        fit(build(), DATA, strategy="zero1", **settings(tmp_path / "run"))


@pytest.mark.usefixtures("new_interpreters")
def test_importing_the_strategy_imports_no_deepspeed() -> None:
    code = "import sys, unipar_deepspeed.strategy; sys.exit('deepspeed' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- what DeepSpeed is told ------------------------------------------------------------------------


def test_native_keys_are_merged_in() -> None:
    native = {"zero_optimization": {"zero_hpz_partition_size": 2}, "wall_clock_breakdown": True}
    options = ZeRO3Options(native=native, prefetch_bucket_size=10**6)
    spec = EngineSpec(build(), max_grad_norm=0.5, micro_batch_size=4)
    made = deepspeed_config(options, spec, world_size=2, num_parameters=100)
    assert made["wall_clock_breakdown"] is True
    assert made["gradient_clipping"] == 0.5
    assert made["train_batch_size"] == 8
    zero = made["zero_optimization"]
    assert (zero["stage"], zero["zero_hpz_partition_size"]) == (3, 2)
    assert zero["stage3_prefetch_bucket_size"] == zero["reduce_bucket_size"] == 100


def test_no_clipping_is_no_clipping() -> None:
    """DeepSpeed's own default clips to 1."""
    for norm in (None, math.inf):
        spec = EngineSpec(build(), max_grad_norm=norm)
        assert deepspeed_config(DeepSpeedOptions(), spec, 1, 9)["gradient_clipping"] == 0.0


# -- what is divided -------------------------------------------------------------------------------


def held_elements(strategy: Strategy, world: World) -> dict[str, int]:
    """Elements of weights and moments that this rank describes as its own after a step."""
    scenario = Scenario()
    engine = strategy.prepare(scenario.spec(world.data_size), world)
    engine.train_step(next(iter(scenario.loader(world.data_rank, world.data_size))), scenario.loss)
    state = engine.export_state()
    counts = {
        kind: sum(
            math.prod(box.sizes) for tensor in tensors for box in tensor.boxes if tensor.shape
        )
        for kind, tensors in (("weights", state.weights), ("optimizer", state.optimizer))
    }
    counts["parameters"] = engine.num_parameters
    engine.close()
    return counts


@pytest.mark.parametrize(
    ("strategy", "weights", "optimizer"),
    [
        ("deepspeed:stage=0", 1, 1),
        ("zero1", 1, 2),
        ("zero2", 1, 2),
        ("zero3:persistence_threshold=0", 2, 2),
    ],
)
def test_each_rank_holds_its_share(
    world_pool: WorldPools, strategy: str, weights: int, optimizer: int
) -> None:
    total = sum(p.numel() for p in Scenario().build().parameters())
    ranks = world_pool(2).run(on_strategy, lambda: resolve(strategy), held_elements, ())
    assert [rank["parameters"] for rank in ranks] == [total, total]
    for rank in ranks:
        # Buffers are whole everywhere, and shares differ by padding.
        assert rank["weights"] == pytest.approx(total / weights, rel=0.1)
        assert rank["optimizer"] == pytest.approx(2 * total / optimizer, rel=0.1)


def optimizers_of_stage_3() -> int:
    from deepspeed.runtime.zero import stage3  # pyright: ignore

    gc.collect()
    return sum(type(one) is stage3.DeepSpeedZeroOptimizer_Stage3 for one in gc.get_objects())


def while_training(placement: Placement, strategy: str) -> int:
    with Session(strategy=strategy, placement=placement) as session:
        engine = session.prepare(build(), optimizer="adamw")
        for batch in session.loader(DATA, global_batch_size=16):
            engine.train_step(batch, loss_fn)
        return optimizers_of_stage_3()


def during_and_after(placement: Placement, strategy: str) -> tuple[int, int]:
    before = optimizers_of_stage_3()
    return while_training(placement, strategy) - before, optimizers_of_stage_3() - before


def test_nothing_of_stage_3_outlives_its_session(world_pool: WorldPools) -> None:
    assert world_pool(2).run(during_and_after, "zero3") == [(1, 0), (1, 0)]


# -- a run -----------------------------------------------------------------------------------------

SCRIPT = """
import sys, torch
from unipar import fit

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
data = (torch.randn(64, 4), torch.randint(0, 2, (64,)))
before = [p.detach().clone() for p in model.parameters()]
fit(model, data, strategy="zero3", devices=2, device="cpu", global_batch_size=16, steps=4,
    loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
    precision="bf16", output_dir=sys.argv[1], log_level=sys.argv[2], progress=False)
assert all((p - q).abs().max() > 0 for p, q in zip(model.parameters(), before))
print("trained")
"""


def run_script(directory: Path, level: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONWARNINGS"}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(directory), level],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=True,
    )


@pytest.mark.usefixtures("new_interpreters")
def test_the_terminal_is_quiet(tmp_path: Path) -> None:
    done = run_script(tmp_path / "quiet", "info")
    assert (done.stdout, done.stderr) == ("trained\n", "")


@pytest.mark.thorough
@pytest.mark.usefixtures("new_interpreters")
def test_at_debug_deepspeed_is_heard(tmp_path: Path) -> None:
    done = run_script(tmp_path / "loud", "debug")
    assert "DeepSpeed" in done.stdout + done.stderr


class KillOnce(Callback):
    every_rank = True

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def on_step_end(self, run: Any, record: Any) -> None:
        if run.rank == 1 and record.step == 3 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_killed_rank_is_reported(tmp_path: Path, strategy: str) -> None:
    killed = {"strategy": strategy, "callbacks": [KillOnce(tmp_path / "killed")], "timeout": 30}
    with pytest.raises(WorkerError, match=r"[Rr]ank 1.*(SIGKILL|killed)") as caught:
        fit(build(), DATA, **settings(tmp_path / "run", **killed))
    assert caught.value.rank == 1


@pytest.mark.parametrize("strategy", [pytest.param("zero2", marks=pytest.mark.thorough), "zero3"])
def test_a_run_goes_on_from_its_checkpoint_after_a_rank_was_killed(
    tmp_path: Path, strategy: str
) -> None:
    callbacks = [KillOnce(tmp_path / "killed")]
    saves = {"every_steps": 2, "async": False}
    again = {"max_restarts": 1, "checkpoint": saves, "callbacks": callbacks}
    result = fit(build(), DATA, strategy=strategy, **settings(tmp_path / "run", **again))
    assert (tmp_path / "killed").exists()
    assert [record.step for record in result.history] == [3, 4]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    saved = fit(build(), DATA, strategy="single", **settings(tmp_path / "a", devices=1))
    with pytest.raises(CheckpointError, match=r"0\.weight: stored \[8, 4\], wanted \[16, 4\]"):
        fit(
            build(16),
            DATA,
            strategy="zero3",
            resume=saved.checkpoint,
            **settings(tmp_path / "b", steps=6),
        )


def backward_of_torch(placement: Placement) -> str:
    with Session("zero2", placement=placement) as session:
        engine = session.prepare(build(), optimizer={"name": "sgd", "lr": 0.1})
        loss = engine(torch.ones(2, 4)).square().mean()
        with pytest.raises(ConfigError) as refused:
            loss.backward()
        return str(refused.value)


def test_a_loss_that_is_not_given_to_the_engine_is_told_where_to_go(
    world_pool: WorldPools,
) -> None:
    for said in world_pool(1).run(backward_of_torch):
        assert "call backward(loss) of the engine" in said
