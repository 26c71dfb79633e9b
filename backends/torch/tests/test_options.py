"""Every option of ddp and fsdp trains the same run as a hand-written loop, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain import BATCH, WIDTH, Model, batches, build, loss_fn
from torch import nn
from torch.distributed.tensor import DTensor

import unipar
from unipar.data.batch import Batch, MicroBatch
from unipar.errors import ConfigError
from unipar.strategy import EngineSpec, registry
from unipar.world import Placement


def reference() -> list[float]:
    """The plain loop; nothing of unipar in it."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for inputs, targets in batches():
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(placement: Placement, strategy: str, **spec: Any) -> dict[str, Any]:
    """Losses under a strategy, two micro-batches a rank, and what its parameters look like."""
    prepared = registry.resolve(strategy)
    world = prepared.setup(placement)
    model: nn.Module | Callable[[], nn.Module] = spec.pop("model", None) or build()
    engine = prepared.prepare(
        EngineSpec(
            model,
            optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
            max_grad_norm=0.5,
            **spec,
        ),
        world,
    )
    losses = []
    share = BATCH // placement.size
    for inputs, targets in batches():
        own = slice(placement.rank * share, (placement.rank + 1) * share)
        half = share // 2
        parts = [
            MicroBatch((inputs[own][at : at + half], targets[own][at : at + half]), half)
            for at in (0, half)
        ]
        losses.append(engine.train_step(Batch(tuple(parts), BATCH), loss_fn).loss)
    shards = [isinstance(p, DTensor) for p in engine.module.parameters()]
    units = [n for n, m in engine.module.named_modules() if type(m).__name__.startswith("FSDP")]
    world.leave()
    return {"losses": losses, "shards": shards, "units": units}


def largest_difference(losses: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference(), strict=True))


@pytest.mark.parametrize(
    "strategy",
    [
        "ddp:bucket_cap_mb=0.001",
        "ddp:static_graph=true",
        "ddp:find_unused_parameters=true",
        "ddp:gradient_as_bucket_view=false",
        "ddp:broadcast_buffers=false",
        "ddp:shard_optimizer=true",
        "fsdp:wrap=none",
        "fsdp:wrap=[Linear]",
        "fsdp:wrap_min_params=300",
        "fsdp:prefetch=1",
        "fsdp:keep_root=true",
        "fsdp:cpu_offload=true",
        "fsdp:sharding=grad_op",
        "fsdp:sharding=hybrid,shard_size=2",
        "fsdp:sharding=hybrid,shard_size=1",
        "fsdp:reduce_scatter_every_microbatch=false",
        "fsdp:reduce_scatter_every_microbatch=false,sharding=hybrid,shard_size=1",
    ],
)
def test_option_trains_the_same_run(world_pool: Any, strategy: str) -> None:
    results = world_pool(2).run(train, strategy)
    assert largest_difference(results[0]["losses"]) < 1e-5
    assert results[0]["losses"] == results[1]["losses"]


@pytest.mark.parametrize(
    ("strategy", "least", "most"),
    [
        # Half precision keeps 11 (fp16) or 8 (bf16) significant bits of each gradient.
        ("ddp:compression=fp16", 1e-9, 2e-3),
        ("ddp:compression=bf16", 1e-9, 2e-2),
        ("ddp:compression=powersgd,powersgd_start=2,powersgd_rank=1", 1e-7, 0.5),
        ("fsdp:reduce_dtype=bf16", 0.0, 1e-5),
    ],
)
def test_compressed_gradients_lose_what_they_say(
    world_pool: Any, strategy: str, least: float, most: float
) -> None:
    difference = largest_difference(world_pool(2).run(train, strategy)[0]["losses"])
    assert least <= difference < most


