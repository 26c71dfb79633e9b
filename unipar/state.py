"""The canonical form of an engine's state: named logical tensors, on whatever ranks they lie.

An engine describes each parameter, buffer and optimizer moment as one :class:`TensorState`: the
tensor's name and full logical shape, and the boxes of it that live on this rank. Saving reads those
boxes and loading fills them, one tensor at a time, so neither ever needs a whole model in one place
and neither knows which framework holds it.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import nn

from unipar.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether ``value`` is divided over a device mesh.

    Asked so, because importing ``DTensor`` takes as long as half of torch, and nothing can be one
    before it has been imported.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor, apart from its gradient: of a ``DTensor`` its part."""
    if is_dtensor(tensor):
        with torch.no_grad():
            tensor = tensor.to_local()
    return tensor.detach()


def changes_of(value: object) -> int:
    """Return how often a tensor was changed in place; 0 of anything that has no count of it."""
    # What was made in inference mode has none.
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


class Box(NamedTuple):
    """An axis-aligned part of a tensor; ``()``, ``()`` is the whole of a scalar."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class TensorState(ABC):
    """One logical tensor, and this rank's part of it.

    Attributes:
        name: fully-qualified name: of a parameter or buffer in the user's model, or
            ``<parameter>.<key>`` for an optimizer moment.
        shape: the full logical shape.
        dtype: the dtype it is stored in.
        boxes: the parts that this rank holds; empty where it holds none. Ranks may hold the same
            box (replicas), and all boxes of all ranks together cover the tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]

    @abstractmethod
    def read(self) -> Sequence[torch.Tensor]:
        """One tensor for each box. Called on every rank in the same order: may be collective."""

    @abstractmethod
    def write(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take one tensor for each box. Called on every rank in the same order."""

    @property
    def in_place(self) -> bool:
        """Whether the tensors of :meth:`read` are the storage itself, so filling them is enough."""
        return False


@dataclass(frozen=True, eq=False)
class LocalState(TensorState):
    """Boxes that are views of memory on this rank."""

    tensors: tuple[torch.Tensor, ...]

    def read(self) -> Sequence[torch.Tensor]:
        return self.tensors

    def write(self, tensors: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for own, new in zip(self.tensors, tensors, strict=True):
                if own is not new:
                    own.copy_(new)

    @property
    def in_place(self) -> bool:
        return True

    def take(self, whole: torch.Tensor) -> None:
        """Copy this rank's part of the whole tensor to where it belongs."""
        for box, own in zip(self.boxes, self.tensors, strict=True):
            ranges = zip(box.offsets, box.sizes, strict=True)
            own.copy_(whole[tuple(slice(at, at + size) for at, size in ranges)])

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> LocalState:
        """Describe a plain tensor (held whole by this rank) or a ``DTensor`` (by its shard)."""
        tensor = tensor.detach()
        if not is_dtensor(tensor):
            shape = tuple(tensor.shape)
            return cls(name, shape, tensor.dtype, (Box((0,) * len(shape), shape),), (tensor,))
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        sizes, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        local = tensor.to_local()
        held = local.numel() > 0
        boxes = (Box(tuple(offsets), tuple(sizes)),) if held else ()
        return cls(name, tuple(tensor.shape), tensor.dtype, boxes, (local,) if held else ())

    @classmethod
    def absent(cls, name: str, shape: Sequence[int], dtype: torch.dtype) -> LocalState:
        """A tensor of which this rank holds nothing."""
        return cls(name, tuple(shape), dtype, (), ())


@dataclass(frozen=True)
class GroupState:
    """One parameter group of an optimizer.

    Attributes:
        params: the names of its parameters.
        hyperparameters: everything else in the group (``lr``, ``betas``, …), JSON values.
    """

    params: tuple[str, ...]
    hyperparameters: Mapping[str, Any]


@dataclass
class EngineState:
    """Everything that one engine needs to go on where it was.

    Attributes:
        weights: parameters and persistent buffers, in the same order on every rank.
        optimizer: the optimizer's moments, likewise; shaped like their parameter, or scalars.
        groups: the optimizer's parameter groups.
        extra: JSON values: ``lr_scheduler``, ``scaler``, and ``scalars`` (optimizer state that is
            no tensor, by parameter name and key).
        aliases: other names of tied weights, to the name they are stored under.
    """

    weights: Iterable[TensorState]
    optimizer: Iterable[TensorState] = ()
    groups: tuple[GroupState, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


class TensorInfo(NamedTuple):
    """The shape and dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class StateSource(Protocol):
    """A stored engine state, as :meth:`unipar.strategy.Engine.import_state` reads it.

    Attributes:
        weights: what is stored, by name.
        optimizer: the stored moments, by parameter name, then key.
        groups: the stored parameter groups.
        extra: as in :class:`EngineState`.
    """

    @property
    def weights(self) -> Mapping[str, TensorInfo]: ...

    @property
    def optimizer(self) -> Mapping[str, Mapping[str, TensorInfo]]: ...

    @property
    def groups(self) -> tuple[GroupState, ...]: ...

    @property
    def extra(self) -> Mapping[str, Any]: ...

    def fill_weights(self, states: Iterable[TensorState]) -> None:
        """Fill each state's boxes from the stored weights of the same name.

        Raises:
            CheckpointError: names or shapes differ (the message lists the differences), or a
                stored file is missing, short or corrupt.
        """
        ...

    def fill_optimizer(self, states: Iterable[TensorState]) -> None:
        """Fill each state's boxes from the stored moments of the same name."""
        ...


class WeightSource(Protocol):
    """Stored weights that a model begins with."""

    def fill(self, states: Sequence[TensorState], aliases: Mapping[str, str]) -> None:
        """Fill each state's boxes from the stored weights of the same name. Collective.

        Args:
            states: all weights of the model.
            aliases: other names of tied ones, to their names in ``states``.

        Raises:
            CheckpointError: what is stored is damaged, or of another model.
        """
        ...


def named_weights(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Parameters and persistent buffers by name, each once; and the other names of tied ones.

    Raises:
        CheckpointError: the module's state dict holds something that is no tensor.
    """
    weights: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[int, str] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise _no_tensor(name, value)
        if id(value) in names:
            aliases[name] = names[id(value)]
        else:
            names[id(value)] = name
            weights[name] = value
    return weights, aliases


def check_extra_state(module: nn.Module) -> None:
    """Find extra state of modules that :func:`named_weights` would refuse, and gather nothing.

    Raises:
        CheckpointError: it is no tensor.
    """
    for name, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            value = part.get_extra_state()
            if not isinstance(value, torch.Tensor):
                raise _no_tensor(f"{name}._extra_state".removeprefix("."), value)


def _no_tensor(name: str, value: Any) -> CheckpointError:
    return CheckpointError(
        f"'{name}' in the model's state dict is a {type(value).__name__}, not a tensor, and cannot "
        "be saved without pickle. Register it as a buffer."
    )
