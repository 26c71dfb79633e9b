"""A model whose weights stage 3 of ZeRO divides, as a user's code finds them.

They are whole while a module of the model computes with them. Elsewhere each is an empty tensor, or
one that is still whole by chance: a norm of all weights would be one of some of them, and weights
that are clamped would be some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from unipar.engine import AbsentTensor, SeenAsModule, Undo, WholeLosses, asked_for
from unipar_deepspeed.layout import flats, part, shares
from unipar_deepspeed.swapped import is_in_file

_REMEDY = (
    "An L2 penalty c·Σp² is weight_decay=2c of SGD or Adam (but not of AdamW); any other is "
    "computed in the forward of the module that holds the parameter, where it is whole, and "
    "returned with its output. For what else is made of it use strategy='zero2' or 'ddp', which "
    "keep all of them on every rank."
)
_HARMLESS = {
    *("__repr__", "_backward_hooks", "_version", "device", "dtype", "element_size", "grad"),
    *("get_device", "grad_fn", "is_complex", "is_cpu", "is_cuda", "is_floating_point", "is_leaf"),
    *("is_meta", "is_nested", "is_quantized", "is_sparse", "itemsize", "layout", "register_hook"),
    *("register_post_accumulate_grad_hook", "requires_grad", "requires_grad_"),
}


def empty_outside(module: nn.Module, strategy: str) -> Undo:
    """Have parameters that are not gathered refuse to be computed with.

    DeepSpeed leaves an empty tensor in their place, whose norm is 0, and which can be clamped, and
    saved.

    Args:
        module: the user's module, divided by DeepSpeed.
        strategy: as the user calls it.

    Returns:
        What takes the refusal back.
    """

    def refusal(name: str) -> str:
        return (
            f"{strategy}: {name} of the model was used where stage 3 of ZeRO has not gathered it: "
            "outside of the model's forward pass, or in the forward of another module than the "
            f"one that holds it. Whole weights are in a checkpoint, which unipar.load_model(path, "
            "model) reads into a model of your own; a script behind a face of unipar.compat has "
            "them in model.state_dict(). Weights that are clamped, averaged or copied by hand need "
            f"strategy='zero2' or 'ddp'. {_REMEDY}"
        )

    # One of a class of the user's own keeps it.
    named: Any = [(n, p) for n, p in module.named_parameters() if type(p) is nn.Parameter]
    parameters = [parameter for _, parameter in named]
    for name, parameter in named:
        status = vars(parameter).pop("ds_status")
        parameter.__class__ = _Divided
        parameter.absent = AbsentTensor.of(
            name, parameter, refusal, shape=parameter.ds_shape, device=parameter.device
        )
        parameter.ds_status = status

    def undo() -> None:
        for parameter in parameters:
            vars(parameter).pop("absent", None)
            parameter.__class__ = nn.Parameter

    return undo


class _Divided(nn.Parameter):
    """A parameter of stage 3, of another class while it is empty.

    DeepSpeed 0.19.8, runtime/zero/partition_parameters.py, notes on the parameter whether it is
    gathered, each time that this changes.
    """

    absent: AbsentTensor
    assigned = False
    """Whether its data were set while it was empty, as a user does, and DeepSpeed before it notes
    that they are there."""

    @property
    def ds_status(self) -> Any:
        return vars(self)["ds_status"]

    @ds_status.setter
    def ds_status(self, status: Any) -> None:
        if self.assigned and status.name == "INFLIGHT":
            _absent(self).fill_(0)  # Refused: what was set would be overwritten.
        self.assigned = False
        vars(self)["ds_status"] = status
        # The class of all others has no cost where the model computes.
        found: Any = _Divided if status.name == "AVAILABLE" else _Emptied
        self.__class__ = found


class _Emptied(_Divided):
    """Says what it is, and is not computed with."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = asked_for(func), kwargs or {}
        sets_data = func.__name__ == "__set__" and name == "data"
        if sets_data:
            args[0].assigned = True
        # By a view PyTorch finds a parameter's node in the graph (autograd/graph.py).
        if name in _HARMLESS or sets_data or (name == "view_as" and args[0] is args[1]):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*_absent(args), **_absent(kwargs))


def _absent(arguments: Any) -> Any:
    return tree_map_only(_Emptied, lambda parameter: parameter.absent, arguments)


class KeptWhole:
    """The small parameters, which stage 3 keeps whole between steps.

    They may be changed by hand as in a plain loop; but after a step DeepSpeed would gather them
    from the shares, which know nothing of that.

    Args:
        zero: DeepSpeed's optimizer.
    """

    def __init__(self, zero: Any) -> None:
        rank = dist.get_rank(zero.dp_process_group)
        trained = {share.parameter: share for share in shares(zero, rank)}
        self._zero = zero
        self._parts = [
            (p, *part(p, rank, p.ds_tensor.numel()), trained.get(p))
            for p in zero.persistent_parameters
            if not is_in_file(p)
        ]

    @torch.no_grad()
    def take_over(self) -> None:
        """Have the shares be what the parameters are.

        Not where a share is in the memory of another device, or in a file.
        """
        partitions = flats(self._zero)
        held: list[torch.Tensor] = []
        changed: list[torch.Tensor] = []
        for parameter, start, stop, share in self._parts:
            if isinstance(parameter, _Emptied):
                continue
            value = parameter.data.view(-1)[start:stop]
            places = [parameter.ds_tensor.view(-1)[: stop - start]]
            if share is not None and partitions[share.flat].numel():
                places.append(partitions[share.flat][share.offset :][: stop - start])
            near = [place for place in places if place.device == value.device]
            held += near
            changed += [value] * len(near)
        if held:
            torch._foreach_copy_(held, changed)  # pyright: ignore[reportPrivateImportUsage]


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