def test_reduce_dtype_takes_effect_under_bf16(world_pool: Any) -> None:
    def losses(strategy: str) -> list[float]:
        return world_pool(2).run(train, strategy, timeout=60)[0]["losses"]

    def train_bf16(placement: Placement, strategy: str) -> dict[str, Any]:
        return train(placement, strategy, precision="bf16")

    exact = world_pool(2).run(train_bf16, "fsdp")[0]["losses"]
    rounded = world_pool(2).run(train_bf16, "fsdp:reduce_dtype=bf16")[0]["losses"]
    gathered = world_pool(2).run(train_bf16, "fsdp:param_dtype=fp32")[0]["losses"]
    autocast = world_pool(2).run(train_bf16, "ddp")[0]["losses"]
    assert exact != rounded
    # Blocks are not cast into and out of fp32 then: it is autocast, as elsewhere.
    assert gathered == pytest.approx(autocast, rel=1e-6)
    for seen in (exact, rounded, gathered):
        assert largest_difference(seen) < 5e-2


@pytest.mark.parametrize("divided", [True, False])
def test_gradients_are_divided_between_microbatches_unless_kept_whole(
    world_pool: Any, divided: bool
) -> None:
    class Seeing(Model):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[set[str]] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # Those of what the root gathers are whole by now, and of the blocks shards.
            self.seen.append({type(p.grad).__name__ for p in self.parameters()} - {"NoneType"})
            return super().forward(x)

    def seen(placement: Placement) -> list[set[str]]:
        torch.manual_seed(3)
        model = Seeing()
        option = f"fsdp:reduce_scatter_every_microbatch={str(divided).lower()}"
        train(placement, option, model=model)
        return model.seen

    for found in world_pool(2).run(seen):
        assert found[:4] == [set(), {"DTensor" if divided else "Tensor"}] * 2


def test_fsdp_in_half_precision_computes_without_autocast(world_pool: Any) -> None:
    def seen(placement: Placement, strategy: str, precision: Any) -> set[Any]:
        found: set[Any] = set()

        class Looking(Model):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                autocast = torch.is_autocast_enabled("cpu")
                found.add((autocast, self.head.weight.dtype, x.dtype))
                return super().forward(x)

        train(placement, strategy, model=Looking(), precision=precision)
        return found

    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        run = world_pool(2).run
        assert run(seen, "fsdp", precision)[0] == {(False, dtype, dtype)}
        autocast = run(seen, "fsdp:param_dtype=fp32", precision)[0]
        assert autocast == {(True, torch.float32, torch.float32)}


class NormInFP32(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x.float()))


def test_tensors_of_other_dtypes_are_explained(world_pool: Any) -> None:
    def losses(placement: Placement, strategy: str, model: nn.Module) -> Any:
        inputs, targets = batches()[0]
        micro = MicroBatch((inputs[placement.rank :: 2], targets[placement.rank :: 2]), BATCH // 2)
        try:
            with unipar.Session(strategy, precision="bf16", placement=placement) as session:
                engine = session.prepare(model, optimizer="sgd")
                return engine.train_step(Batch((micro,), BATCH), loss_fn).loss
        except ConfigError as error:
            return str(error)

    for model in (NormInFP32(), nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))):
        for said in world_pool(2).run(losses, "fsdp", model):
            assert isinstance(said, float) or "fsdp:param_dtype=fp32" in said
        for loss in world_pool(2).run(losses, "fsdp:param_dtype=fp32", model):
            assert isinstance(loss, float)
    assert all(isinstance(said, str) for said in world_pool(2).run(losses, "fsdp", NormInFP32()))


def test_fsdp_shards_the_units_that_it_is_told(world_pool: Any) -> None:
    auto = world_pool(2).run(train, "fsdp")[0]
    assert auto["shards"] == [True] * len(auto["shards"])
    assert auto["units"] == ["", "blocks.0", "blocks.1", "blocks.2"]
    by_class = world_pool(2).run(train, "fsdp:wrap=[Linear]")[0]
    assert len(by_class["units"]) == 1 + 8
    assert world_pool(2).run(train, "fsdp:wrap=none")[0]["units"] == [""]


