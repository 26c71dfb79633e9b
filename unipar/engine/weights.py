"""Weights that a model changes in its own forward pass, where it computes with gathered copies.

``nn.Embedding(max_norm=…)``, a momentum encoder, weights that are clamped before they are used:
where the whole weights exist for the length of a forward pass only, such a change is lost with
them, and nothing tells.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from unipar.engine.inner import in_backward_pass
from unipar.errors import ConfigError, first_few
from unipar.state import is_dtensor


def keep_weights_in_place(module: nn.Module) -> Callable[[], None]:
    """Let recurrent layers compute with the weights that a framework puts where it wants them.

    On a GPU they would move their weights into one piece of memory, in their first forward pass
    after these were exchanged or whenever ``flatten_parameters`` is called, and compute with what
    is there ever after (torch 2.8 to 2.13, nn/modules/rnn.py, ``_init_flat_weights``). What the
    framework gathers or updates in its own memory would not reach them. cuDNN puts weights
    together itself in each pass where they are apart.

    Args:
        module: whose layers they are.

    Returns:
        What takes that back.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, nn.RNNBase)]
    if layers:
        # Its advice is to call flatten_parameters.
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous")
    for layer in layers:
        # To call it does nothing, and copies and files of the layer need nothing of this package.
        layer.__dict__["flatten_parameters"] = type(None)

    def undo() -> None:
        for layer in layers:
            layer.__dict__.pop("flatten_parameters", None)

    return undo


def refuse_changed_weights(
    model: nn.Module,
    strategy: str,
    units: Iterable[nn.Module],
    is_copy: Callable[[nn.Parameter], bool] = lambda parameter: True,
    *,
    between_passes: bool = False,
    stays: bool = True,
) -> Callable[[], None]:
    """Refuse a forward pass after which a gathered weight is another.

    What PyTorch counts as a change is seen in every pass, at no cost to the device. What goes past
    its count, by ``parameter.data``, is seen in some passes: by sums over weights, and by where
    they lie.

    Args:
        model: the whole model, when it has been divided.
        strategy: its name, for the message.
        units: the modules whose parameters are gathered for their forward passes.
        is_copy: whether a parameter, as it is during such a pass, is a copy that is let go.
        between_passes: whether to refuse changes outside of forward passes, too: for a framework
            that never changes, in PyTorch's count, what it leaves in a module.
        stays: whether a weight lies where it is for as long as it is gathered.

    Returns:
        What takes the refusal back.
    """
    rules = _Rules(model, strategy, is_copy, between_passes, stays)
    watches = [_EveryPass(model, rules), *(_SomePasses(unit, rules) for unit in units)]

    def stop() -> None:
        for watch in watches:
            watch.stop()

    return stop


def refuse_other_weights(module: nn.Module, strategy: str) -> Callable[[], None]:
    """Refuse forward passes with other tensors in the places of parameters.

    For a framework that leaves a module the parameters that it has, and knows no others.

    Returns:
        What takes the refusal back.
    """
    names = {one: name for name, one in module.named_parameters()}
    # With each place of those that have several.
    held = [
        (part, name, one)
        for part in module.modules()
        for name, one in part._parameters.items()
        if one is not None
    ]

    def look(module: nn.Module, args: Any) -> None:
        others = [
            names[own] for part, name, own in held
            # A model may take one of its own away.
            if (now := part._parameters.get(name)) is not own and now is not None
        ]  # fmt: skip
        if others:
            raise other_weights(others, strategy)

    before: Any = torch.compiler.disable(look)
    return module.register_forward_pre_hook(before, prepend=True).remove


def other_weights(names: list[str], strategy: str) -> ConfigError:
    """The error where passes would not be by what has the places of these parameters."""
    return ConfigError(
        f"{first_few(names)} of the model: something else has the place of the parameter, as where "
        "torch.func.functional_call puts other weights there, or a script assigns to it. Under "
        f"strategy '{strategy}' each rank has a part of a parameter, and passes are by what is "
        "gathered of these. Use a strategy that leaves weights whole, such as ddp."
    )


class _Rules(NamedTuple):
    """What :func:`refuse_changed_weights` was given of the whole model."""

    model: nn.Module
    strategy: str
    is_copy: Callable[[nn.Parameter], bool]
    between_passes: bool
    stays: bool


