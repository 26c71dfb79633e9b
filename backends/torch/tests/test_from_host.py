"""Under fsdp a model is divided from the host: it is whole on no device, and no value changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unipar.errors import ConfigError
from unipar.strategy import EngineSpec, registry
from unipar.world import Placement, World
from unipar_torch import from_host, sharding

WIDTH, NUM_BLOCKS = 24, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


class Mixed(nn.Module):
    """Tied, frozen and half-precision weights; buffers, kept and not kept in checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(NUM_BLOCKS)])
        self.head = nn.Linear(WIDTH, 31)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(WIDTH, WIDTH).bfloat16().requires_grad_(False)
        self.odd = nn.Parameter(torch.randn(1, 3))
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.rand(()), persistent=False)
        self.register_buffer("used", torch.rand(5) > 0.5)
        self.blocks[0].register_buffer("again", self.scale, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale + self.odd.sum()
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.frozen(x.bfloat16()).float())


def own_units(model: Any, world: World) -> None:
    fully_shard(model.blocks[0].linear, mesh=world.mesh("fsdp"))


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named if p.requires_grad], lr=1e-2)


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    tensors = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in tensors.items()
    }


# -- memory --------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """Bytes of what is allocated on a device whose tensors need no memory, but are counted."""

    def __init__(self) -> None:
        super().__init__()
        # Held, so that no other can have the number of one that is gone.
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # What becomes of the shard is seen next.
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            fake = isinstance(tensor, FakeTensor)  # By which DTensor finds out shapes.
            if isinstance(tensor, torch.Tensor) and tensor.is_meta and not fake:
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = storage
        return out

    def sizes(self) -> list[int]:
        return [storage.nbytes() for storage in self._storages.values()]


class _Enough(Exception):
    pass


def allocated(placement: Placement, strategy: str, model: Any, **spec: Any) -> dict[str, Any]:
    """What preparing a model allocates on the device, and how much the model has."""
    found: dict[str, Any] = {}
    module: Any = sharding
    give = module.give_values

    def counting(module: nn.Module, weights: Any, world: World, **options: Any) -> None:
        tensors = [*module.parameters(), *module.buffers()]
        found["earlier"] = sum(not tensor.is_meta for tensor in tensors)
        elsewhere = dataclasses.replace(world.placement, device_type="meta")
        with Allocations() as counted:
            give(module, weights, World(elsewhere, world.layout), **options)
        found["largest"], found["sum"] = max(counted.sizes()), sum(counted.sizes())
        raise _Enough

    prepared = registry.resolve(strategy)
    world = prepared.setup(placement)
    module.give_values = counting
    try:
        with pytest.raises(_Enough):
            prepared.prepare(EngineSpec(model, optimizer=adamw, **spec), world)
    finally:
        module.give_values = give
        world.leave()
    return found


