"""Refusal of optimizer functions that choose otherwise once a model is divided.

Other tensors then stand in the place of its parameters. A function that knows the user's own as
objects finds none of them again, and torch takes a group without any: what was to be trained by it
would stay as it is, or be trained otherwise, without a word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unipar.engine.state import HOW_NOT_WHAT
from unipar.engine.trials import host_generators, set_host_generators
from unipar.errors import ConfigError, first_few
from unipar.optimizers.groups import chooses_by_name
from unipar.strategy import EngineSpec, OptimizerFactory

Named = list[tuple[str, nn.Parameter]]
Chosen = dict[str, tuple[int, dict[str, Any]]]
"""The number of the group of each parameter that is trained, and what the group says of it."""

_PLAIN = bool | int | str | None
_NO_CHOICE = HOW_NOT_WHAT | {"params", "param_names"}


def with_same_choice(spec: EngineSpec, module: nn.Module, strategy: str) -> EngineSpec:
    """The same request, with an optimizer that is refused where it chooses otherwise later.

    A function of the user's is called once more for that, now, and what it gives is let go.

    Args:
        spec: what the user asked for.
        module: with the parameters that the user knows, none of them replaced yet.
        strategy: the name of the one that replaces them.
    """
    if spec.optimizer is None or chooses_by_name(spec.optimizer):
        return spec
    named = list(module.named_parameters())
    first: Chosen | Exception
    try:
        with _leaving_alone(named):
            first = _chosen(spec.optimizer(named), named)
    except Exception as error:
        # If it is the function's own, it raises it again.
        first = error
    names = frozenset(name for name, _ in named)
    return replace(spec, optimizer=_SameChoice(spec.optimizer, strategy, names, first))


@dataclass(frozen=True)
class _SameChoice:
    """A function that builds an optimizer, and refuses another choice than its first one."""

    build: OptimizerFactory
    strategy: str
    names: frozenset[str]
    first: Chosen | Exception

    @property
    def __wrapped__(self) -> OptimizerFactory:
        """What it is around; see :attr:`unipar.strategy.EngineSpec.named_optimizer`."""
        return self.build

    def __call__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        named = list(named_parameters)
        optimizer = self.build(named)
        if isinstance(self.first, Exception):
            raise ConfigError(
                f"{self.strategy}: the optimizer function raised {type(self.first).__name__} "
                f"({self.first}) when it was called with the parameters as they are before the "
                "model is divided, to see whether it chooses the same ones then. Let it look at "
                "names, shapes and requires_grad alone, which need no values and no device."
            ) from self.first
        now = _chosen(optimizer, named)
        # A user's own division may have given some another name.
        known = [name for name, _ in named if name in self.names]
        differing = [name for name in known if self.first.get(name) != now.get(name)]
        if differing:
            raise ConfigError(
                f"{self.strategy}: the optimizer function chooses otherwise once the model is "
                "divided, when other tensors stand in the place of its parameters: "
                f"{first_few(differing)} would be in another group, in none, or trained by other "
                "hyperparameters. So it knows parameters as objects (id(p), a set of them), or "
                "looks at their values. Choose by name, among those that it is called with: "
                "lambda named: AdamW([{'params': [p for n, p in named if "
                "n.startswith('head.')], 'lr': 1e-4}, …])."
            )
        return optimizer


def _chosen(optimizer: Optimizer, named: Named) -> Chosen:
    names = {id(parameter): name for name, parameter in named}
    found: Chosen = {}
    for number, group in enumerate(optimizer.param_groups):
        says = {key: _plain(value) for key, value in group.items() if key not in _NO_CHOICE}
        for parameter in group["params"]:
            if id(parameter) in names:
                found[names[id(parameter)]] = number, says
    return found


def _plain(value: Any) -> Any:
    """What can be compared; of a tensor its values, of objects their kind."""
    if isinstance(value, torch.Tensor):
        return None if value.is_meta else _plain(value.tolist())
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        # One that is no number is not equal to itself.
        return repr(float(value))
    return value if isinstance(value, _PLAIN) else type(value)


@contextlib.contextmanager
def _leaving_alone(named: Named) -> Iterator[None]:
    """Let the call draw no numbers of the run's, and freeze nothing yet."""
    on_host, trained = host_generators(), [p.requires_grad for _, p in named]
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        set_host_generators(on_host)
        for (_, parameter), was in zip(named, trained, strict=True):
            parameter.requires_grad_(was)
