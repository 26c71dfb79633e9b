"""Buffers that forward passes change, which a step that is left out leaves as they were."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import nn

from unipar.engine.broadcast import with_copies
from unipar.errors import first_few

log = logging.getLogger("unipar")

_SMALL = 2**16
"""Bytes up to which a buffer is copied in each step: the statistics of a layer."""


@dataclass(frozen=True, slots=True)
class _Kept:
    path: str
    owner: nn.Module
    name: str
    tensor: torch.Tensor
    version: int

    @property
    def is_constant(self) -> bool:
        return getattr(self.owner, self.name) is self.tensor and (
            self.tensor._version == self.version
        )


class KeptBuffers:
    """Those of a module before a step: statistics of batch norms, moving averages of a user's own.

    What is large and was not changed when its module trained last, such as a mask, is not copied.

    Args:
        module: whose buffers.
    """

    def __init__(self, module: nn.Module) -> None:
        # Found once: they are kept in every step.
        self._places = [
            (f"{path}.{name}".lstrip("."), owner, name)
            for path, owner in module.named_modules()
            for name, _ in owner.named_buffers(recurse=False)
        ]
        self._constant: set[str] = set()
        self._kept: list[_Kept] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self) -> None:
        """Copy what forward passes are to change."""
        for one in self._kept:
            if one.is_constant and one.tensor.nbytes > _SMALL:
                self._constant.add(one.path)
            else:
                self._constant.discard(one.path)
        self._kept = [
            _Kept(path, owner, name, tensor, tensor._version)
            for path, owner, name in self._places
            if owner.training and (tensor := getattr(owner, name)) is not None
        ]
        changing = [one.tensor.detach() for one in self._kept if one.path not in self._constant]
        self._copies = with_copies(one for one in changing if type(one) is torch.Tensor)
        # A DTensor (torch 2.13), for one, cannot be copied together with others.
        self._copies += [(one, one.clone()) for one in changing if type(one) is not torch.Tensor]

    def forget(self) -> None:
        """Have nothing to put back."""
        self._kept, self._copies = [], []

    def put_back(self) -> None:
        """Undo what forward passes have changed since."""
        late = [
            one.path
            for one in self._kept
            if one.path in self._constant and one.tensor._version != one.version
        ]
        for one in self._kept:
            # A model may assign another tensor instead of filling the one it had.
            setattr(one.owner, one.name, one.tensor)
        for one, before in self._copies:
            one.copy_(before)
        self._constant -= set(late)
        self.forget()
        if late:
            log.warning(
                "a step was left out whose forward pass has changed buffers that no step before it "
                "had changed, so they stay as it has made them: %s. Look whether they are finite.",
                first_few(late),
            )
