"""HybridParallelPlugin's state in canonical form: shards and stages as parts of logical tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from colossalai.tensor.d_tensor.api import (  # pyright: ignore[reportMissingImports]
    get_shard_dim_1d,
    is_distributed_tensor,
)
from colossalai.tensor.padded_tensor import (  # pyright: ignore[reportMissingImports]
    is_padded_tensor,
)
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from unipar.engine import (
    export_scheduler,
    group_names,
    group_states,
    import_scheduler,
    restore_groups,
)
from unipar.errors import CheckpointError
from unipar.plain import from_json, to_json
from unipar.state import Box, EngineState, LocalState, StateSource, TensorInfo, named_weights
from unipar.world import World


class Shard(NamedTuple):
    """Which part of a logical tensor the ones shaped like this rank's parameter hold.

    Attributes:
        shape: the logical shape.
        dim: what it is divided along; ``None`` for all of it.
        start: the first index along ``dim``.
        length: how many indices are the tensor's; what follows pads the vocabulary.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0
    length: int = 0

    def of(self, name: str, held: torch.Tensor) -> LocalState:
        """Describe a tensor of this rank; the state is a view of it."""
        offsets, sizes = [0] * len(self.shape), list(self.shape)
        if self.dim is not None:
            offsets[self.dim], sizes[self.dim] = self.start, self.length
            if self.length <= 0:
                return LocalState.absent(name, self.shape, held.dtype)
            held = held.narrow(self.dim, 0, self.length)
        box = Box(tuple(offsets), tuple(sizes))
        return LocalState(name, self.shape, held.dtype, (box,), (held,))


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
        """What this rank holds of the divided module, by its first name in the whole one."""
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
        if is_distributed_tensor(held):
            dim = get_shard_dim_1d(held)
            start = tp_rank * held.shape[dim]
        elif is_padded_tensor(held):
            dim, start = held._padding_dim, 0  # pyright: ignore[reportAttributeAccessIssue]
        else:
            return Shard(shape)
        return Shard(shape, dim, start, min(held.shape[dim], shape[dim] - start))


def export_state(
    logical: Logical,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: LRScheduler | None,
    world: World,
    tp_rank: int,
) -> EngineState:
    """Describe weights, optimizer and scheduler; only names are gathered. Collective."""
    state = EngineState(_weights(logical, module, tp_rank), aliases=logical.aliases)
    if optimizer is not None:
        own: dict[str, LocalState] = {}
        scalars: dict[str, dict[str, Any]] = {}
        for name, parameter in logical.held(module).items():
            shard = logical.shard(name, parameter, tp_rank)
            for key, value in optimizer.state.get(parameter, {}).items():
                full = f"{name}.{key}"
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    own[full] = shard.of(full, value)
                elif isinstance(value, torch.Tensor):
                    own[full] = LocalState.of(full, value)
                elif value is not None:
                    scalars.setdefault(name, {})[key] = to_json(value, f"optimizer state '{full}'")
        listed: dict[str, TensorInfo] = {}
        told = [(moment.name, TensorInfo(moment.shape, moment.dtype)) for moment in own.values()]
        for moments, numbers in world.gather((told, scalars)):
            listed.update(moments)
            scalars = {**numbers, **scalars}
        state.optimizer = [
            own.get(name) or LocalState.absent(name, *listed[name]) for name in sorted(listed)
        ]
        state.groups = group_states(logical.groups, optimizer)
        state.extra["scalars"] = scalars
    export_scheduler(scheduler, state)
    return state


def import_weights(source: StateSource, logical: Logical, module: nn.Module, tp_rank: int) -> None:
    """Fill this rank's parts of the weights. Collective."""
    source.fill_weights(_weights(logical, module, tp_rank))


def import_optimizer(
    source: StateSource,
    logical: Logical,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler | None,
    tp_rank: int,
) -> None:
    """Make this rank's parts of the optimizer's state as they are stored, and fill them."""
    strangers = sorted(set(source.optimizer) - logical.weights.keys())
    if strangers:
        raise CheckpointError(
            f"the checkpoint holds optimizer state of {len(strangers)} parameters that this model "
            f"does not have: {', '.join(strangers[:8])}{', …' if len(strangers) > 8 else ''}."
        )
    states: list[LocalState] = []
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in logical.held(module).items():
        if id(parameter) not in trained:
            continue
        shard = logical.shard(name, parameter, tp_rank)
        values: dict[str, Any] = {
            key: from_json(value)
            for key, value in source.extra.get("scalars", {}).get(name, {}).items()
        }
        for key, info in source.optimizer.get(name, {}).items():
            full = f"{name}.{key}"
            if info.shape == ():
                values[key] = torch.zeros((), dtype=info.dtype)
                states.append(LocalState.of(full, values[key]))
            elif info.shape == shard.shape:
                values[key] = torch.zeros(parameter.shape, dtype=info.dtype)
                states.append(shard.of(full, values[key]))
            else:
                raise CheckpointError(
                    f"optimizer state '{full}' has shape {info.shape} and its parameter has "
                    f"{shard.shape}: tensor parallelism divides state as it does parameters. "
                    "Resume under a strategy that keeps the optimizer whole."
                )
        optimizer.state.pop(parameter, None)
        if values:
            optimizer.state[parameter] = values
    source.fill_optimizer(states)
    restore_groups(source.groups, logical.groups, optimizer)
    import_scheduler(scheduler, source)


def _weights(logical: Logical, module: nn.Module, tp_rank: int) -> list[LocalState]:
    return list(_each_weight(logical, logical.held(module), tp_rank))


def _each_weight(
    logical: Logical, held: dict[str, torch.Tensor], tp_rank: int
) -> Iterator[LocalState]:
    for name, info in logical.weights.items():
        tensor = held.get(name)
        if tensor is None:
            yield LocalState.absent(name, *info)
        else:
            # `.data`, since Colossal-AI's `detach` copies what it knows of the tensor.
            yield logical.shard(name, tensor, tp_rank).of(name, tensor.data)
