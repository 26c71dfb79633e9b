"""A model whose weights stage 3 of ZeRO divides, as a loss function finds them.

They are whole while a module of the model computes with them. Elsewhere each is an empty tensor, or
one that is still whole by chance: a penalty over all weights would be one over some of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from unipar.engine import AbsentTensor, SeenAsModule, WholeLosses

_REMEDY = (
    "An L2 penalty c·Σp² is weight_decay=2c of SGD or Adam (but not of AdamW); any other is "
    "computed in the forward of the module that holds the parameter, where it is whole, and "
    "returned with its output. For what else is made of it use strategy='zero2' or 'ddp', which "
    "keep all of them on every rank."
)
# torch 2.13, csrc/autograd/engine.cpp, validate_outputs: what is divided has the shape (0,).
_EMPTY = re.compile(r"invalid gradient .* got \[0\] but expected|expected shape .* \[0\]$")


class SeenDivided(SeenAsModule):
    """The user's module, whose weights may be asked what they are, and not computed with.

    Args:
        module: the user's module, divided by DeepSpeed.
        wrapper: DeepSpeed's engine.
        strategy: as the user calls it.
        shapes: of whole parameters, by name, where they are not what DeepSpeed was given.
    """

    def __init__(
        self,
        module: nn.Module,
        wrapper: Callable[..., Any],
        strategy: str,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        super().__init__(module, wrapper)

        def refusal(name: str) -> str:
            return (
                f"{strategy}: the loss function uses {name} of the model, which stage 3 of ZeRO "
                "divides among ranks: its values are there only while the model computes. "
                f"{_REMEDY}"
            )

        named: Any = module.named_parameters()
        absent = {
            p: AbsentTensor.of(
                name, p, refusal, shape=shapes.get(name, p.ds_shape), device=p.device
            )
            for name, p in named
        }
        object.__setattr__(self, "_absent", absent)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """What stands in for them, by the names that they have in the user's module."""
        absent: dict[nn.Parameter, AbsentTensor] = vars(self)["_absent"]
        for name, parameter in super().named_parameters(*args, **kwargs):
            stand_in = absent[parameter]
            if stand_in.requires_grad != parameter.requires_grad:
                stand_in.requires_grad_(parameter.requires_grad)
            yield name, stand_in


def losses_of_output(module: nn.Module, strategy: str) -> WholeLosses:
    """Refuse losses that lead to weights other than through what the model gives."""
    return WholeLosses(dict(module.named_parameters()), [module], strategy)


def explain_empty(error: RuntimeError) -> str:
    """Explain an error of torch's that comes of weights that are not there; else empty."""
    if not _EMPTY.search(str(error)):
        return ""
    return (
        "the model computes with a parameter in the forward of another module than the one that "
        "holds it (a penalty over self.parameters()), where stage 3 of ZeRO has not gathered it: "
        f"it was an empty tensor there. {_REMEDY} PyTorch says: {error}"
    )
