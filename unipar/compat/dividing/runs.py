"""Runs of a model that leave nothing behind, and what they show."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from unipar.compat.adopted import AdoptedModel
from unipar.compat.dividing.batch_norms import computing, is_batch_norm
from unipar.compat.dividing.cutting import (
    changed,
    closed_in,
    rebuilt,
    tensors_held,
)
from unipar.compat.dividing.model_hooks import HOOKED, made_of_weights
from unipar.compat.dividing.relations import Call, Calls
from unipar.compat.dividing.whole_draws import Drawing, no_ways_kept
from unipar.compat.fp32_outputs import fp32
from unipar.engine import StepEngine
from unipar.engine.graphs import nodes_behind
from unipar.engine.snapshots import Change
from unipar.engine.trials import GIVEN, digest, torch_generators, trial
from unipar.errors import first_few

KEEPS = "it keeps what it computes of a batch"
FAILS = "it fails where parts are tried, as where its inputs have no dim of samples"
_HALF = (torch.float16, torch.bfloat16)


class Run(NamedTuple):
    """What a model has computed without leaving a trace, or why that cannot be told.

    Attributes:
        outputs: tensors that it has given.
        buffers: by name, before it and after it.
        why: why it cannot be told what it does, if it cannot.
        rest: what it has given beside tensors.
        drew: whether it has drawn random numbers.
        generators: what torch's are afterwards.
        noted: what was drawn.
        gradients: of the weights, of what was asked for.
        by_functions: whether its graph has functions of the script's own.
        stored: what it has changed in attributes, and in what these hold, which may be the same of
            every batch.
        read: numbers that it has read of tensors.
        calls: what it has called.
        in_half: whether anything of it was in half precision.
        used: by number, weights that are in its graph.
    """

    outputs: list[torch.Tensor]
    buffers: dict[str, tuple[torch.Tensor | None, torch.Tensor]]
    why: str = ""
    rest: Any = None
    drew: bool = False
    generators: str = ""
    noted: Sequence[Any] = ()
    gradients: list[torch.Tensor] | None = None
    by_functions: bool = False
    stored: Mapping[str, Change] = MappingProxyType({})
    read: Sequence[float] = ()
    calls: Sequence[Call] = ()
    in_half: bool = False
    used: frozenset[int] = frozenset()

    @property
    def tells(self) -> bool:
        """Whether there is something by which one sample is seen from another."""
        tensors = [one for one in self.outputs if one.dim()]
        return not tensors or any((one != one.flatten()[:1]).any() for one in tensors)


class Runner:
    """Lets a model compute for nobody to learn from.

    Args:
        model: the engine's side of it.

    Attributes:
        module: what computes: the model, or a copy of it while there is one.
        is_copy: whether it is that.
        in_eval: whether its batch norms are to normalize as in evaluations.
        looked_into: whether it was found not to change its own weights.
        traces: whether passes leave something in buffers.
        stores: whether they do in attributes, or in what these hold.
        apart: paths of attributes that are not the script's.
        notes_calls: whether runs note what is called, which compilers would compile.
        in_fp32: whether autocast is left out, whose rounding hides small differences.
    """

    def __init__(self, model: AdoptedModel) -> None:
        self._model, self._copy = model, None
        self.in_eval = self.looked_into = self.traces = self.stores = False
        self.apart: frozenset[str] = frozenset()
        self.in_fp32 = self.notes_calls = True

    @property
    def module(self) -> nn.Module:
        return self._model.module if self._copy is None else self._copy

    @property
    def is_copy(self) -> bool:
        return self._copy is not None

    @property
    def has_graphs(self) -> bool:
        """Whether it may run with a graph, which without a backward pass divided weights forbid."""
        return self.is_copy or not self._model.divided

    @property
    def has_backward(self) -> bool:
        """Whether it may have a backward pass of its own, beside those of an engine."""
        engine = None if self._model.training_by is None else self._model.training_by.engine
        return engine is None or getattr(engine, "lends_gradients", False)

    @contextlib.contextmanager
    def copied(self) -> Iterator[None]:
        """Let a copy run, which has objects of its own for what a model counts and keeps."""
        with contextlib.suppress(RuntimeError, TypeError, ValueError, AttributeError):
            self._copy = copy.deepcopy(self._model.module)
        try:
            yield
        finally:
            self._copy = None

    def run(
        self,
        args: Any,
        kwargs: Any,
        drawing: Drawing | None = None,
        *,
        graph: bool = False,
        of: Callable[[list[torch.Tensor]], torch.Tensor | None] | None = None,
    ) -> Run:
        """Let the model compute without a trace.

        Args:
            args: of the call.
            kwargs: likewise.
            drawing: how random numbers are drawn; without, nothing is dropped.
            graph: whether to keep the graph.
            of: what gradients are asked for, of what the model gives; ``None`` if of nothing.
        """
        module, training = self.module, self._model.training_by
        device = self._model.world.device
        # Not by a call of the engine, to which one that fails would be a step that has failed.
        called, surrounding = module, contextlib.nullcontext
        lifting = contextlib.nullcontext
        if training is not None and isinstance(training.engine, StepEngine):
            called = module if graph or self.is_copy else training.engine.eval_model
            surrounding = training.engine.precision.forward
            lifting = training.engine.without_stand_ins
        leaving_out, autocasts = contextlib.nullcontext, self.leaves_out_autocast
        if autocasts:
            leaving_out = functools.partial(torch.autocast, device.type, enabled=False)
        # What it writes into what it is given, the script would find.
        args, kwargs = rebuilt(
            changed(
                (args, kwargs),
                lambda one: fp32(one.detach().clone()) if autocasts else one.detach().clone(),
            )
        )
        copies = tensors_held((args, kwargs)) or []
        versions = [one._version for one in copies]
        began = _generators(device)
        gradients, drew_back = None, False
        with (
            warnings.catch_warnings(),
            torch.set_grad_enabled(graph),
            trial(
                module,
                device,
                dropout=drawing is not None,
                given=(args, kwargs),
                apart=(*self.apart, *copies),
            ) as draws,
            _own_weights(module, first=not self.looked_into) as written,
            _Watching(drops=drawing is not None) as watched,
            surrounding(),
            leaving_out(),
            lifting(),
            computing(),
            no_ways_kept(),
            contextlib.nullcontext() if drawing is None else drawing.going_on(),
            Calls() if self.notes_calls else contextlib.nullcontext() as calls,
        ):
            warnings.simplefilter("ignore")
            if self.in_eval:
                for one in filter(is_batch_norm, module.modules()):
                    one.training = False
            kept = {name: one.clone() for name, one in module.named_buffers()}
            try:
                output = called(*args, **kwargs)
                found = tensors_held(output)
                asked = None if of is None else of(found or [])
                if asked is not None:
                    drawn = _generators(device)
                    gradients = _gradients(asked, module, is_copy=self.is_copy)
                    drew_back = _generators(device) != drawn
            except Exception as error:
                return Run([], {}, f"{FAILS} ({error})"[:300])
            self.traces |= any(
                one is not kept[name]
                and (one.shape != kept[name].shape or not torch.equal(one, kept[name]))
                for name, one in module.named_buffers()
                if name in kept
            )
            # Strategies have theirs.
            hooked = watched.hooked and training is None
            used, foreign = _weights_in(found or [], module) if graph else (frozenset(), False)
            by_functions = graph and _has_functions(found or [])
            buffers = {name: (kept.get(name), one) for name, one in module.named_buffers()}
        why = ""
        filled = [path for path in draws.changes if path.startswith(GIVEN)]
        apart = {*filled, *made_of_weights(module)}
        stored = {path: one for path, one in draws.changes.items() if path not in apart}
        self.stores |= bool(stored)
        if written:
            why = f"it changes its weights as it computes ({first_few(written)})"
        elif hooked:
            why = HOOKED
        elif foreign:
            why = "it computes with weights that are not its own"
        elif watched.generators:
            why = "it draws random numbers by a generator of its own"
        elif draws.on_host:
            why = "it draws random numbers by random or NumPy"
        elif drew_back:
            why = "it draws random numbers in its backward pass"
        elif filled:
            why = "it fills lists, dicts or other objects that it is given"
        elif [one._version for one in copies] != versions:
            why = "it changes what it is given in place"
        elif found is None:
            why = (
                f"it gives an object of the class {first_few(closed_in(output))}, of which "
                "it is not known how parts make the whole. Where nothing needs it, have the model "
                "leave it out, as use_cache=False does in transformers"
            )
        elif not draws.all_seen:
            why = "it holds too many objects to see whether it keeps in them what it computes"
        return Run(
            found or [], buffers, why, changed(output, lambda one: None), draws.torch != began,
            draws.torch, () if drawing is None else drawing.noted, gradients, by_functions,
            stored, watched.read, calls.noted if calls is not None else (),
            watched.in_half or _is_half(tuple(found or ())), used,
        )  # fmt: skip

    @property
    def leaves_out_autocast(self) -> bool:
        """Whether there is one around runs, and they do without; weights in half may need it."""
        engine = None if self._model.training_by is None else self._model.training_by.engine
        kind = self._model.world.device.type
        autocasts = isinstance(engine, StepEngine) and engine.precision.autocasts
        if not self.in_fp32 or not (autocasts or torch.is_autocast_enabled(kind)):
            return False
        return not any(one.dtype in _HALF for one in self.module.parameters())


def _generators(device: torch.device) -> str:
    return digest([one.numpy() for one in torch_generators(device)])


def _gradients(of: torch.Tensor, module: nn.Module, *, is_copy: bool) -> list[torch.Tensor] | None:
    """Of each weight that is trained; zeros where there is none, ``None`` if they cannot be had."""
    weights = [one for one in module.parameters() if one.requires_grad]
    if is_copy:
        for one in weights:
            one.grad = None
        # What records losses by Tensor.backward, to compare runs, is to see the script's alone.
        torch.autograd.backward(of)
        found = [one.grad for one in weights]
    elif any("CheckpointFunction" in node.name() for node in nodes_behind([of.grad_fn])):
        # It has no torch.autograd.grad, and a backward pass would be one of the engine's.
        return None
    else:
        found = list(torch.autograd.grad(of, weights, allow_unused=True))
    return [
        torch.zeros_like(one) if grad is None else grad.to_dense() if grad.is_sparse else grad
        for one, grad in zip(weights, found, strict=True)
    ]


def _has_functions(outputs: list[torch.Tensor]) -> bool:
    """Whether a script's own functions are in a graph, whose backward passes may do anything."""
    # torch 2.13, autograd/function.py: FunctionMeta makes their nodes' class.
    kinds = (
        getattr(node, "_forward_cls", None) for node in nodes_behind(o.grad_fn for o in outputs)
    )
    return any(one is not None and not one.__module__.startswith("torch.") for one in kinds)


