"""Stages beside the other axes of ``mesh``, on four ranks and eight: what FSDP is asked for, ties,
middle stages, both ways of dividing at once, and going on under other strategies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_mesh_pipeline import OBJECTIVE, SCHEDULES, Deep, DeepTied
from torch import nn
from torch.profiler import ProfilerActivity, profile

import unipar
from unipar import checkpoint
from unipar.data.batch import Batch, MicroBatch
from unipar.errors import ConfigError
from unipar.strategy import Strategy
from unipar.testing import models
from unipar.testing.cases import ALL, Case
from unipar.testing.cases.numbers import PLAIN, TOKENS
from unipar.testing.cases.shapes import DECODER
from unipar.testing.kit import Kit, Target
from unipar.testing.pool import WorldPools
from unipar.testing.scenarios import NUM_SAMPLES, sgd
from unipar.world import Placement
from unipar_torch.mesh import MeshStrategy
from unipar_torch.mesh_options import MeshOptions

CASES = {case.name: case for case in ALL}


def made(**options: Any) -> Callable[[], Strategy]:
    return lambda: MeshStrategy(MeshOptions(**{"pp": 2, **options}))


def kit_of(world_pool: WorldPools, size: int = 4, **options: Any) -> Kit:
    return Kit(Target(f"mesh with {options}", made(**options)), size, world_pool)


class DeepDecoder(models.Decoder):
    """A block for each of four stages."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([*self.blocks, *models.Decoder().blocks])


CLIPPED = {"accumulation": 4, "max_grad_norm": 0.25, "optimizer": sgd}

# -- the conformance kit ---------------------------------------------------------------------------

MIXES = {
    "tp": ({"tp": 2}, 4),
    "dp_replicate": ({"dp_shard": 1, "dp_replicate": 2}, 4),
    "dp_shard, tp": ({"dp_shard": 2, "tp": 2}, 8),
}
"""Beside the one that four ranks are where nothing else is said."""
PROOFS = [
    pytest.param(mix, case, id=f"{mix}-{case.name}", marks=() if brief else pytest.mark.thorough)
    for mix, (_, size) in MIXES.items()
    for case in ALL
    if case.applies(size)
    for brief in [(mix, case.name) == ("tp", "divides_a_decoder")]
]


@pytest.mark.parametrize(("mix", "case"), PROOFS)
def test_mixes_are_the_same_run(mix: str, case: Case, world_pool: WorldPools) -> None:
    options, size = MIXES[mix]
    case.check(kit_of(world_pool, size, **options))


# -- what FSDP is asked for ------------------------------------------------------------------------

SHARDED = [
    {"dp_shard": 2, "schedule": "interleaved", "reduce_scatter_every_microbatch": False},
    *(
        pytest.param(options, marks=pytest.mark.thorough)
        for options in (
            {"dp_shard": 2, "schedule": "gpipe", "sharding": "grad_op", "prefetch": 1},
            {"dp_shard": 2, "wrap": "none", "reduce_scatter_every_microbatch": False},
            {"dp_shard": 2, "wrap": ("LayerNorm",), "schedule": "interleaved"},
            {"dp_shard": 2, "wrap_min_params": 150},
            {"dp_replicate": 2, "schedule": "interleaved", "sharding": "grad_op"},
        )
    ),
]


@pytest.mark.parametrize("options", SHARDED, ids=str)
def test_stages_divided_by_fsdp_train_the_same_run(
    options: dict[str, Any], world_pool: WorldPools
) -> None:
    """Tied embeddings on two ranks, clipped, accumulated; a stage without anything but blocks."""
    scenarios = [
        replace(TOKENS, model=DeepTied, num_steps=5, **CLIPPED),
        replace(PLAIN, model=Deep, accumulation=5, num_steps=6, activation_checkpointing="full"),
    ]
    kit = kit_of(world_pool, **options)
    for run, scenario in zip(kit.train(*scenarios), scenarios, strict=True):
        kit.check(run, scenario)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"param_dtype": "fp32"}, {"reduce_dtype": "bf16"}], ids=str)
