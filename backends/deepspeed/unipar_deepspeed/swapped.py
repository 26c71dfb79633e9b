"""What DeepSpeed keeps in files (ZeRO-Infinity): optimizer state by sub-group, and parameters.

In memory there is room for one sub-group and a few parameters: DeepSpeed's swap buffers, which are
there in any case.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from unipar.engine import Undo, flat_state
from unipar.errors import ConfigError
from unipar.state import TensorState
from unipar.utils.scratch import scratch
from unipar_deepspeed.layout import Share, flats, is_stage_3, part

if TYPE_CHECKING:
    from unipar_deepspeed.engine import Initialized


class Swapping:
    """Brings sub-groups into memory for whoever reads or changes their state outside a step.

    Args:
        deepspeed: has DeepSpeed's optimizer, of any stage.
    """

    def __init__(self, deepspeed: Initialized) -> None:
        self._deepspeed = deepspeed
        self._here: int | None = None
        self._changed = False

    @property
    def _zero(self) -> Any:
        return self._deepspeed.zero

    def is_away(self, number: int) -> bool:
        """Return whether a flat partition is kept in a file between steps."""
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


def is_in_file(parameter: Any) -> bool:
    """Return whether this rank's part of a stage 3 parameter is in a file between uses."""
    return getattr(parameter.ds_tensor, "final_location", None) == "nvme"


@dataclass(frozen=True, eq=False)
class SwappedWeight(TensorState):
    """This rank's elements of a weight that lies in a file."""

    parameter: Any
    start: int
    stop: int

    @classmethod
    def of(cls, name: str, parameter: Any, rank: int) -> SwappedWeight:
        start, stop = part(parameter, rank, parameter.ds_tensor.ds_numel)
        dtype = parameter.nvme_swapper.dtype
        held = torch.empty(stop - start, dtype=dtype, device="meta")
        like = flat_state(name, tuple(parameter.ds_shape), start, held)
        return cls(name, like.shape, dtype, like.boxes, parameter, start, stop)

    def read(self) -> Sequence[torch.Tensor]:
        views = self._bring()
        # The buffer is another parameter's in a moment.
        copies = [view.clone() for view in views]
        self.parameter.nvme_swapper.remove_partition_and_release_buffers([self.parameter])
        return copies

    def write(self, tensors: Sequence[torch.Tensor]) -> None:
        for view, tensor in zip(self._bring(), tensors, strict=True):
            view.copy_(tensor)
        self.parameter.nvme_swapper.swap_out_and_release([self.parameter])

    def _bring(self) -> Sequence[torch.Tensor]:
        swapper = self.parameter.nvme_swapper
        swapper.synchronize_reads()
        if self.parameter.ds_tensor.status.name == "NOT_AVAILABLE":
            swapper.swap_in([self.parameter], async_op=False)
        held = self.parameter.ds_tensor.detach().view(-1)[: self.stop - self.start]
        return flat_state(self.name, self.shape, self.start, held).tensors


@contextlib.contextmanager
def parameters_as_they_are() -> Iterator[None]:
    """Let DeepSpeed write fp32 parameters to files, for as long as it is initialized.

    DeepSpeed 0.19.8 (``zero/partition_parameters.py``, ``_set_dtype``) drops the dtype that it is
    given where the device computes no float16, and its files would hold bfloat16.
    """
    from deepspeed.runtime.zero import partition_parameters  # pyright: ignore

    swapper = partition_parameters.AsyncPartitionedParameterSwapper
    partition_parameters.AsyncPartitionedParameterSwapper = lambda config, _: swapper(
        config, torch.float32
    )
    try:
        yield
    finally:
        partition_parameters.AsyncPartitionedParameterSwapper = swapper


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


class Files(NamedTuple):
    """Where the files of one rank of one run are, and what parameters pass through.

    Attributes:
        directory: on a local drive.
        buffer_size: elements of a buffer, one of which holds any rank's part of a parameter.
        buffer_count: how many there are.
    """

    directory: Path
    buffer_size: int
    buffer_count: int


def own_files(path: Path, module: nn.Module, world_size: int) -> tuple[Files, Undo]:
    """A directory for the files of one rank of one run, and what removes it.

    DeepSpeed names its files by rank and parameter, so two runs would write over each other's.
    """
    kept = contextlib.ExitStack()
    made = kept.enter_context(scratch(path))
    largest = max(parameter.numel() for parameter in module.parameters())
    # A module's own parameters are all there at once, and some may have been read ahead.
    together = max(len(list(each.parameters(recurse=False))) for each in module.modules())
    return Files(made, -(-largest // world_size), together + 4), kept.close
