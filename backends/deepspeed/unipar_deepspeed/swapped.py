"""Optimizer state that DeepSpeed keeps in files (ZeRO-Infinity), a sub-group of stage 3 at a time.

In memory there is room for one sub-group: DeepSpeed's swap buffers, which are there in any case.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unipar.engine import Undo
from unipar.errors import ConfigError
from unipar.state import TensorState
from unipar_deepspeed.layout import Share, flats, is_stage_3


class Swapping:
    """Brings sub-groups into memory for whoever reads or changes their state outside a step.

    Args:
        zero: DeepSpeed's optimizer, of any stage.
    """

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        self._here: int | None = None
        self._changed = False

    def is_away(self, number: int) -> bool:
        """Whether a flat partition is kept in a file between steps."""
        return is_stage_3(self._zero) and self._zero._swappable_optimizer_subgroup(number)

    def bring(self, number: int, *, change: bool) -> torch.Tensor:
        """The flat partition, in memory with its state until :meth:`settle` or the next one."""
        if self._here != number:
            self.settle()
            self._zero._optimizer_states_and_gradient_swap_in(number)
            self._here = number
        self._changed = self._changed or change
        return flats(self._zero)[number]

    def settle(self) -> None:
        """Put back what is here. DeepSpeed needs its buffers from the next backward pass on."""
        if self._here is None:
            return
        if self._changed:
            self._zero._optimizer_states_and_gradient_swap_out(self._here)
        else:
            self._zero._release_swap_buffers(self._here)
        self._here, self._changed = None, False

    def forget(self, number: int) -> None:
        """Drop the partition's optimizer state, and the files that DeepSpeed knows it by."""
        self.settle()
        flat = flats(self._zero)[number]
        self._zero.optimizer.state.pop(flat, None)
        known = self._zero.optimizer_swapper.swap_params_info[flat.ds_id]  # pyright: ignore[reportAttributeAccessIssue]
        known.tensors = known.tensors[:1]
        known.has_state_tensors = False

    def state(self, name: str, key: str, share: Share, dtype: torch.dtype) -> TensorState:
        """Describe a moment of a partition that is away."""
        size = int(self._zero.fp16_partitioned_groups_flat_numel[share.flat])
        like = share.state(name, torch.empty(size, dtype=dtype, device="meta"))
        return SwappedState(name, like.shape, dtype, like.boxes, self, share, key)

    def moment(self, share: Share, key: str, *, change: bool) -> torch.Tensor:
        return self._zero.optimizer.state[self.bring(share.flat, change=change)][key]


@dataclass(frozen=True, eq=False)
class SwappedState(TensorState):
    """This rank's elements of a moment that lies in a file."""

    swapping: Swapping
    share: Share
    key: str

    def read(self) -> Sequence[torch.Tensor]:
        moment = self.swapping.moment(self.share, self.key, change=False)
        # The buffer is another sub-group's in a moment.
        return [view.clone() for view in self.share.state(self.name, moment).tensors]

    def write(self, tensors: Sequence[torch.Tensor]) -> None:
        moment = self.swapping.moment(self.share, self.key, change=True)
        self.share.state(self.name, moment).write(tensors)


def align_gradients(zero: Any) -> None:
    """Let DeepSpeed read gradients back from files only to where they can be read to.

    DeepSpeed 0.19.8 cuts a gradient so that its length is a multiple of what direct I/O needs
    (``optimizer_utils.py``, ``_adjust_for_misaligned_lengths``), and reads it to any place of the
    partition; where that place is not aligned, nothing is read and nothing is said. Here what comes
    before the first aligned element stays in memory, as what comes after the last one does.
    """
    swapper = getattr(zero, "optimizer_swapper", None)
    if swapper is None:
        return
    unit = swapper.numel_alignment

    def cut(
        tensors: Sequence[torch.Tensor], offsets: Sequence[int]
    ) -> tuple[list[torch.Tensor], list[int]]:
        pieces: list[torch.Tensor] = []
        places: list[int] = []
        for tensor, offset in zip(tensors, offsets, strict=True):
            size = tensor.numel()
            head = min(-offset % unit, size)
            middle = (size - head) // unit * unit
            if not swapper.is_swappable_tensor(tensor=tensor):
                head, middle = size, 0
            for begin, end in ((0, head), (head, head + middle), (head + middle, size)):
                if begin < end:
                    pieces.append(tensor[begin:end])
                    places.append(offset + begin)
        return pieces, places

    swapper._adjust_for_misaligned_lengths = cut


def check_directory(path: Path, strategy: str) -> None:
    """Refuse a directory that state cannot be swapped to.

    Raises:
        ConfigError: it is not there, cannot be written, or takes no direct I/O.
    """
    wanted = f"{strategy}: nvme_path={path}"
    if not path.is_dir():
        raise ConfigError(f"{wanted} is no directory. Make it, on a drive of this machine.")
    try:
        with tempfile.NamedTemporaryFile(dir=path) as file:
            os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT))
    except OSError as error:
        why = (
            "its file system takes no direct I/O, which DeepSpeed writes with"
            if error.errno == errno.EINVAL
            else f"it cannot be written: {error.strerror}"
        )
        raise ConfigError(f"{wanted}: {why}. Give a directory on a drive of this machine.") from (
            error
        )


def own_directory(path: Path) -> tuple[Path, Undo]:
    """A directory for the files of one rank of one run, and what removes it.

    DeepSpeed names its files by rank and parameter, so two runs would write over each other's.
    """
    made = Path(tempfile.mkdtemp(prefix="unipar-", dir=path))
    return made, lambda: shutil.rmtree(made)
