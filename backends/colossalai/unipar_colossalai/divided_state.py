"""State of which each rank holds parts, in canonical form: each rank describes its own."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from unipar.engine import flat_state, group_states, restore_groups
from unipar.errors import CheckpointError, first_few
from unipar.state import EngineState, LocalState, StateSource, TensorInfo
from unipar.utils.json_state import from_json, to_json
from unipar.world import World

Groups = list[tuple[str, ...]]


@dataclass(frozen=True)
class Part:
    """This rank's part of one parameter: consecutive elements, or none.

    Attributes:
        name: the parameter's.
        shape: the whole parameter's.
        start: its first element that is held here.
        held: the fp32 weights, shaped as the optimizer sees them; what is beyond the parameter's
            last element is padding.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    held: torch.Tensor

    def state(self, name: str, tensor: torch.Tensor) -> LocalState:
        """Describe a tensor that holds one value for each element that is held here."""
        own = tensor.view(-1)[: math.prod(self.shape) - self.start]
        return flat_state(name, self.shape, self.start, own)

    def has_scalar(self, key: str, shape: tuple[int, ...]) -> bool:
        """Return whether optimizer state of that shape is one number for the whole parameter."""
        return shape == () and (key == "step" or bool(self.shape))


Parts = Iterable[tuple[torch.Tensor, Part]]
"""The tensors that the optimizer holds on this rank, and what of the model each of them is."""


class PartsState(ABC):
    """Of a model and an optimizer whose ranks keep parts; a :class:`unipar.engine.ModelState`.

    Args:
        optimizer: over this rank's parts, if there is one.
        groups: the names of the parameters of each of its groups.
        aliases: of the whole model's weights: other names, and the names that they stand for.
        world: the joined processes.
    """

    def __init__(
        self,
        optimizer: Optimizer | None,
        groups: Groups,
        aliases: Mapping[str, str],
        world: World,
    ) -> None:
        self.optimizer, self.groups, self.world = optimizer, groups, world
        self.aliases = dict(aliases)

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Elements of all parameters of the whole model."""

    @property
    @abstractmethod
    def trained(self) -> Collection[str]:
        """The names of what the optimizers of all ranks update."""

    @abstractmethod
    def weights(self) -> list[LocalState]:
        """Describe this rank's parts of weights and buffers; the states are views of them."""

    @abstractmethod
    def parts(self) -> Parts:
        """Return the parts that this rank's optimizer holds."""

    def follow_weights(self) -> None:  # noqa: B027
        """Make what computes of the parts, which have been filled."""

    def export_state(self) -> EngineState:
        state = EngineState(self.weights(), aliases=self.aliases)
        if self.optimizer is not None:
            self._export_optimizer(self.optimizer, state)
        return state

    def import_weights(self, source: StateSource) -> None:
        source.fill_weights(self.weights())
        self.follow_weights()

    def _export_optimizer(self, optimizer: Optimizer, state: EngineState) -> None:
        own: dict[str, LocalState] = {}
        scalars: dict[str, dict[str, Any]] = {}
        for holder, part in self.parts():
            for key, value in optimizer.state.get(holder, {}).items():
                full = f"{part.name}.{key}"
                if not isinstance(value, torch.Tensor):
                    if value is not None:
                        stored = to_json(value, f"optimizer state '{full}'")
                        scalars.setdefault(part.name, {})[key] = stored
                elif part.has_scalar(key, tuple(value.shape)):
                    own[full] = LocalState.of(full, value)
                else:
                    own[full] = part.state(full, value)
        # A rank knows the state of what it holds only, and all describe the same in one order.
        listed: dict[str, TensorInfo] = {}
        known = [(one.name, one.shape, one.dtype) for one in own.values()]
        for infos, more in self.world.gather((known, scalars)):
            listed.update({name: TensorInfo(shape, dtype) for name, shape, dtype in infos})
            scalars.update(more)
        state.optimizer = [
            own.get(name) or LocalState.absent(name, *listed[name]) for name in sorted(listed)
        ]
        state.groups = group_states(self.groups, optimizer)
        state.extra["scalars"] = scalars

    def import_optimizer(self, source: StateSource) -> None:
        optimizer = self.optimizer
        assert optimizer is not None
        strangers = sorted(set(source.optimizer).difference(self.trained))
        if strangers:
            raise CheckpointError(
                f"the checkpoint holds optimizer state of {len(strangers)} parameters that this "
                f"model does not train: {first_few(strangers, 8)}."
            )
        states: list[LocalState] = []
        for holder, part in self.parts():
            values: dict[str, Any] = {
                key: from_json(value)
                for key, value in source.extra.get("scalars", {}).get(part.name, {}).items()
            }
            for key, info in source.optimizer.get(part.name, {}).items():
                values[key], state = _allocate(part, key, info)
                states.append(state)
            optimizer.state.pop(holder, None)
            if values:
                optimizer.state[holder] = values
        source.fill_optimizer(states)
        restore_groups(source.groups, self.groups, optimizer)


def _allocate(part: Part, key: str, info: TensorInfo) -> tuple[torch.Tensor, LocalState]:
    """This rank's part of stored state, yet to be filled, and what it is of the whole."""
    full = f"{part.name}.{key}"
    if part.has_scalar(key, info.shape):
        value = torch.zeros((), dtype=info.dtype)
        return value, LocalState.of(full, value)
    if info.shape != part.shape:
        raise CheckpointError(
            f"optimizer state '{full}' has shape {info.shape} and its parameter has "
            f"{part.shape}: ranks divide state as they do parameters. Resume under a "
            "strategy that keeps the optimizer whole."
        )
    # Not like `held`, which may be of a tensor class of Colossal-AI's own.
    value = torch.zeros(part.held.shape, dtype=info.dtype, device=part.held.device)
    return value, part.state(full, value)