@pytest.mark.parametrize(
    "strategy", ["fsdp", "fsdp:wrap=none", "fsdp:sharding=hybrid,shard_size=2"]
)
@pytest.mark.parametrize("given", ["a module", "a function"])
def test_no_whole_tensor_is_ever_on_a_device(world_pool: Any, strategy: str, given: str) -> None:
    whole = Mixed()
    model = whole if given == "a module" else Mixed
    parameters = [p.nbytes for p in whole.parameters()]
    buffers = [b.nbytes for b in whole.buffers()]
    for found in world_pool(2).run(allocated, strategy, model):
        assert found["earlier"] == 0
        assert found["largest"] <= -(-max(parameters) // 2) + WIDTH * 4
        # Some shards are allocated twice, one after the other: tied and padded ones.
        assert found["sum"] < 0.75 * sum(parameters) + 2 * sum(buffers)


def test_offloaded_shards_are_never_on_a_device(world_pool: Any) -> None:
    buffers = [b.nbytes for b in Mixed().buffers()]
    for found in world_pool(2).run(allocated, "fsdp:cpu_offload=true", Mixed()):
        assert found["largest"] <= max(buffers)
        assert found["sum"] <= 2 * sum(buffers)


# -- values --------------------------------------------------------------------------------------


def prepared_values(
    placement: Placement, strategy: str, model: Any, asked: dict[str, Any]
) -> dict[str, Any]:
    """The model as it is divided, put together again."""
    found = registry.resolve(strategy)
    world = found.setup(placement)
    if placement.rank and isinstance(model, nn.Module):
        # Rank 0's count.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    engine = found.prepare(EngineSpec(model, optimizer=adamw, seed=3, **asked), world)
    module, optimizer = engine.module, engine.optimizer
    assert optimizer is not None
    named = dict(module.named_parameters())
    out = {
        "values": values(module),
        "names": list(named),
        "trained": [name for name, p in named.items() if p.requires_grad],
        "optimized": sum(len(group["params"]) for group in optimizer.param_groups),
        "in checkpoints": list(module.state_dict()),
        "shared": module.get_buffer("scale") is module.get_buffer("blocks.0.again"),
    }
    world.leave()
    return out


@pytest.mark.parametrize("given", ["a module", "a function"])
@pytest.mark.parametrize(
    ("size", "strategy", "spec"),
    [
        (2, "fsdp", {}),
        (2, "fsdp:wrap=[Block]", {}),
        (2, "fsdp:cpu_offload=true", {}),
        (2, "fsdp:sharding=hybrid,shard_size=1", {}),
        (2, "fsdp", {"parallelize": own_units}),
        (2, "fsdp", {"precision": "bf16"}),
        (4, "fsdp:sharding=hybrid,shard_size=2", {}),
    ],
)
def test_weights_are_those_of_rank_0_bit_for_bit(
    world_pool: Any, given: str, size: int, strategy: str, spec: dict[str, Any]
) -> None:
    torch.manual_seed(3)
    whole = Mixed()
    expected = values(whole)
    names = [name for name, _ in whole.named_parameters()]
    trained = [name for name, p in whole.named_parameters() if p.requires_grad]
    model = whole if given == "a module" else Mixed
    for found in world_pool(size).run(prepared_values, strategy, model, spec):
        assert found["names"] == names
        assert found["trained"] == trained
        assert found["optimized"] == len(trained)
        assert found["in checkpoints"] == list(Mixed().state_dict())
        assert found["shared"]
        torch.testing.assert_close(found["values"], expected, rtol=0, atol=0)


def test_pieces_of_any_size_bring_the_same(world_pool: Any) -> None:
    def small(placement: Placement, model: nn.Module) -> Any:
        before, from_host._PIECE_BYTES = from_host._PIECE_BYTES, 3000
        try:
            return prepared_values(placement, "fsdp", model, {})["values"]
        finally:
            from_host._PIECE_BYTES = before

    whole = Mixed()
    expected = values(whole)
    for found in world_pool(2).run(small, whole):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


# -- what is refused -----------------------------------------------------------------------------


def tied_blocks() -> nn.Module:
    model = Mixed()
    model.blocks[2].linear.weight = model.blocks[1].linear.weight  # pyright: ignore
    return model


def changing() -> nn.Module:
    return nn.Linear(WIDTH, 3 if torch.get_default_device().type == "meta" else 4)


def refusal(placement: Placement, model: Any) -> str:
    found = registry.resolve("fsdp")
    world = found.setup(placement)
    if model == "divided":
        model = nn.Linear(4, 4)
        shards = distribute_tensor(model.weight.detach(), world.mesh("fsdp"))
        model.weight = nn.Parameter(shards)
    try:
        found.prepare(EngineSpec(model, optimizer=adamw), world)
    except ConfigError as error:
        return str(error)
    finally:
        world.leave()
    return ""


@pytest.mark.parametrize(
    ("size", "model", "says"),
    [
        (2, tied_blocks(), "'blocks.1.linear.weight' and 'blocks.2.linear.weight' are one"),
        (2, tied_blocks, "'blocks.1.linear.weight' and 'blocks.2.linear.weight' are one"),
        (2, "divided", "parameter 'weight' of the model is divided already"),
        (1, changing, "another model on the host than on the meta device: weight, bias differ"),
    ],
    ids=["tied across units", "by a function", "divided", "another each time"],
)
def test_what_would_not_be_the_same_model_is_refused(
    world_pool: Any, size: int, model: Any, says: str
) -> None:
    for said in world_pool(size).run(refusal, model):
        assert says in said


def test_values_that_nobody_has_are_refused(world_pool: Any) -> None:
    def missing(placement: Placement, whole: Callable[[], nn.Module]) -> str:
        return refusal(placement, whole().to("meta"))

    with pytest.raises(NotImplementedError):
        world_pool(1).run(missing, Mixed)
