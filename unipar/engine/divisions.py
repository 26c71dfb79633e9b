"""Ways to divide among ranks the tensors that an optimizer updates, in small and in one process."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from unipar.state import is_dtensor
from unipar.utils.torch_versions import check_arguments_kept

Part = torch.Tensor | None
"""What a rank has of a tensor; ``None`` where its optimizer has nothing of it."""


class Division(ABC):
    """How a strategy divides what an optimizer updates.

    Attributes:
        num_shares: how many ranks are imitated.
        device: where the parts are updated; ``None`` where the parameters are.
        comes_first: whether the optimizer is built over parts, so that all that it keeps refers to
            these; otherwise they are put into its groups when it has been built over the whole.
        elsewhere: whether the parts lie elsewhere than the weights that the model computes with,
            which get them in a step only.
    """

    num_shares: int = 1
    device: torch.device | None = None
    comes_first: bool = False
    elsewhere: bool = False

    @abstractmethod
    def split(self, number: int, parameter: torch.Tensor, whole: torch.Tensor) -> list[Part]:
        """Return what each rank has of the tensor ``number``, which stands for ``parameter``."""

    @abstractmethod
    def join(self, parts: Sequence[Any], whole: torch.Tensor) -> torch.Tensor:
        """The parts that ranks have, put together to a tensor like ``whole``."""

    def build(self, optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer | None:
        """The optimizer of a rank where it is one built again; ``None`` where it is the user's."""
        return None


class Undivided(Division):
    """One rank, which has everything."""

    comes_first = True

    def split(self, number: int, parameter: torch.Tensor, whole: torch.Tensor) -> list[Part]:
        return [whole.clone()]

    def join(self, parts: Sequence[Any], whole: torch.Tensor) -> torch.Tensor:
        return parts[0]


@dataclass(frozen=True)
class Flat(Division):
    """Each rank has a run of a tensor's elements in one dimension, as ZeRO divides them."""

    num_shares: int = 2
    device: torch.device | None = None
    comes_first: bool = False
    elsewhere: bool = True

    def split(self, number: int, parameter: torch.Tensor, whole: torch.Tensor) -> list[Part]:
        return _cut(whole.flatten(), 0, self.num_shares)

    def join(self, parts: Sequence[Any], whole: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(parts)).view(whole.shape)


@dataclass(frozen=True)
class Sliced(Division):
    """Each rank has a slice of a matrix and all of a vector, as tensor parallelism divides them.

    Attributes:
        dim: the one that is divided.
    """

    dim: int
    num_shares: int = 2

    def split(self, number: int, parameter: torch.Tensor, whole: torch.Tensor) -> list[Part]:
        if whole.ndim > 1:
            return _cut(whole, self.dim, self.num_shares)
        return [whole.clone() for _ in range(self.num_shares)]

    def join(self, parts: Sequence[Any], whole: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(parts), self.dim) if whole.ndim > 1 else parts[0]


@dataclass(frozen=True)
class ByTensor(Division):
    """Each rank has some of the tensors, whole.

    Attributes:
        rebuilt: whether each rank builds an optimizer of the same class from hyperparameters.
    """

    rebuilt: bool = False
    num_shares: int = 2

    def split(self, number: int, parameter: torch.Tensor, whole: torch.Tensor) -> list[Part]:
        own = number % self.num_shares
        return [whole.clone() if rank == own else None for rank in range(self.num_shares)]

    def join(self, parts: Sequence[Any], whole: torch.Tensor) -> torch.Tensor:
        return parts[0]

    @property
    def elsewhere(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """One that is built again is not the one whose methods a script calls."""
        return self.rebuilt

    def build(self, optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer | None:
        if not self.rebuilt:
            return None
        built = type(optimizer)(groups, **constructor_arguments(optimizer))
        share_hooks(optimizer, built)
        return built


@dataclass(frozen=True)
class AsDTensors(Division):
    """Each rank has its shard of a DTensor, divided as the parameter is, or a plain tensor whole.

    Collective.
    """

    comes_first: bool = True

    def split(self, number: int, parameter: torch.Tensor, whole: torch.Tensor) -> list[Part]:
        # It takes long to import, and where there are DTensors it has been.
        from torch.distributed.tensor import DTensor, distribute_tensor

        if not isinstance(parameter, DTensor):
            return [whole.clone()]
        mesh, placements = parameter.device_mesh, parameter.placements
        # Every rank has the whole, so that nothing needs to be sent. A shard may be a view of it
        # (torch 2.8, distributed/tensor/placement_types.py, _split_tensor; not in 2.13).
        divided = distribute_tensor(whole.clone(), mesh, placements, src_data_rank=None)
        divided = divided.to(parameter.device)
        check_arguments_kept(divided)
        return [divided]

    def join(self, parts: Sequence[Any], whole: torch.Tensor) -> torch.Tensor:
        return whole_of(parts[0]).to(whole.device)


def constructor_arguments(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's defaults that its constructor takes.

    AdamW's hold `decoupled_weight_decay`, which is no argument of it.
    """
    accepted = inspect.signature(type(optimizer)).parameters
    return {key: value for key, value in optimizer.defaults.items() if key in accepted}


def share_hooks(optimizer: Optimizer, built: Optimizer) -> None:
    """Have the steps of an optimizer that is built again run the hooks of the first one's.

    Those that it is given later, too: it is the one that a script holds.
    """
    # torch 2.13, optim/optimizer.py.
    built._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
    built._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks


def whole_of(value: Any) -> Any:
    """A DTensor gathered, and anything else as it is."""
    if is_dtensor(value):
        with torch.no_grad():
            return value.full_tensor()
    return value


def _cut(whole: torch.Tensor, dim: int, num_shares: int) -> list[Part]:
    """Unequal parts, so that no half can be taken for the other; some may be nothing."""
    size, parts, begin = whole.shape[dim], [], 0
    for rank in range(num_shares):
        end = size if rank == num_shares - 1 else begin + -(-2 * (size - begin) // 5)
        part = whole.narrow(dim, begin, end - begin)
        parts.append(part.clone() if part.numel() else None)
        begin = end
    return parts