def test_half_precision_is_as_near_as_that_of_the_loop(
    options: dict[str, Any], world_pool: WorldPools
) -> None:
    CASES["keeps_to_bf16"].check(kit_of(world_pool, dp_shard=2, **options))


# -- layers ----------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_divided_layers_take_every_schedule(schedule: str, world_pool: WorldPools) -> None:
    scenarios = [replace(DECODER, model=DeepDecoder, num_steps=5, **CLIPPED)]
    kit = kit_of(world_pool, tp=2, schedule=schedule)
    for run, scenario in zip(kit.train(*scenarios), scenarios, strict=True):
        kit.check(run, scenario)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"dp_shard": 2}, {"dp_replicate": 2}], ids=str)
def test_layers_stages_and_parameters_are_divided_at_once(
    options: dict[str, Any], world_pool: WorldPools
) -> None:
    scenarios = [
        replace(DECODER, num_steps=5),
        replace(DECODER, num_steps=5, activation_checkpointing="full", **CLIPPED),
        replace(DECODER, model=DeepDecoder, num_steps=4, accumulation=2),
    ]
    kit = kit_of(world_pool, 8, tp=2, **options)
    for run, scenario in zip(kit.train(*scenarios), scenarios, strict=True):
        kit.check(run, scenario)


# -- going on --------------------------------------------------------------------------------------


class Even(nn.Module):
    """Blocks whose layers divide among two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(models.FEATURES, 8)
        self.blocks = nn.ModuleList(Pair() for _ in range(4))
        self.outward = nn.Linear(8, models.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inward(x)
        for block in self.blocks:
            x = block(x)
        return self.outward(x)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def samples(step: int) -> dict[str, torch.Tensor]:
    return models.points(NUM_SAMPLES).batch(list(range(8 * step, 8 * step + 8)))


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.01)


def part_of_run(
    placement: Placement, strategy: Any, directory: Path, start: int, stop: int
) -> list[float]:
    """Steps of a session, from the checkpoint of the last one if there is one; their losses."""
    with unipar.Session(strategy, device="cpu", placement=placement) as session:
        world = session.world
        torch.manual_seed(3)
        engine = session.prepare(Even(), optimizer=adamw)
        if start:
            checkpoint.load(directory / f"step-{start:08d}", session.engines, world)
        losses = []
        share = 8 // world.data_size
        for step in range(start, stop):
            first = share * world.data_rank
            own = {key: value[first : first + share] for key, value in samples(step).items()}
            half = share // 2
            halves = [{k: v[at : at + half] for k, v in own.items()} for at in (0, half)]
            parts = tuple(MicroBatch(one, half) for one in halves)
            losses.append(engine.train_step(Batch(parts, 8), OBJECTIVE).loss)
        checkpoint.save(directory, session.engines, world, step=stop, strategy="any")
        return losses


def plain_run() -> list[float]:
    """The same steps in plain PyTorch."""
    torch.manual_seed(3)
    model, losses = Even(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(6):
        data = samples(step)
        loss = nn.functional.cross_entropy(model(data["x"]), data["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.thorough
def test_a_run_goes_on_under_other_strategies_and_comes_back(
    world_pool: WorldPools, tmp_path: Path
) -> None:
    """Weights and moments of layers, then of shards, on other stages; from and to one process."""
    staged = {"name": "mesh", "pp": 2, "dp_shard": 2, "schedule": "interleaved"}
    first = world_pool(4).run(part_of_run, "mesh:pp=2,tp=2", tmp_path, 0, 2)[0]
    second = world_pool(1).run(part_of_run, "single", tmp_path, 2, 4)[0]
    third = world_pool(4).run(part_of_run, staged, tmp_path, 4, 6)[0]
    assert [*first, *second, *third] == pytest.approx(plain_run(), rel=1e-5)


def reductions(placement: Placement, strategy: Any) -> int:
    """How often FSDP reduces in a step of four micro-batches, after one that checks the cut."""
    with unipar.Session(strategy, device="cpu", placement=placement) as session:
        engine = session.prepare(Even(), optimizer=adamw)
        parts = [{k: v[at : at + 2] for k, v in samples(0).items()} for at in (0, 2, 4, 6)]
        batch = Batch(tuple(MicroBatch(part, 2) for part in parts), 16)
        engine.train_step(batch, OBJECTIVE)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            engine.train_step(batch, OBJECTIVE)
        # torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py.
        return sum("FSDP::post_backward_reduce" in event.name for event in seen.events() or ())


@pytest.mark.thorough
@pytest.mark.parametrize(("every", "times"), [(True, 4), (False, 1)])
def test_gradients_are_reduced_as_often_as_is_said(
    every: bool, times: int, world_pool: WorldPools
) -> None:
    """Of two blocks, and of what is outside of blocks on the first and the last stage."""
    strategy = {"name": "mesh", "pp": 2, "reduce_scatter_every_microbatch": every}
    assert world_pool(4).run(reductions, strategy) == [3 * times] * 4


# -- what cannot be --------------------------------------------------------------------------------

REFUSED = {
    "a schedule that splits": ({"schedule": "zero-bubble"}, 4, "weights when FSDP has let go"),
    "the other one": ({"schedule": "dualpipev", "dp_replicate": 2}, 4, "dp_replicate=2 is not"),
    "nothing to shard": ({"tp": 2, "wrap": "none"}, 4, "wrap=none says .* Start 8 processes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_refused_before_any_process_starts(name: str) -> None:
    options, size, said = REFUSED[name]
    with pytest.raises(ConfigError, match=said):
        made(**options)().check(replace(PLAIN, model=Even).spec(1), Placement(size=size))


def one_step(placement: Placement, strategy: Any, model: Any) -> None:
    with unipar.Session(strategy, device="cpu", placement=placement) as session:
        engine = session.prepare(model(), optimizer=adamw)
        data = {key: value[:2] for key, value in samples(0).items()}
        engine.train_step(Batch((MicroBatch(data, 2),), 2), OBJECTIVE)


class Nested(nn.Module):
    """All blocks are within a module that may be a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Even()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Scaled(Pair):
    """What is computed between its layers may be over the whole width."""

    whole = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x)
        return x + self.down(torch.softmax(up, dim=-1) if self.whole else torch.relu(up))


