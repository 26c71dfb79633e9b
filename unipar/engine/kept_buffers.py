"""Buffers that forward passes change, which a step that is left out leaves as they were."""

from __future__ import annotations

import logging

import torch
from torch import nn

from unipar.engine.broadcast import with_copies
from unipar.errors import first_few
from unipar.state import local_part

log = logging.getLogger("unipar")

_SMALL = 2**16
"""Bytes up to which a buffer is copied in each step: the statistics of a layer."""


class KeptBuffers:
    """Those of a module before a step: statistics of batch norms, moving averages of a user's own.

    Of what is larger, integers (quantized weights) are not copied, and other numbers only if the
    first step has changed them: a mask is not.

    Args:
        module: whose buffers.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places: list[tuple[str, nn.Module, str]] = []
        self._looked = 0
        self._constant: set[str] = set()
        self._changing: set[str] = set()
        self.forget()

    def forget(self) -> None:
        """Have nothing to put back."""
        self._tensors: dict[str, torch.Tensor] = {}
        self._small: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._others: dict[str, torch.Tensor] = {}

    def keep(self) -> None:
        """Copy what forward passes are to change."""
        self.forget()
        if self._looked < 2:
            # Not in each step, for it takes time; the first may register more.
            self._looked += 1
            self._places = [
                (f"{path}.{name}".lstrip("."), owner, name)
                for path, owner in self._module.named_modules()
                for name, _ in owner.named_buffers(recurse=False, remove_duplicate=False)
            ]
        small = []
        for path, owner, name in self._places:
            tensor = getattr(owner, name, None)
            if tensor is None:
                continue
            self._tensors[path] = tensor
            if path in self._constant or not _can_be_filled(tensor):
                continue
            if type(tensor) is torch.Tensor and tensor.nbytes <= _SMALL:
                small.append(tensor)
            elif type(tensor) is not torch.Tensor or tensor.is_floating_point():
                # A DTensor (torch 2.13), for one, cannot be copied together with others.
                self._others[path] = tensor.detach().clone()
        self._small = with_copies(small)

    def take(self) -> None:
        """Leave all as forward passes have made it, for the step is taken."""
        for path, before in self._others.items():
            if path not in self._changing:
                # Asked once of each, for it waits for the device.
                same = type(before) is torch.Tensor and torch.equal(self._tensors[path], before)
                (self._constant if same else self._changing).add(path)
        self.forget()

    def put_back(self) -> None:
        """Undo what forward passes have changed since."""
        for path, owner, name in self._places:
            # A model may assign another tensor instead of filling the one it had.
            if path in self._tensors and getattr(owner, name, None) is not self._tensors[path]:
                setattr(owner, name, self._tensors[path])
        for tensor, before in self._small:
            tensor.copy_(before)
        for path, before in self._others.items():
            self._tensors[path].detach().copy_(before)
        late = [path for path in self._constant if has_nan(self._tensors.get(path))]
        self._constant -= {*late}
        self.forget()
        if late:
            log.warning(
                "a step was left out whose forward pass has left NaN in buffers that the first "
                "step had not changed, and that are therefore not copied: %s. Load them from a "
                "checkpoint.",
                first_few(late),
            )


def has_nan(buffer: torch.Tensor | None) -> bool:
    """Whether NaN is in this rank's part of a buffer, as far as its format tells."""
    if buffer is None:
        return False
    try:
        return bool(local_part(buffer).float().isnan().any())
    except RuntimeError:
        # Of meta tensors, of some layouts and of formats of 4 bits nothing can be asked.
        return False


def _can_be_filled(tensor: torch.Tensor) -> bool:
    """Whether its elements can be copied back."""
    return (
        tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_meta or tensor.is_inference())
        and all(step or size <= 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    )
