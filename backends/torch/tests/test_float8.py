"""``precision="fp8"``: the numbers of torchao in a loop by hand, and a model that stays the user's.

Without a GPU numbers are rounded to float8, and multiplied in fp32.
"""

from __future__ import annotations

import copy
import logging
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from plain import BATCH, STEPS, batches, build, loss_fn
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call

from unipar import checkpoint
from unipar.data.batch import Batch, MicroBatch
from unipar.engine import compute_in_float8
from unipar.engine.checks import check_gradients
from unipar.errors import ConfigError
from unipar.strategy import EngineSpec, Precision, registry
from unipar.world import Placement, World

pytestmark = pytest.mark.skipif(
    not hasattr(nn.functional, "ScalingType"), reason="torchao 0.18 needs torch 2.11"
)

FITTING = {f"blocks.{i}.{half}" for i in range(3) for half in ("inner", "outer")}


def emulated() -> Any:
    return mock.patch.dict(compute_in_float8.__kwdefaults__, emulate=True)  # pyright: ignore[reportArgumentType]


def by_hand(parts: int = 1, *, gathered: bool = False) -> list[float]:
    """The plain loop with torchao; nothing of unipar in it.

    Args:
        parts: how many ranks share a batch; each has scales of its own.
        gathered: whether ranks compute with weights that are rounded to bf16.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = build()
    config = Float8LinearConfig(emulate=True, pad_inner_dim=True)
    convert_to_float8_training(
        model, module_filter_fn=lambda module, name: name in FITTING, config=config
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches():
        total = 0.0
        for inputs, targets in zip(*(tensor.chunk(parts) for tensor in batch), strict=True):
            weights = {name: p.to(torch.bfloat16) for name, p in model.named_parameters()}
            with torch.autocast("cpu", torch.bfloat16):
                if gathered:
                    outputs = functional_call(model, weights, inputs.to(torch.bfloat16)).float()
                else:
                    outputs = model(inputs)
                loss = nn.functional.cross_entropy(outputs, targets, reduction="sum") / BATCH
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def prepared(
    placement: Placement, strategy: str, precision: Precision = "fp8", **spec: Any
) -> tuple[Any, Any]:
    found = registry.resolve(strategy)
    world = found.setup(placement)
    asked = EngineSpec(
        spec.pop("model", None) or build(),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
        precision=precision,
        max_grad_norm=0.5,
        **spec,
    )
    with emulated():
        return found.prepare(asked, world), world


def steps(engine: Any, placement: Placement, since: int = 0) -> list[float]:
    losses, share = [], BATCH // placement.size
    own = slice(placement.rank * share, (placement.rank + 1) * share)
    for inputs, targets in batches()[since:]:
        part = MicroBatch((inputs[own], targets[own]), share)
        losses.append(engine.train_step(Batch((part,), BATCH), loss_fn).loss)
    return losses


def train(placement: Placement, strategy: str, **spec: Any) -> list[float]:
    engine, world = prepared(placement, strategy, **spec)
    losses = steps(engine, placement)
    engine.close()
    world.leave()
    return losses


def difference(losses: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def test_one_process_computes_what_torchao_does(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "unipar"):
        found = train(Placement(), "single")
    assert difference(found, by_hand()) < 1e-6
    assert "6 of 8 linear layers compute in float8; as in bf16" in caplog.text
    assert "embed, head" in caplog.text
    assert difference(train(Placement(), "single", precision="bf16"), found) > 1e-4


@pytest.mark.parametrize(
    "spec",
    [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": ("Linear",)},
        {"activation_offload": True},
        {"compile": {"backend": "eager"}},
    ],
    ids=["recomputed", "partly recomputed", "layers recomputed", "offloaded", "compiled"],
)
def test_what_is_done_to_the_model_besides_changes_nothing(spec: dict[str, Any]) -> None:
    assert difference(train(Placement(), "single", **spec), by_hand()) < 1e-5


@pytest.mark.parametrize(
    ("strategy", "model"),
    [
        pytest.param("ddp", None, marks=pytest.mark.thorough),
        ("fsdp", None),
        ("fsdp:wrap=[Linear]", build),
    ],
)
def test_ranks_compute_what_torchao_does(world_pool: Any, strategy: str, model: Any) -> None:
    found = world_pool(2).run(partial(train, model=model), strategy)
    assert found[0] == found[1]
    assert difference(found[0], by_hand(2, gathered=strategy != "ddp")) < 1e-5


def own_units(model: Any, world: World) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        fully_shard(block.inner, mesh=world.mesh("fsdp"), mp_policy=policy)


def test_parts_that_a_user_divides_compute_in_float8(world_pool: Any) -> None:
    found = world_pool(2).run(partial(train, parallelize=own_units), "fsdp")
    assert difference(found[0], by_hand(2, gathered=True)) < 1e-5


def test_the_model_is_the_users_again_when_the_engine_closes() -> None:
    model: Any = build()
    layer, called = model.blocks[0].inner, []
    layer.register_forward_hook(lambda *_: called.append(True))
    before = {name: (type(m), set(vars(m))) for name, m in model.named_modules()}
    initial = copy.deepcopy(layer.weight)
    engine, world = prepared(Placement(), "single", model=model)
    steps(engine, Placement())
    assert len(called) == STEPS
    assert "forward" in vars(layer)
    state = engine.export_state()
    engine.close()
    world.leave()
    assert {name: (type(m), set(vars(m))) for name, m in model.named_modules()} == before
    assert {one.name for one in state.weights} == set(build().state_dict())
    assert not torch.equal(layer.weight, initial)
    inputs = torch.randn(2, 16)
    assert torch.equal(layer(inputs), nn.functional.linear(inputs, layer.weight, layer.bias))


def test_layers_that_two_engines_share_are_changed_once() -> None:
    shared: Any = build()
    first, world = prepared(Placement(), "single", model=shared)
    second = registry.resolve("single").prepare(EngineSpec(shared, precision="fp8"), world)
    first.close()
    second.close()
    world.leave()
    assert "forward" not in vars(shared.blocks[0].inner)


def save(placement: Placement, root: Path) -> Path:
    engine, world = prepared(placement, "fsdp")
    steps(engine, placement)
    path = checkpoint.save(root, {"model": engine}, world, step=STEPS)
    world.leave()
    return path


def test_a_checkpoint_goes_on_in_any_precision(world_pool: Any, tmp_path: Path) -> None:
    path = world_pool(2).run(save, tmp_path)[0]
    precisions: list[Precision] = ["fp8", "bf16", "fp32", "fp8"]
    for turn, precision in enumerate(precisions):
        engine, world = prepared(Placement(), "single", precision)
        checkpoint.load(path, {"model": engine}, world)
        plain = build()
        plain.load_state_dict(engine.module.state_dict())
        exact = loss_fn(plain, batches()[0]).item()
        losses = steps(engine, Placement())
        assert losses[0] == pytest.approx(exact, rel=5e-2)
        path = checkpoint.save(tmp_path / str(turn), {"model": engine}, world, step=2 * STEPS)
        engine.close()
        world.leave()


@pytest.mark.parametrize(
    ("model", "layers"), [(nn.Linear(16, 3), 1), (nn.Sequential(nn.Conv1d(16, 16, 1)), 0)]
)
def test_a_model_without_a_layer_that_fits_is_refused(model: nn.Module, layers: int) -> None:
    said = rf"multiples of 16, and none of the {layers} .*Use precision='bf16'"
    # Before any process starts.
    with pytest.raises(ConfigError, match=said):
        check_gradients(model, registry.resolve("ddp"), EngineSpec(model, precision="fp8"))
    with pytest.raises(ConfigError, match=said):
        compute_in_float8(model, "fp8")


class Subclass(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def test_layers_that_do_more_stay_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
    model = nn.Sequential(nn.Linear(16, 16), Subclass(16, 16), normed)
    before = copy.deepcopy(model)
    inputs = torch.randn(4, 16)
    with emulated(), caplog.at_level(logging.INFO, "unipar"):
        compute_in_float8(model, "fp8")
    assert "1 of 3 linear layers compute in float8" in caplog.text
    assert torch.equal(model[1:](inputs), before[1:](inputs))
    assert not torch.equal(model[0](inputs), before[0](inputs))
