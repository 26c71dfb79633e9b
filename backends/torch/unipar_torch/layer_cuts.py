"""What dividing a layer over tensor-parallel ranks does to it.

Parameters are DTensors on the mesh of these ranks, divided or replicated, so that FSDP, optimizers
and checkpoints know the whole. A layer computes with what this rank has, on plain tensors; where
activations go from whole to divided and back, a DTensor's change of placement is the collective,
in both directions:

====================  ===============================  =============================
where                 forward                          backward
====================  ===============================  =============================
into columns          nothing (gather the sequence)    sum (sum and scatter)
out of rows           sum (sum and scatter)            nothing (gather the sequence)
====================  ===============================  =============================

in brackets where the sequence is divided between them. (Shoeybi et al., arXiv:1909.08053;
Korthikanti et al., arXiv:2205.05198.) A layer whose parameters are plain tensors computes as it
always has.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional

from unipar.engine import mark_part, mark_whole

SEQUENCE = 1
"""The dimension of activations that is the sequence."""


class Activations:
    """How activations go between ranks.

    Args:
        mesh: of the tensor-parallel ranks.
        sequence: whether they are divided by sequence outside of what is divided by columns.
        entered: whether that is seen to before a layer is called, by the module that holds it.
    """

    def __init__(self, mesh: DeviceMesh, *, sequence: bool = False, entered: bool = False) -> None:
        self.mesh, self.entered = mesh, entered
        self.outside = Shard(SEQUENCE) if sequence else Replicate()
        self._known: tuple[weakref.ref[torch.Tensor], torch.Tensor, Any] | None = None

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Whole, for a layer of which each rank has some columns."""
        if self.entered:
            return x
        if torch.compiler.is_compiling() or x.is_inference():
            # Tensors of inference mode do not count what is done to them.
            return self._enter(x)
        # Queries, keys and values have one input, and its gradients are summed over ranks once.
        pass_of = x._version, torch.is_grad_enabled()
        if self._known is not None:
            before, known, known_pass = self._known
            if before() is x and known_pass == pass_of:
                return known
        entered = self._enter(x)
        self._known = weakref.ref(x), entered, pass_of
        return entered

    def _enter(self, x: torch.Tensor) -> torch.Tensor:
        entered = DTensor.from_local(x, self.mesh, [self.outside], run_check=False)
        return entered.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def leave(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of what ranks have computed from their rows."""
        # All that take the columns' input have been called, and it need not be kept.
        self._known = None
        total = DTensor.from_local(part, self.mesh, [Partial()], run_check=False)
        return total.redistribute(placements=[self.outside]).to_local()

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """All columns, of which each rank has some; then all ranks do the same with them."""
        whole = DTensor.from_local(part, self.mesh, [Shard(part.ndim - 1)], run_check=False)
        return whole.redistribute(placements=[Replicate()]).to_local()

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's columns of what all ranks have."""
        whole = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(x.ndim - 1)]).to_local()

    def split_sequence(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sequence of what all ranks have."""
        whole = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        part = whole.redistribute(placements=[Shard(SEQUENCE)]).to_local()
        mark_part(part, "the first block's input (a part of the sequence)")
        return part

    def gather_sequence(self, x: torch.Tensor) -> torch.Tensor:
        """The whole sequence, of which each rank has a part; then all ranks do the same with it."""
        whole = DTensor.from_local(x, self.mesh, [Shard(SEQUENCE)], run_check=False)
        gathered = whole.redistribute(placements=[Replicate()]).to_local()
        mark_whole(gathered)
        return gathered

    def held(self, parameter: torch.Tensor) -> torch.Tensor:
        """What this rank has of a parameter."""
        assert isinstance(parameter, DTensor)
        return parameter.to_local()

    def held_outside(self, parameter: torch.Tensor) -> torch.Tensor:
        """A whole parameter that is used on activations as they are outside of divided layers."""
        assert isinstance(parameter, DTensor)
        divided = isinstance(self.outside, Shard)
        return parameter.to_local(grad_placements=[Partial() if divided else Replicate()])


Forward = Callable[..., torch.Tensor]


def divided_forward(name: str, layer: nn.Module, style: str, activations: Activations) -> Forward:
    """The forward of a layer that is divided.

    Args:
        name: of the layer.
        layer: with its parameters as DTensors.
        style: one of :data:`unipar_torch.tensor_plan.STYLES` that divides parameters.
        activations: how they go between ranks.
    """
    divided = _FORWARDS[style]
    whole: Any = type(layer).forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(layer.weight, DTensor):
            return whole(layer, x)
        output = divided(layer, x, activations)
        if style == "colwise":
            mark_part(output, name)
        elif activations.outside.is_shard():
            mark_part(output, f"{name} (a part of the sequence)")
        else:
            mark_whole(output)
        return output

    return forward


def _columns(layer: Any, x: torch.Tensor, activations: Activations) -> torch.Tensor:
    bias = None if layer.bias is None else activations.held(layer.bias)
    return functional.linear(activations.enter(x), activations.held(layer.weight), bias)


def _rows(layer: Any, part: torch.Tensor, activations: Activations) -> torch.Tensor:
    total = activations.leave(functional.linear(part, activations.held(layer.weight)))
    # Added once, not by each rank.
    return total if layer.bias is None else total + activations.held_outside(layer.bias)


def _columns_gathered(layer: Any, x: torch.Tensor, activations: Activations) -> torch.Tensor:
    return activations.gather(_columns(layer, x, activations))


def _rows_of_whole(layer: Any, x: torch.Tensor, activations: Activations) -> torch.Tensor:
    return _rows(layer, activations.split(x), activations)


def _embedding_rows(layer: Any, ids: torch.Tensor, activations: Activations) -> torch.Tensor:
    weight = activations.held(layer.weight)
    first = activations.mesh.get_local_rank() * len(weight)
    here = (ids >= first) & (ids < first + len(weight))
    own = torch.where(here, ids - first, 0)
    padding = layer.padding_idx
    if padding is not None:
        # Its row gets no gradient, on the rank that has it.
        padding = padding - first if first <= padding < first + len(weight) else None
    found = functional.embedding(own, weight, padding)
    return activations.leave(found * here.unsqueeze(-1).to(found.dtype))


def _embedding_columns(layer: Any, ids: torch.Tensor, activations: Activations) -> torch.Tensor:
    weight = activations.held(layer.weight)
    return activations.gather(functional.embedding(ids, weight, layer.padding_idx))


_FORWARDS: dict[str, Callable[[Any, torch.Tensor, Activations], torch.Tensor]] = {
    "colwise": _columns,
    "rowwise": _rows,
    "colwise_gather_output": _columns_gathered,
    "rowwise_split_input": _rows_of_whole,
    "embedding_rowwise": _embedding_rows,
    "embedding_colwise": _embedding_columns,
}


# -- layers that stay whole ------------------------------------------------------------------------

_classes: dict[tuple[type[nn.Module], tuple[str, ...], bool], type[nn.Module]] = {}


def show_whole_parameters(
    module: nn.Module, mesh: DeviceMesh, *, summed: bool
) -> Callable[[], None]:
    """Let a module that is not divided find plain tensors where its replicated parameters are.

    Outside of passes, where FSDP divides them, they are DTensors for it, too.

    Args:
        module: with parameters of its own.
        mesh: of the tensor-parallel ranks.
        summed: whether each rank computes a part of their gradients, which are to be summed:
            between divided layers, and where the sequence is divided. Otherwise all compute the
            same.

    Returns:
        What takes that back.
    """
    names = tuple(
        name for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
    )
    own = type(module)
    key = (own, names, summed)
    if key not in _classes:
        placements = [Partial() if summed else Replicate()]
        properties: dict[str, Any] = {name: _shown(name, placements) for name in names}
        _classes[key] = type(own.__name__, (own,), {**properties, "__module__": own.__module__})
    module.__class__ = _classes[key]

    def undo() -> None:
        # FSDP has made a class of it in its turn.
        if type(module) is _classes[key]:
            module.__class__ = own

    return undo


def _shown(name: str, placements: list[Any]) -> property:
    def read(module: nn.Module) -> Any:
        parameter = module._parameters[name]
        if is_gathered(parameter):
            return parameter.to_local(grad_placements=placements)
        return parameter

    return property(read)


def is_gathered(parameter: Any) -> TypeGuard[DTensor]:
    """Whether a parameter is as passes have it: on the tensor-parallel ranks' mesh alone."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names == ("tp",)
