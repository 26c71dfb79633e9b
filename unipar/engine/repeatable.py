"""Regions that are computed twice, and what they must leave alone for that.

The second computation starts from what the first one, and everything since, has left. What a region
changes is changed twice, and what it reads may be another thing by then. A user's code that does so
is refused, in the first passes of each region: later ones cost next to nothing.
"""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from unipar.errors import ConfigError
from unipar.state import changes_of, is_dtensor, local_part

_COMPARED = 4
"""Passes through a region whose effect on attributes is looked at.

The first may begin with an attribute that is not set yet, which a moving average takes as it comes.
"""
_ROUNDING = 1e-2
"""Part of an attribute's change up to which a second one is rounding: kernels may differ in it."""
# torch 2.13, utils/checkpoint.py: selective checkpointing meets an operation that it has not seen.
_UNKNOWN = "encountered during backward but not found in storage"
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CODE = (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)
_OF_MODULES = frozenset(dir(nn.Module))
_OFF = (
    "Or recompute other modules, by their classes: activation_checkpointing=('MyBlock',); or turn "
    "it off."
)


class Repeatable:
    """A region whose forward is computed again in the backward pass.

    Args:
        module: the region, as it was given.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._calls: set[tuple[Any, ...]] = set()
        self._left = _COMPARED
        # A framework may keep counts of its own on modules, but has not been there yet.
        self._names = {name: _names(part) for name, part in module.named_modules()}

    @contextlib.contextmanager
    def forward_pass(self, args: Any, kwargs: Any) -> Iterator[AbstractContextManager[None]]:
        """Look at what the region changes in a forward pass, where that is seen at once.

        Looked at in its first pass with arguments of these types, in training and in evaluation.

        Yields:
            A context for the second computation, which looks at the region's attributes.

        Raises:
            ConfigError: it changes a buffer or a parameter, as BatchNorm does, or what it is given;
                or it draws random numbers that the second computation would not draw again.
        """
        grad = torch.is_grad_enabled()
        named = {name: type(value) for name, value in kwargs.items()}
        call = self.module.training, grad, *map(type, args), *sorted(named.items(), key=str)
        fresh = call not in self._calls
        before = {name: _noted(name, tensor) for name, tensor in self._tensors()} if fresh else {}
        given = _given(args, kwargs) if fresh and grad else {}
        drawn = _drawn() if fresh and grad else {}
        looks = grad and self._left > 0
        self._left -= looks
        again = _Again(self, self.state() if looks else None)
        yield again
        again.end()
        if not fresh:
            return
        for name, tensor in self._tensors():
            if name in before and _changed(name, tensor, before[name]):
                kind, _, name = name.partition(" ")
                raise ConfigError(
                    f"activation_checkpointing computes {self.kind} twice, and its forward "
                    f"changes its {kind} '{name}', which would be changed twice (as the "
                    f"statistics of BatchNorm would). Change it outside of the block. {_OFF}"
                )
        if given:
            self._refuse_changed(given, _given(args, kwargs))
        for kind, numbers in _drawn().items():
            if numbers != drawn.get(kind, numbers):
                raise ConfigError(
                    f"activation_checkpointing computes {self.kind} twice, and its forward draws "
                    f"random numbers of {kind}, which would be others the second time. Draw them "
                    "by torch (torch.rand), whose numbers are repeated, or outside of the block "
                    f"and give them to it. {_OFF}"
                )
        self._calls.add(call)

    @property
    def kind(self) -> str:
        """The name of its class."""
        return type(self.module).__name__

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers and parameters as this rank has them, but for those of a framework's kinds."""
        for name, buffer in self.module.named_buffers():
            yield f"buffer {name}", local_part(buffer)
        for name, parameter in self.module.named_parameters():
            if is_dtensor(parameter) or type(parameter) is nn.Parameter:
                local = local_part(parameter)
                if _readable(local):
                    yield f"parameter {name}", local

    def _refuse_changed(self, before: dict[str, _Leaf], after: dict[str, _Leaf]) -> None:
        for place in [*before, *after]:
            then, now = before.get(place), after.get(place)
            if then is not None and now is not None and then.is_as(now):
                continue
            raise ConfigError(
                f"activation_checkpointing computes {self.kind} twice, and its forward changes "
                f"what it is given ({place}): the second computation would start from what was "
                "changed, and change it again. Let it leave its arguments alone and return what it "
                "has computed (x = x + y in place of x += y; a new dict; layers of transformers "
                "without a cache, use_cache=False), and let the model outside of it store that. "
                f"{_OFF}"
            )

    def state(self) -> dict[str, Any]:
        """Numbers, words and tensors that its modules have as attributes, by name."""
        return {
            f"{name}.{key}".lstrip("."): value.detach().clone() if _is_tensor(value) else value
            for name, part in self.module.named_modules()
            for key, value in vars(part).items()
            if key in self._names.get(name, ()) and (isinstance(value, _PLAIN) or _is_tensor(value))
        }

    def compare(self, first: _Around, second: _Around) -> None:
        """Refuse a region whose attributes the second computation found or left otherwise.

        Raises:
            ConfigError: they differ, so that it may have computed something else.
        """
        for name in second.after:
            begin, end = first.before.get(name), first.after.get(name)
            found, left = second.before.get(name), second.after[name]
            if not _equal(left, found):
                if _equal(left, end) or _is_rounding(begin, end, left):
                    continue
                how = "changes"
            elif _equal(begin, end) and not _equal(found, end):
                how = "is given between both computations another value of"
            else:
                continue
            raise ConfigError(
                f"activation_checkpointing computes {self.kind} twice, and it {how} its "
                f"attribute '{name}' ({_said(end)} after the forward pass, {_said(left)} after it "
                "was computed again), so that gradients may be those of another function, and the "
                "attribute is not what it would be without. Change it outside of the block, once a "
                f"pass, and hand the value to the block as an argument. {_OFF}"
            )