@contextlib.contextmanager
def _own_weights(module: nn.Module, *, first: bool) -> Iterator[list[str]]:
    """Give weights back their values, where there is room for copies, as before the first step.

    Args:
        module: whose weights.
        first: whether there is room.

    Yields:
        The names of those that were changed within, known at the end.
    """
    names: list[str] = []
    held = [(part, dict(part._parameters)) for part in module.modules()]
    named = [(name, one, one._version) for name, one in module.named_parameters()]
    copies = [one.detach().clone() for _, one, _ in named] if first else []
    yield names
    now = dict(module.named_parameters())
    # What is changed through `.data` has no other version.
    names += [name for name, one, version in named
                if now.get(name) is not one or one._version != version]  # fmt: skip
    for part, parameters in held:
        part._parameters.update(parameters)
    with torch.no_grad():
        for (name, one, _), copy in zip(named, copies, strict=False):
            if not torch.equal(one, copy):
                names += [name] * (name not in names)
                one.data.copy_(copy)


def _weights_in(outputs: list[torch.Tensor], module: nn.Module) -> tuple[frozenset[int], bool]:
    """Which of a module's parameters are in a graph, and whether it leads to something else."""
    numbers = {id(one): number for number, one in enumerate(module.parameters())}
    nodes = nodes_behind(o.grad_fn for o in outputs)
    found = {numbers.get(id(one.variable), -1) for one in nodes if hasattr(one, "variable")}
    return frozenset(found), -1 in found


