"""The state of stages in checkpoints: each rank describes what it has of the whole model."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from unipar.engine import ModuleState
from unipar.state import LocalState, StateSource, TensorInfo, named_weights
from unipar.world import World


@dataclass(frozen=True)
class Whole:
    """A model as it was before it was cut, without its values.

    Attributes:
        parameters: by their first name.
        buffers: by their first name, of those that are saved and those that are not.
        weights: the shapes and dtypes of what checkpoints have.
        aliases: other names of tied weights, by the name that they are stored under.
    """

    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, torch.Tensor]
    weights: Mapping[str, TensorInfo]
    aliases: Mapping[str, str]

    @classmethod
    def of(cls, module: nn.Module) -> Whole:
        """Read a model that has not been cut yet."""
        weights, aliases = named_weights(module)
        return cls(
            dict(module.named_parameters()),
            dict(module.named_buffers()),
            {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in weights.items()},
            aliases,
        )


class StagesState(ModuleState):
    """Of the stages of this rank; a :class:`unipar.engine.ModelState`.

    Args:
        held: this rank's stages.
        optimizer: over the parameters of these stages, if there is one.
        whole: the model before it was cut.
        owned: the names of the tensors that are of these stages.
        world: the joined processes.
    """

    def __init__(
        self,
        held: nn.Module,
        optimizer: Optimizer | None,
        whole: Whole,
        owned: Collection[str],
        world: World,
    ) -> None:
        super().__init__(held, optimizer, world)
        self._whole, self._owned = whole, owned
        self._groups: list[tuple[str, ...]] = []

    def name_groups(self, names: Mapping[int, str]) -> None:
        """Note what is in each group while they are the whole model's.

        Args:
            names: of the parameters that the optimizer was given, by their ids.
        """
        assert self.optimizer is not None
        groups = self.optimizer.param_groups
        self._groups = [tuple(names[id(p)] for p in group["params"]) for group in groups]

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(p.shape) for p in self._whole.parameters.values())

    @property
    def aliases(self) -> dict[str, str]:
        return dict(self._whole.aliases)

    @property
    def groups(self) -> list[tuple[str, ...]]:
        return self._groups

    @property
    def trained(self) -> Collection[str]:
        return self._whole.parameters.keys()

    @property
    def partial(self) -> bool:
        return self.optimizer is not None

    def weights(self) -> list[LocalState]:
        # By name, or by the tensor: a state dict may leave out the name of a wrapper (torch's
        # checkpoint_wrapper), and a hook may have put another tensor into it.
        named = [
            *self.module.named_parameters(remove_duplicate=False),
            *self.module.named_buffers(remove_duplicate=False),
        ]
        owned = {id(tensor) for name, tensor in named if name in self._owned}
        return self._described(lambda name, tensor: name in self._owned or id(tensor) in owned)

    def import_weights(self, source: StateSource) -> None:
        # Stages also compute with buffers outside of blocks that another one writes.
        source.fill_weights(self._described(lambda _, tensor: True))

    def _described(self, chosen: Callable[[str, torch.Tensor], bool]) -> list[LocalState]:
        aliases = self._whole.aliases
        held = {
            aliases.get(name, name): tensor
            for name, tensor in self.module.state_dict(keep_vars=True).items()
            if chosen(name, tensor)
        }
        return [
            LocalState.of(name, held[name]) if name in held else LocalState.absent(name, *info)
            for name, info in self._whole.weights.items()
        ]
