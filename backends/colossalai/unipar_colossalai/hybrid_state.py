"""HybridParallelPlugin's state in canonical form: shards and stages as parts of logical tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from colossalai.tensor.d_tensor.api import (  # pyright: ignore[reportMissingImports]
    get_shard_dim_1d,
    is_customized_distributed_tensor,
    is_distributed_tensor,
)
from colossalai.tensor.padded_tensor import (  # pyright: ignore[reportMissingImports]
    is_padded_tensor,
)
from torch import nn

from unipar.engine import group_names
from unipar.state import Box, LocalState, TensorInfo, named_weights
from unipar.world import World
from unipar_colossalai.divided_state import Part, PartsState


class Run(NamedTuple):
    """Consecutive indices along the dimension that a tensor is divided along.

    Attributes:
        start: the first of them in the logical tensor.
        length: how many they are.
    """

    start: int
    length: int


@dataclass(frozen=True)
class Shard(Part):
    """A part of a logical tensor along one dimension, or all of it.

    Attributes:
        dim: what it is divided along; ``None`` for all of it.
        runs: what is held, in the order in which it is held; what follows pads the vocabulary.
    """

    dim: int | None = None
    runs: tuple[Run, ...] = ()

    def state(self, name: str, tensor: torch.Tensor) -> LocalState:
        if self.dim is None:
            whole = Box((0,) * len(self.shape), self.shape)
            return LocalState(name, self.shape, tensor.dtype, (whole,), (tensor,))
        boxes, views, held = [], [], 0
        for run in self.runs:
            offsets, sizes = [0] * len(self.shape), list(self.shape)
            offsets[self.dim], sizes[self.dim] = run
            boxes.append(Box(tuple(offsets), tuple(sizes)))
            views.append(tensor.narrow(self.dim, held, run.length))
            held += run.length
        return LocalState(name, self.shape, tensor.dtype, tuple(boxes), tuple(views))


class Logical:
    """The names and shapes of the user's model, read before it is divided.

    Args:
        module: still whole.
        optimizer: of its parameters; ``None`` for a model that is only evaluated.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        weights, self.aliases = named_weights(module)
        self.weights = {
            name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()
        }
        self.num_parameters = sum(parameter.numel() for parameter in module.parameters())
        self.groups = [] if optimizer is None else group_names(module, optimizer)

    def held(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Return what this rank holds of the divided module, by its first name in the whole one."""
        found: dict[str, torch.Tensor] = {}
        for named in (module.named_parameters, module.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                name = self.aliases.get(name, name)
                if name in self.weights:
                    found.setdefault(name, tensor)
        return found

    def shard(self, name: str, held: torch.Tensor, tp_rank: int) -> Shard:
        """Which part of the tensor of this name ``held`` is, as Colossal-AI has divided it."""
        shape = self.weights[name].shape
        if is_customized_distributed_tensor(held):
            (dim,) = (d for d, size in enumerate(shape) if held.shape[d] != size)
            # Colossal-AI's function says which it keeps: of queries, keys and values a run each.
            kept = held.shard_fn(torch.arange(shape[dim]))  # pyright: ignore
            return Shard(name, shape, 0, held, dim, tuple(_runs(kept.tolist())))
        if is_distributed_tensor(held):
            dim = get_shard_dim_1d(held)
            start = tp_rank * held.shape[dim]
        elif is_padded_tensor(held):
            # Colossal-AI 0.5.0, tensor/padded_tensor/api.py.
            dim, start = held._padding_dim, 0  # pyright: ignore[reportAttributeAccessIssue]
        else:
            return Shard(name, shape, 0, held)
        run = Run(start, min(held.shape[dim], shape[dim] - start))
        return Shard(name, shape, start, held, dim, (run,) if run.length > 0 else ())

    def parts(self, module: nn.Module, tp_rank: int) -> Iterator[tuple[torch.Tensor, Shard]]:
        """Return what this rank's optimizer holds, and which part of the model each of it is."""
        for name, held in self.held(module).items():
            if isinstance(held, nn.Parameter):
                yield held, self.shard(name, held, tp_rank)


def is_divided(held: torch.Tensor) -> bool:
    """Return whether ranks of tensor parallelism hold different parts of it."""
    return is_distributed_tensor(held) or is_customized_distributed_tensor(held)


def _runs(indices: list[int]) -> Iterator[Run]:
    first = 0
    for last, index in enumerate(indices):
        if indices[last + 1 : last + 2] != [index + 1]:
            yield Run(indices[first], last + 1 - first)
            first = last + 1


class HybridState(PartsState):
    """Shards and stages of a model, and the optimizer over them.

    Args:
        logical: the model as it was before it was divided.
        module: the user's, divided.
        optimizer: the user's, over this rank's parts, if there is one.
        tp_rank: which of the shards this rank has.
        world: the joined processes.
    """

    def __init__(
        self,
        logical: Logical,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        tp_rank: int,
        world: World,
    ) -> None:
        super().__init__(optimizer, logical.groups, logical.aliases, world)
        self.logical, self.module, self.tp_rank = logical, module, tp_rank

    @property
    def num_parameters(self) -> int:
        return self.logical.num_parameters

    @property
    def trained(self) -> Collection[str]:
        return self.logical.weights

    def weights(self) -> list[LocalState]:
        return list(_each_weight(self.logical, self.logical.held(self.module), self.tp_rank))

    def parts(self) -> Iterator[tuple[torch.Tensor, Part]]:
        return self.logical.parts(self.module, self.tp_rank)


def _each_weight(
    logical: Logical, held: dict[str, torch.Tensor], tp_rank: int
) -> Iterator[LocalState]:
    for name, info in logical.weights.items():
        tensor = held.get(name)
        if tensor is None:
            yield LocalState.absent(name, *info)
        else:
            # `.data`, since Colossal-AI's `detach` copies what it knows of the tensor.
            yield logical.shard(name, tensor, tp_rank).state(name, tensor.data)
