"""Activations in host memory: what a forward pass saves for the backward pass waits there for it.

Whole storages are moved, each once however many tensors of it are saved, so that views stay views.
On a GPU the copies go through pinned memory on streams of their own: out beside the forward pass;
back beside the backward pass, one storage ahead of its use.

On a CPU the host's memory is the device's. The copies are made all the same, so that a run can be
tried there, and save nothing.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from unipar.engine.forwards import replace_forward
from unipar.engine.transforms import Undo, last_first, repeated_blocks
from unipar.state import changes_of, local_part

SMALLEST = 1024
"""Bytes of a storage from which on it is moved; smaller are seeds, counts and the like."""
_LEAVING = 64 * 2**20
"""Bytes whose memory may wait for their copies, so that the forward pass need not.

At 25 GB/s they take 3 ms. One storage may wait whatever its size.
"""


def offload_activations(model: nn.Module, asked: bool, device: torch.device | None = None) -> Undo:
    """Move what repeated blocks save to host memory until the backward pass takes it.

    Of a model without repeated blocks, what the whole model saves. What stays on the device:
    parameters and what autocast makes of them, storages below :data:`SMALLEST`, and what the
    model's output and the loss save.

    ``forward`` is replaced on the instances, so that no parameter changes its name. Call it after
    :func:`~unipar.engine.checkpoint_activations`, whose regions then save their inputs on the host.

    Args:
        model: the whole model.
        asked: whether to do so at all.
        device: the one that computes. What is saved elsewhere stays there; parameters do not tell,
            for they may wait on the host. Any, if it is not said.
    """
    if not asked:
        return lambda: None
    regions = repeated_blocks(model) or [model]
    offload = _Offload(device)
    return last_first([replace_forward(one, offload.around(one, one.forward)) for one in regions])


class _Offload:
    """The storages of a model that are on the host, in the order in which they went there."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._known: Any = WeakIdKeyDictionary()
        self._last: weakref.ref[Offloaded] | None = None
        self._copies: dict[torch.device, Copies] = {}

    def around(self, region: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def offloaded(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            # Now, for a strategy that shards parameters has gathered them for this pass.
            weights = {_place(parameter) for parameter in region.parameters()}

            def pack(tensor: torch.Tensor) -> _Stays | _Saved:
                if not _can_move(tensor, self._device) or _is_cast_of(tensor, weights):
                    return _Stays.of(tensor)
                storage = tensor.untyped_storage()
                if storage.nbytes() < SMALLEST or storage.data_ptr() in weights:
                    return _Stays.of(tensor)
                watch = _Watch(tensor)
                held = self._held(storage, tensor, watch)
                offset = int(tensor.storage_offset())
                return _Saved(held, watch, tensor.dtype, tensor.shape, tensor.stride(), offset)

            with saved_tensors_hooks(pack, _unpack):
                return forward(*args, **kwargs)

        return offloaded

    def _held(
        self, storage: torch.UntypedStorage, tensor: torch.Tensor, watch: _Watch
    ) -> Offloaded:
        found, seen, good = self._known.get(storage, (None, None, []))
        found = None if found is None else found()
        if found is None or not watch.sees_what(seen):
            # What was changed in place since is another thing.
            found, good = None, []
        # Autograd knows what is written to what it follows. In other memory, kernels and ``.data``
        # write parts without a word: only what has been saved before was there at that time.
        part = (0, storage.nbytes()) if tensor.requires_grad else _range(tensor)
        if found is None or not any(
            first <= _range(tensor)[0] and _range(tensor)[1] <= last for first, last in good
        ):
            before = None if self._last is None else self._last()
            if tensor.device not in self._copies:
                self._copies[tensor.device] = Copies(tensor.device)
            found = Offloaded(storage, self._copies[tensor.device], before)
            self._last = weakref.ref(found)
            self._known[storage] = self._last, watch, [*good, part]
        return found


class _Watch:
    """Says whether a tensor has been changed in place, and does not keep its memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.version = tensor._version
        with torch.no_grad():
            # It shares the count of changes; other memory in its place leaves that alone.
            self._counts = tensor.detach()
            self._counts.data = tensor.new_empty(0)

    def sees_what(self, other: _Watch) -> bool:
        """Whether both have one count of changes, and nothing was changed between them."""
        if self.version != other.version or other._counts._version != self.version:
            return False
        # The count is put back (torch 2.13, autograd/grad_mode.py).
        with _unsafe_preserve_version_counter(self._counts):
            torch.autograd.graph.increment_version(self._counts)
            return other._counts._version != self.version

    def check(self, kind: str) -> None:
        """Raise as autograd does, which leaves it to the hooks, if the tensor was changed."""
        _check_version(kind, self._counts._version, self.version)


class _Stays(NamedTuple):
    """A saved tensor that stays where it is, and how often it had been changed in place."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Stays:
        return cls(tensor, changes_of(tensor))


class _Saved(NamedTuple):
    """A saved tensor: where its storage is, and which part of that it was."""

    held: Offloaded
    watch: _Watch
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def _unpack(saved: _Stays | _Saved) -> torch.Tensor:
    if isinstance(saved, _Stays):
        tensor = saved.tensor
        _check_version(_kind(tensor), changes_of(tensor), saved.version)
        return tensor
    saved.watch.check(_kind(saved))
    storage = saved.held.fetch()
    tensor = torch.empty(0, dtype=saved.dtype, device=storage.device)
    return tensor.set_(storage, saved.offset, saved.shape, saved.stride)


def _kind(tensor: torch.Tensor | _Saved) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _check_version(kind: str, now: int, saved: int) -> None:
    """Raise as autograd does, which leaves it to the hooks for whatever goes through them."""
    if now != saved:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: [{kind}] is at version {now}; expected version {saved} instead. "
            "Let that operation make a new tensor (x = x + y in place of x += y). "
            "activation_offload changes nothing about that: without it, it is an error as well."
        )


class Offloaded:
    """A storage as it was when a tensor of it was saved, on the host.

    Args:
        storage: on the device.
        copies: make them.
        before: what was saved before it, and will be wanted after it.
    """

    def __init__(
        self, storage: torch.UntypedStorage, copies: Copies, before: Offloaded | None
    ) -> None:
        with torch.no_grad():
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self._host, self._left = copies.out(flat)
        self._copies = copies
        self._before = None if before is None else weakref.ref(before)
        self._ahead: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        self._back: weakref.ref[torch.UntypedStorage] | None = None

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self._host.nbytes

    def fetch(self) -> torch.UntypedStorage:
        """The storage, on the device again; the same one as long as a tensor of it is there."""
        found = None if self._back is None else self._back()
        if found is None:
            self._begin()
            assert self._ahead is not None
            flat, arrived = self._ahead
            self._ahead = None
            self._copies.wait(arrived)
            found = flat.untyped_storage()
            self._back = weakref.ref(found)
        before = None if self._before is None else self._before()
        if before is not None and (before._back is None or before._back() is None):
            before._begin()
        return found

    def _begin(self) -> None:
        if self._ahead is None:
            self._ahead = self._copies.back(self._host, self._left)

    def __del__(self) -> None:
        # Nobody wanted it, and its memory must not be used again while it is being filled.
        ahead = self.__dict__.get("_ahead")
        if ahead is not None:
            self._copies.wait(ahead[1])


class Copies:
    """Copies between a device and the host.

    On a GPU each direction has a stream, and events order it with the one that computes: no block
    of the device's memory is given back before that stream waits for the copy, so PyTorch's
    allocator may hand it out at once.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._leaving: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self._streams = None
        if device.type == "cuda":
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def out(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Copy to the host.

        Args:
            flat: a whole storage, uint8 of shape (bytes,).

        Returns:
            The copy, and what tells that it is made.
        """
        if self._streams is None:
            return flat.clone(), None
        stream, _ = self._streams
        host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            host.copy_(flat, non_blocking=True)
        left = torch.cuda.Event()
        left.record(stream)
        self._leaving.append((left, flat))
        self._let_go(_LEAVING, 1)
        return host, left

    def back(
        self, host: torch.Tensor, left: torch.cuda.Event | None
    ) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Begin to copy to the device.

        Args:
            host: what :meth:`out` has given.
            left: likewise.

        Returns:
            The copy, and what has to be waited for before it is used, or given back.
        """
        if self._streams is None:
            return host.clone(), None
        self._let_go(0)
        _, stream = self._streams
        flat = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        # Until now that memory may have been something else.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        assert left is not None
        stream.wait_event(left)
        with torch.cuda.stream(stream):
            flat.copy_(host, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(stream)
        return flat, arrived

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let the stream that computes wait; the host goes on."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def _let_go(self, most: int, anyway: int = 0) -> None:
        """Let no more than these bytes wait for their copies, but so many storages anyway."""
        waiting = sum(flat.nbytes for _, flat in self._leaving)
        while waiting > most and len(self._leaving) > anyway:
            event, flat = self._leaving.popleft()
            waiting -= flat.nbytes
            self.wait(event)


def _can_move(tensor: torch.Tensor, device: torch.device | None) -> bool:
    if type(tensor) is not torch.Tensor or isinstance(tensor._base, nn.Parameter):
        return False
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    return device is None or tensor.device == device


def _is_cast_of(tensor: torch.Tensor, weights: set[int]) -> bool:
    """Whether it is, or is a view of, what autocast has made of a weight."""
    whole = tensor if tensor._base is None else tensor._base
    made: Any = whole.grad_fn
    if made is None or made.name() != "ToCopyBackward0":
        return False
    leaf = getattr(made.next_functions[0][0], "variable", None)
    return leaf is not None and _place(leaf) in weights


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a storage that a tensor may have, and the one after its last."""
    if tensor.numel() == 0:
        return 0, 0
    steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset()) * tensor.itemsize
    return first, first + (steps + 1) * tensor.itemsize


def _place(parameter: torch.Tensor) -> int:
    """Where the memory of a parameter is."""
    return local_part(parameter).untyped_storage().data_ptr()