class Softmaxed(Even):
    """On the second of two stages it is."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(4))
        for block in self.blocks[2:]:
            block.whole = True  # pyright: ignore


class Twin(Even):
    """Its first and third block have a bias in common."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.bias = self.blocks[0].up.bias  # pyright: ignore


class Costly(Pair):
    """It keeps a cost of its weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cost = self.up.bias.sum()
        return super().forward(x)


class Costs(Even):
    """It adds what its last block keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Costly() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.blocks[3].cost  # pyright: ignore


WRONG = {
    "a unit of several stages": ({"dp_shard": 2, "wrap": ["Even"]}, Nested, "'body' (Even) a unit"),
    "one parameter twice on a rank": (
        {"dp_shard": 2, "schedule": "interleaved", "wrap": "none"},
        Twin,
        "'blocks.0.up.bias' is on two stages of one rank",
    ),
    "weights of blocks in the loss": ({"dp_shard": 2}, Costs, "depends on 'blocks.3.up.bias'"),
    "a plan that changes a stage": (
        {"tp": 2, "plan": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}},
        Softmaxed,
        "dividing 'blocks.2' (Scaled)",
    ),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.thorough) for name in WRONG])
def test_what_would_be_wrong_is_refused(name: str, world_pool: WorldPools) -> None:
    options, model, said = WRONG[name]
    strategy = {"name": "mesh", "pp": 2, **options}
    with pytest.raises(ConfigError) as error:
        world_pool(4).run(one_step, strategy, model)
    assert said in str(error.value)