class _Watch:
    """Looks at a module's parameters before and after a forward pass."""

    def __init__(self, module: nn.Module, rules: _Rules) -> None:
        self._rules = rules
        # By where they are: a framework puts others in their places, and to walk through all
        # modules takes longer than what is done with them.
        held = [(one, *named) for one in module.modules() for named in one._parameters.items()]
        self._places = tuple({p: (one, name) for one, name, p in held if p is not None}.values())
        # What is no copy stays none.
        self._shards: dict[int, nn.Parameter] = {}
        enter: Any = torch.compiler.disable(self.enter)
        leave: Any = torch.compiler.disable(self.leave)
        self._handles = [
            module.register_forward_pre_hook(enter),
            # Before the framework's own, which lets go of the copies.
            module.register_forward_hook(leave, prepend=True),
        ]

    def enter(self, module: nn.Module, args: Any) -> None:
        raise NotImplementedError

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _copies(self) -> Iterator[nn.Parameter]:
        for holder, name in self._places:
            parameter = holder._parameters.get(name)
            # A model may take one of its own away.
            if parameter is None or id(parameter) in self._shards:
                continue
            if self._rules.is_copy(parameter):
                yield parameter
            else:
                self._shards[id(parameter)] = parameter

    def _refuse(self, changed: Collection[nn.Parameter]) -> None:
        if changed:
            ids = {id(parameter) for parameter in changed}
            names = [name for name, p in self._rules.model.named_parameters() if id(p) in ids]
            raise _refusal(self._rules.strategy, names)


class _EveryPass(_Watch):
    """By PyTorch's count of changes in place."""

    _counts: Mapping[nn.Parameter, int] = MappingProxyType({})

    def enter(self, module: nn.Module, args: Any) -> None:
        if self._rules.between_passes:
            self._compare()
        self._counts = {p: _changes(p) for p in self._copies()}

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._compare()

    def _compare(self) -> None:
        counts = self._counts.items()
        self._refuse([parameter for parameter, count in counts if _changes(parameter) != count])


class _SomePasses(_Watch):
    """By place and sum, in the passes whose number is a power of two, so ever more rarely.

    A momentum encoder begins as a copy, which its first change leaves as it is.
    """

    _number = 0
    _seen: Mapping[nn.Parameter, tuple[int, int, torch.Tensor]] = MappingProxyType({})

    def enter(self, module: nn.Module, args: Any) -> None:
        # What is computed again in a backward pass has to be the same operations.
        again = in_backward_pass()
        self._number += not again
        self._seen = {}
        if again or self._number & (self._number - 1):
            return
        # Not all of a module's parameters are gathered for it: those of the modules within it may
        # be later, and be of a class that refuses to be looked at until then.
        with torch._C.DisableTorchFunctionSubclass():
            self._seen = {p: (p.numel(), _place(p), _sum(p)) for p in self._copies()}

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._seen:
            with torch._C.DisableTorchFunctionSubclass():
                changed = self._changed()
            self._refuse(changed)

    def _changed(self) -> list[nn.Parameter]:
        # What has grown is gathered for a module within this one.
        before = {p: seen for p, (size, *seen) in self._seen.items() if size == p.numel()}
        self._seen = {}
        if not before:
            return []
        places, sums = zip(*before.values(), strict=True)
        # One look at the device for all of them.
        same = (torch.stack(sums) == torch.stack([_sum(p) for p in before])).tolist()
        return [
            p
            for p, place, equal in zip(before, places, same, strict=True)
            if not equal or (self._rules.stays and place != _place(p))
        ]


def _changes(parameter: nn.Parameter) -> int:
    return _held(parameter)._version


def _held(parameter: nn.Parameter) -> torch.Tensor:
    """The tensor itself; of a DTensor, this rank's part, which has the count of changes."""
    if not is_dtensor(parameter):
        return parameter
    with torch.no_grad():
        return parameter.to_local()


def _place(parameter: nn.Parameter) -> int:
    return _held(parameter).data_ptr()


def _sum(parameter: nn.Parameter) -> torch.Tensor:
    return _held(parameter).detach().sum(dtype=torch.float64).nan_to_num()


def _refusal(strategy: str, names: list[str]) -> ConfigError:
    listed = first_few([f"'{name}'" for name in names])
    return ConfigError(
        f"{strategy}: the weights {listed} were changed outside of the optimizer, in the model's "
        "own forward pass or between two of them (nn.Embedding(max_norm=…), a momentum encoder, "
        f"weights clamped in place). What {strategy} gives a model to compute with is a copy, so "
        "the change would be lost. Use strategy='ddp', which keeps parameters whole; or 'zero2', "
        "where all ranks change them alike."
    )
