"""Runs of a model, or of a part of it, that are held against one another and leave nothing behind.

They are in the mode in which the model is to run, for it may do otherwise in training; but without
dropout, where its masks would differ.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import pickle
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from unipar.engine.snapshots import Change, Snapshot

GIVEN = "(given)"
"""What paths begin with that lead from what a model is called with."""
ATTENTION = "scaled_dot_product_attention"
_DROPOUTS = {
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    torch.dropout,
    torch.alpha_dropout,
    torch.feature_dropout,
    torch.feature_alpha_dropout,
}


@dataclass
class Draws:
    """The random numbers that a run has drawn, and what it has left, known when it has ended.

    Attributes:
        on_host: from Python's generator or NumPy's.
        torch: a digest of torch's generators after the run.
        changes: what it has changed in attributes and in what it was given, by paths.
        all_seen: whether there were not too many objects for that.
    """

    on_host: bool = False
    torch: str = ""
    changes: Mapping[str, Change] = field(default_factory=dict)
    all_seen: bool = True


@contextlib.contextmanager
def trial(
    model: nn.Module, device: torch.device, *, dropout: bool = False, given: Any = (),
    apart: Collection[Any] = (),
) -> Iterator[Draws]:  # fmt: skip
    """Run within ``with``, and leave everything as it was.

    Random numbers are those that come next in the process; buffers of the model are copies, which
    are let go with what the run has changed in them; attributes of its modules, what is reachable
    from these, and what it is given get back what they held. What else the run changes, such as a
    list that no module has, stays changed.

    Args:
        model: whose state is kept: the whole model, for hooks may reach what is outside of a part.
        device: whose generator is kept beside the host's.
        dropout: whether to leave dropout in.
        given: what the model is called with.
        apart: tensors, and paths of attributes, that are not looked at.

    Yields:
        What the run draws and changes, filled in at its end.
    """
    draws, before = Draws(), host_generators()
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        _own_buffers(model),
        _own_objects({"": model, GIVEN: given}, apart, draws),
        contextlib.nullcontext() if dropout else _NoDropout(),
    ):
        try:
            yield draws
        finally:
            draws.on_host = digest(host_generators()) != digest(before)
            draws.torch = digest([state.numpy() for state in torch_generators(device)])
            set_host_generators(before)


def torch_generators(device: torch.device) -> list[torch.Tensor]:
    """The states of torch's generators of the host and of a device, which are on the host too."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_torch_generators(states: list[torch.Tensor], device: torch.device) -> None:
    """Give them back what :func:`torch_generators` found."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


def host_generators() -> tuple[Any, Any]:
    """The states of Python's and NumPy's generators."""
    return random.getstate(), np.random.get_state(legacy=False)


def set_host_generators(states: tuple[Any, Any]) -> None:
    """Give them back what :func:`host_generators` found."""
    random.setstate(states[0])
    np.random.set_state(states[1])


def digest(states: Any) -> str:
    """A short text that is the same for the same states of generators."""
    return hashlib.sha256(pickle.dumps(states)).hexdigest()


@contextlib.contextmanager
def _own_buffers(model: nn.Module) -> Iterator[None]:
    """Put copies in the place of buffers: changing one in place and back would count as changes."""
    copies: dict[int, torch.Tensor] = {}
    kept = [(module, dict(module._buffers)) for module in model.modules()]
    for module, buffers in kept:
        for key, buffer in buffers.items():
            if buffer is not None:
                module._buffers[key] = copies.setdefault(id(buffer), buffer.detach().clone())
    try:
        yield
    finally:
        for module, buffers in kept:
            module._buffers.clear()
            module._buffers.update(buffers)


@contextlib.contextmanager
def _own_objects(
    roots: Mapping[str, Any], apart: Collection[Any], draws: Draws
) -> Iterator[None]:  # fmt: skip
    before = Snapshot(roots, apart=apart)
    try:
        yield
    finally:
        after = Snapshot(roots, apart=apart, copies=False)
        draws.changes, draws.all_seen = before.changes(after), before.complete and after.complete
        before.put_back()


@contextlib.contextmanager
def own_attributes(model: nn.Module) -> Iterator[None]:
    """Give a model's modules, and what they hold, back what there was."""
    before = Snapshot({"": model})
    try:
        yield
    finally:
        before.put_back()


class _NoDropout(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is functional.multi_head_attention_forward:
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.arguments["dropout_p"] = 0.0
            return func(*bound.args, **bound.kwargs)
        if getattr(func, "__name__", "") == ATTENTION:
            args, kwargs = (*args[:4], *[0.0] * (len(args) > 4), *args[5:]), dict(kwargs)
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)