class _Around(NamedTuple):
    """Attributes of a region before and after a computation."""

    before: dict[str, Any]
    after: dict[str, Any]


class _Again(contextlib.AbstractContextManager[None]):
    """What surrounds the second computation of a pass.

    Args:
        region: looks at what it does.
        before: its attributes before the first computation; ``None`` not to look at them.
    """

    def __init__(self, region: Repeatable, before: dict[str, Any] | None) -> None:
        self._region, self._before = region, before
        self._first: _Around | None = None
        self._found: dict[str, Any] = {}

    def end(self) -> None:
        """End the first computation."""
        if self._before is not None:
            self._first = _Around(self._before, self._region.state())
            self._before = None

    def __enter__(self) -> None:
        if self._first is not None:
            self._found = self._region.state()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        words = "" if error is None else explain_recomputed(error, self._region.kind)
        if words:
            raise ConfigError(words) from error
        # Also where torch ends it early, by an exception (2.13, utils/checkpoint.py).
        first, self._first = self._first, None
        if first is not None:
            self._region.compare(first, _Around(self._found, self._region.state()))


def explain_recomputed(error: BaseException, block: str = "a block") -> str:
    """Explain torch's error about a region that computes something else the second time.

    Returns:
        What to do about it; empty for any other error.
    """
    said = str(error).strip().partition("\n")[0]
    if not isinstance(error, CheckpointError) and _UNKNOWN not in said:
        return ""
    return (
        f"activation_checkpointing computes {block} twice, and the second time, in the backward "
        f"pass, it does not compute what it did the first time: {said} Let it depend on its "
        "arguments and parameters alone: not on attributes, globals, caches or objects that are "
        "changed in the meantime, nor on random numbers of Python or NumPy. What is computed once "
        "and then kept, compute outside of the block. Under 'selective' try 'full', which need not "
        f"find the same operations. {_OFF}"
    )


class _Leaf(NamedTuple):
    """Something that a region is given, and how often it was changed in place."""

    value: Any
    version: int

    def is_as(self, other: _Leaf) -> bool:
        if self.version != other.version or type(self.value) is not type(other.value):
            return False
        return self.value is other.value or (
            isinstance(self.value, _PLAIN) and self.value == other.value
        )


def _given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, _Leaf]:
    """Tensors and plain values that arguments hold, however deep, by where they are."""
    found: dict[str, _Leaf] = {}
    seen: set[int] = set()

    def visit(place: str, value: Any) -> None:
        found[place] = _Leaf(value, changes_of(value))
        if isinstance(value, (torch.Tensor, *_PLAIN, *_CODE)) or id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Mapping):
            for key, one in value.items():
                visit(f"{place}[{key!r}]", one)
        elif isinstance(value, (list, tuple)):
            for index, one in enumerate(value):
                visit(f"{place}[{index}]", one)
        for key, one in getattr(value, "__dict__", {}).items():
            visit(f"{place}.{key}", one)

    for index, value in enumerate(args):
        visit(f"argument {index + 1}", value)
    for name, value in kwargs.items():
        visit(name, value)
    return found


def _drawn() -> dict[str, Any]:
    """How far the generators of Python and NumPy are, which no second computation winds back."""
    states: dict[str, Any] = {"Python's random": random.getstate()}
    if "numpy" in sys.modules:
        state = sys.modules["numpy"].random.get_state(legacy=False)["state"]
        states["numpy.random"] = [
            one.tobytes() if hasattr(one, "tobytes") else one for one in state.values()
        ]
    return states


def _names(module: nn.Module) -> set[str]:
    """Names of a module's attributes, those of its class included."""
    return (set(dir(type(module))) | vars(module).keys()) - _OF_MODULES


def _is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    return type(value) is torch.Tensor and _readable(value)


def _readable(tensor: torch.Tensor) -> bool:
    # What shards parameters may leave a tensor without its memory.
    return not tensor.is_meta and (tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _alike(one, other) and _same(one, other)
    return _Leaf(one, 0).is_as(_Leaf(other, 0))


def _noted(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """What tells whether a tensor has changed: a buffer's values, the sum of a parameter's."""
    if name.startswith("buffer "):
        return tensor.clone()
    # Its shape beside it: what shards it may gather or free parts meanwhile.
    tensor = tensor.detach()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    total = tensor.sum(dtype=torch.float64).nan_to_num()
    return torch.stack([total, total.new_tensor(float(tensor.numel()))])


def _changed(name: str, now: torch.Tensor, before: torch.Tensor) -> bool:
    if name.startswith("buffer "):
        return now.shape != before.shape or not _same(now, before)
    total, size = _noted(name, now).unbind()
    return bool((size == before[1]) & (total != before[0]))


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _is_rounding(begin: Any, end: Any, left: Any) -> bool:
    """Whether a second value differs from the first by little beside what the pass changed."""
    if isinstance(end, float) and isinstance(left, float):
        end, left = torch.tensor(end), torch.tensor(left)
        begin = torch.tensor(begin) if isinstance(begin, float) else None
    if not (isinstance(end, torch.Tensor) and isinstance(left, torch.Tensor)):
        return False
    if not (_alike(end, left) and end.is_floating_point()):
        return False
    known = isinstance(begin, torch.Tensor) and _alike(begin, end)
    moved = (end - begin if known else end).abs().max()
    return bool((left - end).abs().max() <= _ROUNDING * moved)


def _said(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if _is_tensor(value) else repr(value)