class _Watching(TorchFunctionMode):
    """Lets everything pass where layers of a script's own leave something out, as DropPath.

    Args:
        drops: whether they may.

    Attributes:
        hooked: whether hooks were put on what was computed.
        in_half: whether anything was computed in half precision.
        generators: of the script's own, by which was drawn, and the states that they had.
        read: numbers that were made of tensors.
    """

    def __init__(self, *, drops: bool) -> None:
        super().__init__()
        self._drops, self.hooked, self.in_half = drops, False, False
        self.read: list[float] = []
        self.generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.hooked |= func is torch.Tensor.register_hook
        for one in (*args, *kwargs.values()):
            if isinstance(one, torch.Generator) and id(one) not in self.generators:
                self.generators[id(one)] = one, one.get_state()
        found = func(*args, **kwargs)
        self.in_half |= _is_half(found)
        self.read += [one for one in _flat(found) if isinstance(one, float)]
        passes = func is torch.Tensor.bernoulli_ and not self._drops
        return found.fill_(1) if passes else found

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for generator, state in self.generators.values():
            generator.set_state(state)


def _is_half(found: Any) -> bool:
    several = found if isinstance(found, tuple) else (found,)
    return any(isinstance(one, torch.Tensor) and one.dtype in _HALF for one in several)


def _flat(found: Any) -> Iterator[Any]:
    if not isinstance(found, list):
        yield found
        return
    for one in found:
        yield from _flat(one)