class HeldInDicts(Model):
    """The same model, whose blocks stand in containers that cannot be called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"block": block, "after": nn.Identity()}) for block in self.blocks
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) * self.scale
        for held in self.blocks:
            assert isinstance(held, nn.ModuleDict)
            x = held["after"](held["block"](x))
        return self.head(x)


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp:wrap_min_params=300"])
def test_blocks_held_by_what_cannot_be_called_are_units(world_pool: Any, strategy: str) -> None:
    def held(placement: Placement, **spec: Any) -> dict[str, Any]:
        torch.manual_seed(3)
        return train(placement, strategy, model=HeldInDicts(), **spec)

    def recomputed(placement: Placement) -> dict[str, Any]:
        return held(placement, activation_checkpointing="full")

    for trained in (held, recomputed):
        seen = world_pool(2).run(trained)[0]
        assert seen["units"] == ["", "blocks.0.block", "blocks.1.block", "blocks.2.block"]
        assert largest_difference(seen["losses"]) < 1e-5


def test_a_class_or_a_model_that_cannot_be_called_is_refused(world_pool: Any) -> None:
    def held(placement: Placement, strategy: str, **spec: Any) -> Any:
        return train(placement, strategy, model=HeldInDicts(), **spec)

    says = r"'ModuleDict' has no forward of its own.* The model has: Block, HeldInDicts, Identity"
    with pytest.raises(ConfigError, match=rf"fsdp: wrap: a {says}"):
        world_pool(1).run(held, "fsdp:wrap=[ModuleDict]")

    def recomputed(placement: Placement) -> Any:
        return held(placement, "single", activation_checkpointing=("ModuleDict",))

    with pytest.raises(ConfigError, match=rf"activation_checkpointing: a {says}"):
        world_pool(1).run(recomputed)

    def alone(placement: Placement) -> Any:
        return train(placement, "fsdp", model=nn.ModuleDict({"model": Model()}))

    with pytest.raises(ConfigError, match=r"model is a ModuleDict, which has no forward.* Hold it"):
        world_pool(1).run(alone)


def test_model_function_gives_the_weights_of_building_it(world_pool: Any) -> None:
    def from_function(placement: Placement) -> dict[str, Any]:
        return train(placement, "fsdp", model=Model, seed=3)

    assert largest_difference(world_pool(2).run(from_function)[0]["losses"]) < 1e-5


def test_ranks_that_built_different_weights_start_from_rank_zeros(world_pool: Any) -> None:
    def own_weights(placement: Placement, strategy: str) -> dict[str, Any]:
        torch.manual_seed(3 + placement.rank)
        return train(placement, strategy, model=Model())

    for strategy in ("ddp", "fsdp"):
        assert largest_difference(world_pool(2).run(own_weights, strategy)[0]["losses"]) < 1e-5


def test_activation_checkpointing_and_compile_keep_the_run(world_pool: Any) -> None:
    def recomputed(placement: Placement, strategy: str, policy: Any) -> dict[str, Any]:
        return train(placement, strategy, activation_checkpointing=policy)

    for strategy in ("ddp", "fsdp"):
        for policy in ("full", ("Block",)):
            seen = world_pool(2).run(recomputed, strategy, policy)[0]["losses"]
            assert largest_difference(seen) < 1e-5


def graphs(placement: Placement, strategy: Any, by_hand: bool) -> int:
    """How many graphs a step's passes are compiled to, of a model of several layers."""
    found: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        found.append(graph)
        return graph.forward

    def mean(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    # DDP's first bucket is of a MiB, which each of the layers fills.
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))
    with unipar.Session(strategy, device="cpu", placement=placement) as session:
        engine = session.prepare(
            model, optimizer={"name": "sgd", "lr": 0.1}, compile={"backend": backend}
        )
        x = torch.ones(2, 512)
        if by_hand:
            with engine.microbatch(last=True):
                engine.backward(mean(engine, x), num_items=2)
            engine.step()
        else:
            engine.train_step(Batch((MicroBatch(x, 2),), 2), mean)
    return len(found)


@pytest.mark.slow
def test_graphs_of_a_users_own_loop_end_where_buckets_do(world_pool: Any) -> None:
    """Else no gradient would be summed before all of them are there."""
    strategy = {"name": "ddp", "bucket_cap_mb": 1.0}
    [of_steps] = world_pool(1).run(graphs, strategy, False)
    [by_hand] = world_pool(1).run(graphs, strategy, True)
    assert by_hand == of_steps > 1


