"""Functions that build optimizers and schedulers: how they are called, and what they return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unipar.errors import ConfigError
from unipar.utils.functions import check_function, described

OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]
SchedulerFactory = Callable[[Optimizer], LRScheduler]

_TRAINABLE = "[p for _, p in named if p.requires_grad]"
_EXAMPLES = {
    "optimizer": f"lambda named: AdamW({_TRAINABLE}, lr=1e-3)",
    "lr_scheduler": "lambda optimizer: StepLR(optimizer, 1000)",
}


def refuse_built(optimizer: Any, lr_scheduler: Any) -> None:
    """Refuse what exists already: it holds the parameters from before they are sharded."""
    for name, given, kind in (
        ("optimizer", optimizer, Optimizer),
        ("lr_scheduler", lr_scheduler, LRScheduler),
    ):
        if isinstance(given, kind):
            raise ConfigError(
                f"{name} is a {type(given).__name__} that is built already, and it must be built "
                f"after the model is distributed. Pass a function: {name}={_EXAMPLES[name]}"
            )


def check_factories(optimizer: Any, lr_scheduler: Any) -> None:
    """Refuse what is no function that builds an optimizer or a scheduler; ``None`` is none given.

    Raises:
        ConfigError: it cannot be called as it would be, or what it was to build exists already.
    """
    refuse_built(optimizer, lr_scheduler)
    if optimizer is not None:
        check_function(optimizer, "optimizer", ("named_parameters",))
    if lr_scheduler is not None:
        check_function(lr_scheduler, "lr_scheduler", ("optimizer",))


@dataclass(frozen=True)
class CheckedOptimizer:
    """A function that builds an optimizer, and refuses one that no step could be taken with.

    Attributes:
        build: the user's function.
    """

    build: OptimizerFactory

    @property
    def __wrapped__(self) -> OptimizerFactory:
        """The factory inside; see :attr:`unipar.strategy.EngineSpec.named_optimizer`."""
        return self.build

    def __call__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        # A list, since a function may go through it once for each of its groups.
        named = list(named_parameters)
        try:
            optimizer = self.build(named)
        except ValueError as error:
            # torch 2.13, optim/optimizer.py, Optimizer.__init__.
            if "empty parameter list" not in str(error):
                raise
            raise ConfigError(_no_parameter(named)) from error
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(_returned("optimizer", optimizer, "a torch.optim.Optimizer"))
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if not held:
            raise ConfigError(_no_parameter(named))
        kind, known = type(optimizer).__name__, {id(p) for _, p in named}
        strangers = [p for p in held if id(p) not in known]
        if strangers:
            raise ConfigError(
                f"the optimizer function gave its {kind} a tensor of shape "
                f"{tuple(strangers[0].shape)} that is none of the parameters that it was called "
                "with: one of another model, or of this one before it was distributed. Take them "
                f"from the argument: {_EXAMPLES['optimizer']}. What else is to be trained belongs "
                "into the model."
            )
        if _needs_closure(optimizer):
            raise ConfigError(
                f"the optimizer {kind} cannot be used: its step() needs a closure that evaluates "
                "the model again, and a step here is one forward and backward pass. Use one that "
                "steps by the gradient alone, such as torch.optim.AdamW or SGD."
            )
        return optimizer


@dataclass(frozen=True)
class CheckedScheduler:
    """A function that builds a scheduler, and refuses what is none.

    Attributes:
        build: the user's function.
    """

    build: SchedulerFactory

    def __call__(self, optimizer: Optimizer) -> LRScheduler:
        scheduler = self.build(optimizer)
        methods = ("step", "state_dict", "load_state_dict")
        # Those of other libraries may be no subclass of torch's.
        has_all = all(callable(getattr(scheduler, method, None)) for method in methods)
        if not has_all or isinstance(scheduler, Optimizer):
            raise ConfigError(
                _returned("lr_scheduler", scheduler, "a torch.optim.lr_scheduler.LRScheduler")
            )
        return scheduler


def _returned(name: str, found: Any, wanted: str) -> str:
    what = "None (is a `return` missing?)" if found is None else described(found)
    return (
        f"the {name} function returned {what}, and it must build and return {wanted}: "
        f"{_EXAMPLES[name]}"
    )


def _no_parameter(named: list[tuple[str, nn.Parameter]]) -> str:
    trainable = sum(p.requires_grad for _, p in named)
    return (
        "the optimizer function gave its optimizer no parameter. It was called with "
        f"{len(named)} pairs of a name and a parameter, {trainable} of them to be trained: look "
        f"at how it chooses among them. All are {_TRAINABLE}."
    )


def _needs_closure(optimizer: Optimizer) -> bool:
    try:
        # The class's: a scheduler puts one of its own on the optimizer, without a signature.
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError:
        return True
    except ValueError:  # It has no signature to be read.
        pass
    return False
