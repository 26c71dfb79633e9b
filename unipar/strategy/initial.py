"""Initial weights that each process computes or reads for itself, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import nn

from unipar.errors import ConfigError, first_few
from unipar.state import LocalState, TensorInfo, WeightSource, named_weights
from unipar.utils.deferred import DeferredModel, digest
from unipar.world import World

InitialWeights = Literal["model", "by_name"] | WeightSource
"""Those that the model's function computes as it builds the model, whole; the same computations,
each tensor's by itself under a seed of its name; or stored ones."""


class InitialValues:
    """A model without values, and the values of its tensors.

    Where the weights are stored, only what no checkpoint holds is computed.

    Args:
        build: builds the model.
        seed: of the random numbers, with the names of the tensors.
        stored: the weights, if they are stored.

    Attributes:
        module: the model on the meta device. Tensors that modules hold as plain attributes have
            values.

    Raises:
        ConfigError: values cannot be computed one tensor at a time.
    """

    def __init__(
        self, build: Callable[[], nn.Module], seed: int, stored: WeightSource | None
    ) -> None:
        self._deferred = DeferredModel(build, seed)
        self.module = self._deferred.module
        weights, self._aliases = named_weights(self.module)
        self._stored = stored
        self._weights = {n: TensorInfo(tuple(t.shape), t.dtype) for n, t in weights.items()}
        first = {id(tensor): name for name, tensor in weights.items()}
        tensors = named_tensors(self.module)
        self._first = {name: first.setdefault(id(t), name) for name, t in tensors.items()}
        names = dict.fromkeys(self._first.values())
        self._own = [name for name in names if stored is None or name not in weights]
        self._deferred.check(self._own)
        self._deferred.compute_attributes()

    def fill(self, held: Mapping[str, torch.Tensor], world: World | None = None) -> None:
        """Fill tensors, or the shards of them that are here, with their values.

        Args:
            held: by name; any of its names, of a tied one.
            world: the joined processes, where each holds a part; then collective.

        Raises:
            ConfigError: ranks have computed different values.
            CheckpointError: the stored weights are damaged, or of another model.
        """
        held = {self._first[name]: tensor for name, tensor in held.items()}
        if self._stored is not None:
            states = [
                LocalState.of(name, held[name]) if name in held else LocalState.absent(name, *info)
                for name, info in self._weights.items()
            ]
            self._stored.fill(states, self._aliases)
        digests: dict[str, str] = {}
        for name in self._own:
            if name in held:
                whole = self._deferred.compute(name)
                if world is not None:
                    digests[name] = digest(whole)
                LocalState.of(name, held[name]).take(whole)
        if world is not None:
            _refuse_different(world.gather(digests))


def whole_model(values: InitialValues) -> nn.Module:
    """The model with its values, on the host."""
    made: dict[int, torch.Tensor] = {}
    for name, old in named_tensors(values.module).items():
        if id(old) not in made:
            new = torch.empty_like(old, device="cpu")
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(new, old.requires_grad)
                vars(new).update(vars(old))
            made[id(old)] = new
        owner, _, own = name.rpartition(".")
        setattr(values.module.get_submodule(owner), own, made[id(old)])
    values.fill(named_tensors(values.module))
    return values.module


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, tied ones under each of their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _refuse_different(found: list[dict[str, str]]) -> None:
    """Hold that ranks that have computed the same tensor have computed the same values."""
    values: dict[str, set[str]] = {}
    for digests in found:
        for name, found_here in digests.items():
            values.setdefault(name, set()).add(found_here)
    different = [name for name, digests in values.items() if len(digests) > 1]
    if different:
        raise ConfigError(
            f"ranks have computed different initial values of {first_few(different)}, each for "
            "itself. The model function computes them from something that differs between "
            "processes, such as random numbers that are not torch's, or the processors differ. "
            "Let it draw from torch's generator, or use initial_weights='model', by which rank 0 "
            "computes them for all."
        )