@pytest.mark.slow
@pytest.mark.parametrize("by_hand", [False, True])
def test_blocks_of_torchs_own_classes_are_compiled_under_fsdp(
    world_pool: Any, by_hand: bool
) -> None:
    assert world_pool(1).run(graphs, "fsdp", by_hand)[0] > 0


def test_fp16_overflow_on_one_shard_skips_the_step_on_all(world_pool: Any) -> None:
    def overflow(placement: Placement, strategy: str) -> tuple[bool, bool, float]:
        prepared = registry.resolve(strategy)
        world = prepared.setup(placement)
        model = build()
        with torch.no_grad():
            # No gradient goes further back.
            model.head.weight[2].zero_()  # pyright: ignore[reportIndexIssue, reportOptionalSubscript]
        engine = prepared.prepare(
            EngineSpec(
                model,
                optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1e-2),
                precision="fp16",
            ),
            world,
        )

        def huge_head(model: Any, batch: Any) -> torch.Tensor:
            # Only the last rows of the head, which are the last rank's shard, overflow.
            return model(batch[0])[:, 2].sum() * 0.1

        inputs, targets = batches()[0]
        own = slice(placement.rank * 4, placement.rank * 4 + 4)
        batch = Batch((MicroBatch((inputs[own] * 100, targets[own]), 4),), BATCH)
        first = last = engine.train_step(batch, huge_head)
        for _ in range(12):
            last = engine.train_step(batch, lambda m, b: m(b[0]).mean() * 1e-3)
        world.leave()
        return first.skipped, last.skipped, last.loss

    for strategy in ("ddp", "fsdp"):
        seen = world_pool(2).run(overflow, strategy)
        assert [s[0] for s in seen] == [True, True], strategy
        assert [s[1] for s in seen] == [False, False], strategy


def test_loss_functions_cannot_go_around_ddp(world_pool: Any) -> None:
    def uses(placement: Placement, name: str) -> Any:
        def around(model: Any, batch: Any) -> torch.Tensor:
            value: Any = getattr(model, name)
            return loss_fn(value, batch) if callable(value) else loss_fn(model, batch)

        prepared = registry.resolve("ddp")
        world = prepared.setup(placement)
        model = build()
        model.config = {"width": WIDTH}  # pyright: ignore[reportArgumentType]
        engine = prepared.prepare(
            EngineSpec(model, optimizer=lambda n: torch.optim.SGD([p for _, p in n], lr=0.1)), world
        )
        batch = Batch((MicroBatch(batches()[0], BATCH),), 2 * BATCH)
        try:
            return engine.train_step(batch, around).loss
        except ConfigError as error:
            return str(error)
        finally:
            world.leave()

    assert isinstance(world_pool(2).run(uses, "config")[0], float)
    message = world_pool(2).run(uses, "head")[0]
    assert "model.head" in message
    assert "Call model(...)" in message


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        ("ddp:bucket_cap_mb=-1", "bucket_cap_mb"),
        ("ddp:compression=fp8", "powersgd"),
        ("fsdp:shard_size=2", "hybrid"),
        ("fsdp:sharding=ful", "'full'"),
        ("fsdp:wrap=none,wrap_min_params=3", "not both"),
    ],
)
def test_wrong_options_are_refused(strategy: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        registry.resolve(strategy)


@pytest.mark.parametrize(
    ("strategy", "size", "says"),
    [
        ("ddp:sync_batchnorm=true", 2, "needs a GPU"),
        ("fsdp:sharding=hybrid,shard_size=3", 4, "does not divide 4"),
        ("dp", 1, "strategy='ddp'"),
        ("single", 2, "one device"),
    ],
)
def test_options_that_do_not_fit_the_run_are_refused(strategy: str, size: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        registry.resolve(strategy).check(EngineSpec(build), Placement(size=size))


def test_unknown_class_names_are_refused(world_pool: Any) -> None:
    with pytest.raises(ConfigError, match=r"no module of class 'Blok'. Did you mean 'Block'"):
        world_pool(1).run(train, "fsdp:wrap=[Blok]")
