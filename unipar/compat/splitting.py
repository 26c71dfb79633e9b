"""A script that knows nothing of ranks, on several: each runs it whole, and computes a part.

Every rank has whole batches, and draws the same random numbers, so that all of the script, its loss
too, is computed as on one process. A model that an engine trains computes this rank's part of what
it is called with, and what ranks give is put together on all of them.

That parts together make the whole is tried, and not assumed: before a model's first pass with
inputs of a kind, and again before later ones, it computes both. What it does with the samples of a
batch in relation to each other shows there, and all ranks then compute the whole.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from unipar.compat.adopted import AdoptedModel
from unipar.compat.batch_norms import (
    ALONE,
    OVER,
    computing,
    has_batch_norms,
    is_batch_norm,
    normalize_over,
)
from unipar.compat.inner_losses import UNSURE, share_of, weighed, why_unsure
from unipar.compat.shares import Shares, mean_over, part_of, whole_of
from unipar.compat.signatures import Signatures
from unipar.compat.whole_draws import Drawing, WholeDraws
from unipar.data.move import with_items
from unipar.engine import StepEngine
from unipar.engine.graphs import nodes_behind
from unipar.engine.outputs import tensors_of
from unipar.engine.replicas import unlike
from unipar.engine.trials import digest, set_torch_generators, torch_generators, trial
from unipar.errors import ConfigError, first_few
from unipar.world import World

_ALIKE, _LOSS = -1, -2
"""Outputs that are the same of a part as of the whole, and numbers that are made of samples."""
_HOOKED = "hooks in it are to see whole batches"
_RELATED = (
    "it sets the samples of a batch in relation to each other, or they do not lie along the first "
    "or second dimension of its first input"
)
_UNFIT = (
    "the shapes of what it gives depend on the values of what it is given, as where it cuts "
    "sequences at the longest of a batch"
)
_MOST_TRIALS, _SOON = 12, 8
_AGAIN = 128
"""A model is tried again in passes whose number is a power of two, and in one of so many."""
_ALL_TRIED = 2
"""Up to so many changes of settings each is tried."""
_OFTEN, _SELDOM = 16, 16
"""So many of the first passes are compared among ranks, and one of so many later on."""
_PLAIN = (bool, int, float, str)
_ROUNDING, _ROUNDING_HALF = 5e-5, 5e-2
"""Differences up to which parts make the whole, relative to the largest value: what kernels for
other shapes make."""


class _Output(NamedTuple):
    """How an output of parts makes that of the whole.

    Attributes:
        dim: along which parts lie; or one of ``_ALIKE`` and ``_LOSS``.
        each: entries along it for each sample.
    """

    dim: int
    each: int = 1


class _Plan(NamedTuple):
    """How a batch is cut up.

    Attributes:
        inputs: for each tensor of the arguments, and each list of plain values, the dimension that
            samples lie along, if any.
        outputs: for each tensor that the model gives.
        draws_whole: whether ranks draw the random numbers of the whole batch.
    """

    inputs: tuple[int | None, ...]
    outputs: tuple[_Output, ...] = ()
    draws_whole: bool = True


class _Trial(NamedTuple):
    """What a model has computed without leaving a trace, or why that cannot be told."""

    outputs: list[torch.Tensor]
    buffers: dict[str, tuple[torch.Tensor | None, torch.Tensor]]
    why: str = ""
    rest: Any = None
    drew: bool = False
    generators: str = ""
    noted: Sequence[Any] = ()

    @property
    def tells(self) -> bool:
        """Whether there is something by which one sample is seen from another."""
        tensors = [one for one in self.outputs if one.dim()]
        return not tensors or any((one != one.flatten()[:1]).any() for one in tensors)


class Splitting:
    """How a model that the script calls is computed in parts.

    Args:
        model: the engine's side of it.
        tell: warns once of each thing.
        divides: whether it may be; else each rank computes the whole.
        compiled: whether the engine compiles it.

    Attributes:
        shares: of no batch.
    """

    def __init__(
        self, model: AdoptedModel, tell: Callable[..., None], *, divides: bool, compiled: bool
    ) -> None:
        self._model, self._tell, self._divides = model, tell, divides
        self._rounding = _ROUNDING_HALF if model.in_half else _ROUNDING
        world = model.world
        self._group = world.mesh("batch").get_group()
        self.shares = Shares.of(0, world.data_rank, world.data_size, self._group)
        self._plans: dict[Any, _Plan | None] = {}
        self._looked_into = self._running = False
        self._leaves_nothing = True
        self._stand_in: nn.Module | None = None
        self._parameters: list[int] = []
        self._numbers: dict[int, int] = {}
        self._untold = self._changes = self._small = 0
        self._settings: list[Any] = []
        self._calls: dict[Any, int] = {}
        self._signatures: dict[Any, Signatures] = {}
        self._draws = WholeDraws()
        # Compilers have random numbers of their own.
        self._may_draw_whole = not (compiled or any(map(_is_compiled, model.module.modules())))
        # What the script has put into the model before the strategy has.
        self._hooks, self._handles = _hooks_in(model.module), RemovableHandle.next_id
        self._hooked = _described(self._hooks) or _draws_by_itself(model.module)

    def look_at(self, args: Any, kwargs: Any) -> None:
        """Try how the model computes in parts, before a strategy has it. Collective.

        An error in the middle of it would leave what divides weights half way.
        """
        given = _leaves((args, kwargs))
        looks = self._divides and self._has_samples(given) and not self._hooked
        if looks and all(map(_is_dense, given)):
            self._decide(self._kind(given, args, kwargs), args, kwargs, given)

    def begin(self) -> None:
        """Leave aside what the strategy itself has put into the model."""
        self._hooks, self._handles = _hooks_in(self._model.module), RemovableHandle.next_id
        self._parameters = [id(one) for one in self._model.module.parameters()]
        self._numbers = {one: number for number, one in enumerate(self._parameters)}

    def compute(self, args: Any, kwargs: Any) -> Any:
        """A forward pass that may be trained on. Collective.

        Raises:
            ConfigError: ranks are given other batches; or what the model does with parts of them
                is no longer what it did.
        """
        given = _leaves((args, kwargs))
        trains = torch.is_grad_enabled() and self._model.learns
        if not trains or not self._has_samples(given):
            if trains and self._divides and not given:
                self._tell_whole("it is given no tensors, and no lists of values, to be divided")
            elif trains and self._divides and self._small == _SOON + 1:
                self._tell_whole(
                    f"its first batches have less than {2 * self._world.data_size} samples"
                )
            return self._whole(args, kwargs)
        kind = self._kind(given, args, kwargs)
        calls = self._calls[kind] = self._calls.get(kind, 0) + 1
        if not all(map(_is_dense, given)):
            self._tell_whole("it is given tensors that are not dense")
            return self._whole(args, kwargs)
        if is_looked_at(calls):
            check_alike({f"input {at}": one for at, one in enumerate(given)}, self._world)
        if not self._divides:
            return self._whole(args, kwargs)
        if self._parameters != [id(one) for one in self._model.module.parameters()]:
            # As by functional_call, of whose weights each rank is to have the whole gradient.
            self._tell_whole("it is called with other weights than its own")
            return self._whole(args, kwargs)
        why = self._hooked or self._new_hooks()
        if why:
            self._tell_whole(why)
            return self._whole(args, kwargs)
        if kind not in self._plans:
            if self._model.divided:
                self._plans[kind] = None
                self._tell_whole("it was called otherwise at first, when its weights were whole")
            else:
                self._decide(kind, args, kwargs, given)
        plan = self._plans.get(kind)
        shares = None if plan is None else self._shares(plan, given)
        if plan is None or shares is None:
            return self._whole(args, kwargs)
        if any(map(_needs_whole_gradient, given, plan.inputs)):
            # As fast weights, or a prompt that is learned, of which a part has a part of it.
            self._tell_whole("it is given tensors beside the batch that need gradients")
            return self._whole(args, kwargs)
        known = self._signatures.get(kind)
        again = calls % _AGAIN == 0 or (calls > 1 and _is_power(calls))
        changed = self._settings_changed()
        if changed or again:
            why = self._tried_again(plan, args, kwargs, given)
            if why and changed and self._changes <= _ALL_TRIED:
                return self._whole_from_now_on(kind, why, args, kwargs)
            self._refuse_if(why)
            known = None
        return self._in_parts(plan, shares, args, kwargs, given, kind, tried=known is None)

    def _kind(self, given: Sequence[Any], args: Any, kwargs: Any) -> Any:
        """What tells calls apart that may compute other things."""
        asked = [(name, one) for name, one in (*enumerate(args), *kwargs.items())
                 if one is None or isinstance(one, (bool, str))]  # fmt: skip
        return (*map(_kind, given), *asked, self._model.module.training)

    def _decide(self, kind: Any, args: Any, kwargs: Any, given: Sequence[Any]) -> None:
        # A copy has objects of its own for what the model counts and keeps.
        with contextlib.suppress(RuntimeError, TypeError, ValueError, AttributeError):
            self._stand_in = copy.deepcopy(self._model.module)
        try:
            plan, why = self._find(args, kwargs, given)
        finally:
            self._stand_in = None
        if plan is not None or why:
            self._plans[kind] = plan
        if why:
            self._tell_whole(why)

    @property
    def _world(self) -> World:
        return self._model.world

    @property
    def _tried_out(self) -> nn.Module:
        """What computes in trials."""
        return self._model.module if self._stand_in is None else self._stand_in

    def _has_samples(self, given: Sequence[Any]) -> bool:
        first = next((shape for one in given if (shape := _shape(one))), ())
        enough = 2 * self._world.data_size
        if first and first[0] < enough:
            # It may be a small batch, or time; the next ones will tell.
            self._small += 1
        return max(first[: 1 + (self._small > _SOON)], default=0) >= enough

    def _whole(self, args: Any, kwargs: Any) -> Any:
        normalize_over(None, self._model.module)
        return self._model.forward(*args, **kwargs)

    def _whole_from_now_on(self, kind: Any, why: str, args: Any, kwargs: Any) -> Any:
        self._plans[kind] = None
        self._tell_whole(why)
        return self._whole(args, kwargs)

    def _tell_whole(self, why: str) -> None:
        self._tell(
            "each of %d ranks computes all of every batch by %s: %s. Results are those of one "
            "process, and no faster.",
            self._world.data_size, type(self._model.module).__name__, why,
        )  # fmt: skip

    # -- a pass in parts -------------------------------------------------------------------------

    def _shares(self, plan: _Plan, given: Sequence[Any]) -> Shares | None:
        """How this batch is cut up; ``None`` where a rank would have less than two samples.

        One alone is often another thing to a model, as where it squeezes dimensions.
        """
        lengths = {_shape(one)[dim] for one, dim in zip(given, plan.inputs, strict=True)
                   if dim is not None}  # fmt: skip
        if len(lengths) != 1 or min(lengths) < 2 * self._world.data_size:
            return None
        return Shares.of(lengths.pop(), self._world.data_rank, self._world.data_size, self._group)

    def _in_parts(
        self, plan: _Plan, shares: Shares, args: Any, kwargs: Any, given: Sequence[Any],
        kind: Any, *, tried: bool,
    ) -> Any:  # fmt: skip
        """A pass in parts; in which a graph that none had before is tried, unless it was."""
        part = _cut((args, kwargs), plan, shares)
        normalize_over(self._group, self._model.module)
        device = self._world.device
        before, drawing = torch_generators(device), None
        if plan.draws_whole:
            drawing = Drawing(device, trains=True, draws=self._draws, shares=shares)
            drawn = drawing.going_on()
        else:
            drawn = _drawing_apart(self._world, before)
        with drawn as apart, computing():
            output = self._model.forward(*part[0], **part[1])
        astray = drawing is not None and drawing.astray
        found = _held(output)
        draws = () if drawing is None else drawing.noted
        fits, new, astray = self._looked_at(kind, plan, shares, found, _leaves(part), astray, draws)
        if not fits or astray or (new and not tried):
            why = self._tried_again(plan, args, kwargs, given) if fits else _UNFIT
            if (why or astray) and not self._leaves_nothing:
                self._refuse_if(why or "it draws random numbers that it did not draw")
            if why or astray:
                set_torch_generators(before, device)
                if why:
                    return self._whole_from_now_on(kind, why, args, kwargs)
                # Now it is known how.
                return self._whole(args, kwargs)
        if apart:
            self._tell(
                "%s draws random numbers, as for dropout: each rank draws others, for its part of "
                "a batch, so results are those of one process only as another seed's are.",
                type(self._model.module).__name__,
            )
        makers = iter(plan.outputs)

        def whole(one: torch.Tensor) -> torch.Tensor:
            kind = next(makers)
            if kind.dim == _ALIKE:
                return one
            if kind.dim == _LOSS:
                return mean_over(weighed(one, self._factor(one, shares)), shares)
            return whole_of(one, kind.dim, shares.times(kind.each))

        return _changed(output, whole)

    def _looked_at(
        self, kind: Any, plan: _Plan, shares: Shares, found: list[torch.Tensor] | None, part: Any,
        astray: bool, draws: Sequence[tuple[str, tuple[int, ...]]],
    ) -> tuple[bool, bool, bool]:  # fmt: skip
        """Whether ranks' outputs fit together, and any has a new graph, or draws in a new way.

        Collective, on the host: it waits for no device.
        """
        known = self._signatures.setdefault(kind, Signatures())
        drawn = [(name, len(shape)) for name, shape in draws]
        new = known.note(found or (), list(map(_shape, part)), drawn, self._numbers)
        shapes = [one.shape for one in found or ()]
        fits = found is not None and len(shapes) == len(plan.outputs) and all(
            output.dim < 0 or shape[output.dim] == shares.own * output.each
            for shape, output in zip(shapes, plan.outputs, strict=True)
        )  # fmt: skip
        others = [
            (*shape[: one.dim], *shape[one.dim + 1 :]) if one.dim >= 0 else tuple(shape)
            for shape, one in zip(shapes, plan.outputs, strict=False)
        ]
        # One rank may have drawn in a branch that others have not taken.
        mark, used = hash((len(draws), *others)) >> 1, known.used >> 1
        seen = torch.tensor([new, not fits, astray, mark, -mark, used, -used])
        dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=self._group)
        is_new, unfit, strays, most, least, most_used, least_used = seen.tolist()
        training = self._model.training_by
        if training is not None:
            training.uses_alike &= most_used == -least_used
        if known.endless:
            self._tell(
                "%s computes in ever other ways, so that it is not tried in each of them whether "
                "parts of a batch make the whole, but at times. With divide_batches: false in "
                "unipar.yaml each rank computes the whole.",
                type(self._model.module).__name__,
            )
        return not unfit and most == -least, bool(is_new), bool(strays)

    def _factor(self, loss: torch.Tensor, shares: Shares) -> torch.Tensor | float:
        found = share_of(loss, shares)
        if isinstance(found, str):
            raise ConfigError(
                f"{type(self._model.module).__name__} gives a loss that {found}, and did not when "
                "it was tried: what it would be of the whole batch cannot be told. Compute the "
                "loss outside of the model, of what it gives."
            )
        return found

    # -- trials ----------------------------------------------------------------------------------

    def _find(self, args: Any, kwargs: Any, given: Sequence[Any]) -> tuple[_Plan | None, str]:
        """How inputs can be cut up so that parts make the whole; or why they cannot. Collective.

        Neither, where that cannot be told yet: the model gives the same for all samples, as one
        whose last layer is zero at first.
        """
        normalize_over(None, self._tried_out)
        whole = self._run(args, kwargs, self._noting())
        why = self._agreed(whole.why)
        self._looked_into = not why
        if why:
            return None, why
        if not whole.tells:
            return None, self._for_now("it gives the same for every sample")
        for draws_whole in (self._may_draw_whole, False):
            if not draws_whole:
                if not whole.drew and self._may_draw_whole:
                    break
                # Without dropout, where each rank is to draw others.
                whole, why = self._run(args, kwargs), ""
            for inputs in itertools.islice(self._ways(given), _MOST_TRIALS):
                asked = _Plan(inputs, draws_whole=draws_whole)
                plan, reason = self._tried(whole, asked, args, kwargs, given)
                if plan is not None:
                    why = self._tried_on_copies(plan, args, kwargs, given)
                    return (None, why) if why else (plan, "")
                why = why or reason
        return None, self._for_now(why) if why.endswith(UNSURE) else why

    def _noting(self) -> Drawing:
        return Drawing(self._world.device, trains=False)

    def _for_now(self, why: str) -> str:
        """A reason that may be gone with the next batch; none, unless that cannot be tried."""
        self._untold += 1
        return why if self._untold > _SOON or self._model.divided else ""

    def _ways(self, given: Sequence[Any]) -> Iterator[tuple[int | None, ...]]:
        """Dimensions of the inputs that samples may lie along: of all, those of the same size."""
        shapes = list(map(_shape, given))
        first = next(at for at, shape in enumerate(shapes) if shape)
        for along, length in enumerate(shapes[first][:2]):
            if length < 2 * self._world.data_size:
                continue
            choices = [
                [along] if at == first
                else [*(dim for dim, size in enumerate(shape) if size == length), None]
                for at, shape in enumerate(shapes)
            ]  # fmt: skip
            yield from itertools.product(*choices)

    def _tried(
        self, whole: _Trial, plan: _Plan, args: Any, kwargs: Any, given: Sequence[Any], *,
        first: bool = True,
    ) -> tuple[_Plan | None, str]:  # fmt: skip
        """Whether parts that are cut up so make the whole, as all ranks find. Collective."""
        shares = self._shares(plan, given)
        assert shares is not None
        given = _cut((args, kwargs), plan, shares)
        # A graph without a backward pass is nothing for what divides weights.
        graph = self._stand_in is not None or not self._model.divided
        if first and has_batch_norms(self._tried_out):
            # One that fails leaves others waiting where they normalize.
            normalize_over(ALONE, self._tried_out)
            why = self._agreed(self._run(*given).why)
            if why:
                return None, why
        normalize_over(self._group, self._tried_out)
        drawing = None
        if plan.draws_whole:
            drawing = Drawing(
                self._world.device, trains=graph, draws=WholeDraws(), shares=shares,
                expected=whole.noted,
            )  # fmt: skip
        part = self._run(given[0], given[1], drawing, graph=graph)
        outputs, why = _compared(whole, part, shares, self._rounding)
        astray = drawing is not None and (
            drawing.astray or part.generators != whole.generators
            or not self._draws.learn(whole.noted, part.noted, shares)
        )  # fmt: skip
        if (why and part.drew) or astray:
            why = "it draws random numbers that have no samples, or by which others are drawn"
        found = self._world.gather((outputs, part.why or why))
        for others, reason in found:
            if reason or others != outputs:
                return None, reason or "parts of a batch do not make the whole"
        plan = plan._replace(outputs=tuple(outputs))
        if any(kind.dim == _LOSS for kind in outputs):
            if _along(plan) != 0:
                return (
                    None,
                    "it gives a loss, and samples do not lie along the first dimension",
                )
            if graph:
                why = self._agreed(self._tried_losses(whole, part, plan, shares, first))
        return (None, why) if why else (plan, "")

    def _tried_losses(
        self, whole: _Trial, part: _Trial, plan: _Plan, shares: Shares, first: bool
    ) -> str:
        """Why losses that the model computes cannot be put together, if they cannot. Collective."""
        for kind, one, expected in zip(plan.outputs, part.outputs, whole.outputs, strict=True):
            if kind.dim != _LOSS:
                continue
            why = why_unsure(one, shares)
            # What an earlier batch has told, this one need not.
            factor = why if why and (first or why != UNSURE) else share_of(one, shares)
            if isinstance(factor, str):
                return f"it gives a loss that {factor}"
            # Their sums are more exact than what they are of.
            if not _close(
                mean_over(weighed(one.detach(), factor), shares), expected, self._rounding / 5
            ):
                return "it gives a loss that is not the mean or the sum of those of parts"
        return ""

    def _tried_again(self, plan: _Plan, args: Any, kwargs: Any, given: Sequence[Any]) -> str:
        """Why parts no longer make the whole, if they do not. Collective."""
        normalize_over(None, self._model.module)
        whole = self._run(args, kwargs, self._noting() if plan.draws_whole else None)
        again, why = self._tried(whole, plan, args, kwargs, given, first=False)
        if again != plan:
            return why or "its outputs are others"
        return self._tried_on_copies(plan, args, kwargs, given)

    def _tried_on_copies(self, plan: _Plan, args: Any, kwargs: Any, given: Sequence[Any]) -> str:
        """The same with a batch in which each part is one sample again and again. Collective.

        What depends on how unlike samples are, as on the longest of them, or on how many tokens
        want one expert, is another thing there.
        """
        norms = [one for one in self._tried_out.modules() if is_batch_norm(one)]
        shares = self._shares(plan, given)
        assert shares is not None
        if any(one.running_mean is None for one in norms):
            # Of values that are all the same it makes noise.
            return ""
        args, kwargs = _with_copies((args, kwargs), plan, shares)
        normalize_over(None, self._tried_out)
        self._running = True
        try:
            whole = self._run(args, kwargs, self._noting() if plan.draws_whole else None)
            again, why = self._tried(whole, plan, args, kwargs, given, first=False)
        finally:
            self._running = False
        return "" if again == plan else why or _RELATED

    def _refuse_if(self, why: str) -> None:
        if why:
            raise ConfigError(
                f"{type(self._model.module).__name__} computed each sample of a batch by itself, "
                f"and does not any longer: {why}. Steps since it was last tried may not be those "
                "of one process. Set divide_batches: false in unipar.yaml, so that each rank "
                "computes the whole, or run on one process."
            )

    def _run(
        self, args: Any, kwargs: Any, drawing: Drawing | None = None, *, graph: bool = False
    ) -> _Trial:
        """Let the model compute without a trace, for nobody to learn from.

        Args:
            args: of the call.
            kwargs: likewise.
            drawing: how random numbers are drawn; without, nothing is dropped.
            graph: whether to keep the graph.
        """
        module, training = self._tried_out, self._model.training_by
        # Not by a call of the engine, to which one that fails would be a step that has failed.
        called, surrounding = module, contextlib.nullcontext
        if training is not None and isinstance(training.engine, StepEngine):
            plain = graph or self._stand_in is not None
            called = module if plain else training.engine.eval_model
            surrounding = training.engine.precision.forward
        # What it writes into what it is given, the script would find.
        args, kwargs = _changed((args, kwargs), lambda one: one.detach().clone())
        copies = _held((args, kwargs)) or []
        versions = [one._version for one in copies]
        began = digest([one.numpy() for one in torch_generators(self._world.device)])
        with (
            warnings.catch_warnings(),
            torch.set_grad_enabled(graph),
            trial(module, self._world.device, dropout=drawing is not None) as draws,
            _own_weights(module, first=not self._looked_into) as written,
            _Watching(drops=drawing is not None) as watched,
            surrounding(),
            computing(),
            contextlib.nullcontext() if drawing is None else drawing.going_on(),
        ):
            warnings.simplefilter("ignore")
            if self._running:
                for one in filter(is_batch_norm, module.modules()):
                    one.training = False
            before, set_before = _attributes(module), _settings_of(module)
            kept = {name: one.clone() for name, one in module.named_buffers()}
            try:
                output = called(*args, **kwargs)
            except Exception as error:
                return _Trial([], {}, f"it fails where that is tried ({error})"[:300])
            found = _held(output)
            after = _attributes(module)
            self._leaves_nothing &= set_before == _settings_of(module) and not any(
                one is not kept[name]
                and (one.shape != kept[name].shape or not torch.equal(one, kept[name]))
                for name, one in module.named_buffers()
                if name in kept
            )
            # Strategies have theirs.
            hooked = watched.hooked and training is None
            foreign = graph and _has_other_weights(found or [], module)
            buffers = {name: (kept.get(name), one) for name, one in module.named_buffers()}
        why = ""
        stored = [name for name, held in after.items() if held and before.get(name) != held]
        if written:
            why = f"it changes its weights as it computes ({first_few(written)})"
        elif stored:
            why = f"it keeps what it computes of a batch in attributes ({first_few(stored)})"
        elif hooked:
            why = _HOOKED
        elif foreign:
            why = "it computes with weights that are not its own"
        elif draws.on_host:
            why = "it draws random numbers by random or NumPy"
        elif [one._version for one in copies] != versions:
            why = "it changes what it is given in place"
        elif found is None:
            why = f"it gives a {type(output).__name__}, in which tensors are not found"
        return _Trial(
            found or [], buffers, why, _changed(output, lambda one: None), draws.torch != began,
            draws.torch, () if drawing is None else drawing.noted,
        )  # fmt: skip

    def _agreed(self, why: str) -> str:
        """The first reason that a rank has. Collective."""
        return next(filter(None, self._world.gather(why)), "")

    def _settings_changed(self) -> bool:
        """Whether to try again, for numbers that the script sets on modules are others, as flags.

        Where they change in every step, as a rate does, only some changes ask for it.
        """
        before = self._settings
        self._settings = _settings_of(self._model.module)
        self._changes += bool(before) and before != self._settings
        return bool(before) and before != self._settings and _is_power(self._changes)

    # -- hooks -----------------------------------------------------------------------------------

    def _new_hooks(self) -> str:
        """What hooks the script has put into the model since the strategy took it."""
        if RemovableHandle.next_id == self._handles:
            return ""
        self._handles = RemovableHandle.next_id
        self._hooked = _described(_hooks_in(self._model.module) - self._hooks)
        return self._hooked


def _described(hooks: set[Any]) -> str:
    """Why hooks keep a model from computing parts."""
    return _HOOKED if hooks else ""


def _hooks_in(module: nn.Module) -> set[Any]:
    found: set[Any] = set()
    for one in module.modules():
        for kind in ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks"):
            found |= {(kind, number) for number in getattr(one, kind)}
        # torch has its own, as of weight_norm. torch 2.13, nn/modules/module.py.
        found |= {("before", number) for number, hook in one._forward_pre_hooks.items()
                  if not type(hook).__module__.startswith("torch.")}  # fmt: skip
    for one in module.parameters():
        found |= {("parameter", number) for number in one._backward_hooks or ()}
        after: Any = getattr(one, "_post_accumulate_grad_hooks", None)
        found |= {("gradient", number) for number in after or ()}
    return found


@contextlib.contextmanager
def _own_weights(module: nn.Module, *, first: bool) -> Iterator[list[str]]:
    """Give weights back their values, where there is room for copies, as before the first step.

    Args:
        module: whose weights.
        first: whether there is room.

    Yields:
        The names of those that were changed within, known at the end.
    """
    changed: list[str] = []
    held = [(part, dict(part._parameters)) for part in module.modules()]
    named = [(name, one, one._version) for name, one in module.named_parameters()]
    copies = [one.detach().clone() for _, one, _ in named] if first else []
    yield changed
    now = dict(module.named_parameters())
    # What is changed through `.data` has no other version.
    changed += [name for name, one, version in named
                if now.get(name) is not one or one._version != version]  # fmt: skip
    for part, parameters in held:
        part._parameters.update(parameters)
    with torch.no_grad():
        for (name, one, _), copy in zip(named, copies, strict=False):
            if not torch.equal(one, copy):
                changed += [name] * (name not in changed)
                one.data.copy_(copy)


def _is_power(number: int) -> bool:
    return not number & (number - 1)


def _settings_of(module: nn.Module) -> list[Any]:
    """The numbers and texts that are attributes of modules, but for their mode."""
    return [
        value
        for one in module.modules()
        for key, value in vars(one).items()
        if type(value) in _PLAIN and key not in ("training", OVER)
    ]


def is_looked_at(number: int) -> bool:
    """Whether what ranks have is compared in this pass."""
    return number <= _OFTEN or number % _SELDOM == 0


def check_alike(given: dict[str, Any], world: World) -> None:
    """Refuse what ranks have otherwise that is to be the same on all. Collective; waits.

    Args:
        given: tensors, and lists of numbers and texts.
        world: the joined processes.

    Raises:
        ConfigError: it is not.
    """
    tensors = {name: one for name, one in given.items() if isinstance(one, torch.Tensor)}
    told = [one.shape if name in tensors else one for name, one in given.items()]
    first, *others = world.gather([tuple(one) for one in told])
    other = [
        name for at, name in enumerate(given)
        if any(len(one) != len(first) or one[at] != first[at] for one in others)
    ]  # fmt: skip
    with torch.no_grad():
        marked = [(name, one.detach()) for name, one in tensors.items()]
        # The sum alone is the same in another order.
        marked += [(f"the order of {name}", _ordered(one)) for name, one in marked
                   if one.numel() > 1]  # fmt: skip
        other = other or unlike(marked, world)
    if other:
        raise ConfigError(
            f"ranks do not have the same batch ({first_few(other)} of what the model is given). "
            "Each runs this script as one process would, so what it draws or reads must be the "
            "same on all of them. Seed what it draws by, before anything is drawn: random.seed(0), "
            "numpy.random.seed(0), torch.manual_seed(0), and generators of its own; and let data "
            "depend on neither the time nor the order of a set or of a directory."
        )


def _ordered(one: torch.Tensor) -> torch.Tensor:
    if one.is_complex():
        one = torch.view_as_real(one)
    places = torch.linspace(1, 2, one.numel(), dtype=torch.float64, device=one.device)
    return one.flatten() * places


@contextlib.contextmanager
def _drawing_apart(world: World, before: list[torch.Tensor]) -> Iterator[list[bool]]:
    """Other random numbers on each rank within, and the same on all after it.

    Args:
        world: the joined processes.
        before: the states of torch's generators, the same on all ranks.

    Yields:
        Something once it has ended, if any were drawn.
    """
    drawn = list[bool]()
    seed = int(digest([one.numpy() for one in before])[:12], 16)
    if world.data_rank:
        # The first keeps the stream of the script.
        torch.manual_seed(seed + world.data_rank)
    began = torch_generators(world.device)
    try:
        yield drawn
    finally:
        now = torch_generators(world.device)
        if any(not torch.equal(one, other) for one, other in zip(now, began, strict=True)):
            drawn.append(True)
            torch.manual_seed(seed)
        elif world.data_rank:
            set_torch_generators(before, world.device)


def _has_other_weights(outputs: list[torch.Tensor], module: nn.Module) -> bool:
    """Whether gradients of outputs go to something else than a module's parameters."""
    own = {id(one) for one in module.parameters()}
    leaves = (getattr(one, "variable", None) for one in nodes_behind(o.grad_fn for o in outputs))
    return any(one is not None and id(one) not in own for one in leaves)


def _draws_by_itself(module: nn.Module) -> str:
    """Why generators in a module keep it from computing parts, if there are any."""
    kinds = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
    held = any(isinstance(v, kinds) for one in module.modules() for v in vars(one).values())
    return "it draws random numbers by a generator of its own" if held else ""


def _needs_whole_gradient(leaf: Any, dim: int | None) -> bool:
    return dim is None and isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _is_compiled(module: nn.Module) -> bool:
    # The class would take torch's compiler to import. torch 2.8 to 2.13.
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


class _Watching(TorchFunctionMode):
    """Lets everything pass where layers of a script's own leave something out, as DropPath.

    Args:
        drops: whether they may.

    Attributes:
        hooked: whether hooks were put on what was computed.
    """

    def __init__(self, *, drops: bool) -> None:
        super().__init__()
        self._drops, self.hooked = drops, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.hooked |= func is torch.Tensor.register_hook
        found = func(*args, **(kwargs or {}))
        passes = func is torch.Tensor.bernoulli_ and not self._drops
        return found.fill_(1) if passes else found


def _is_dense(leaf: Any) -> bool:
    return not isinstance(leaf, torch.Tensor) or (
        leaf.layout is torch.strided and not leaf.is_nested
    )


def _shape(leaf: Any) -> tuple[int, ...]:
    if not _is_dense(leaf):
        return (leaf.size(0),)
    return tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else (len(leaf),)


def _kind(leaf: Any) -> Any:
    return (leaf.dim(), leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf)


def _leaves(data: Any, *, rows: bool = True) -> list[Any]:
    """The tensors in containers, in order, with lists of plain values if these are asked for."""
    found: list[Any] = []

    def note(one: Any) -> Any:
        found.append(one)
        return one

    _changed(data, note, rows=rows)
    return found


def _held(data: Any) -> list[torch.Tensor] | None:
    """The tensors in containers, in order; ``None`` if there are others in what is none."""
    found = _leaves(data, rows=False)
    return found if {id(one) for one in tensors_of(data)} == {id(one) for one in found} else None


def _changed(data: Any, change: Callable[[Any], Any], *, rows: bool = False) -> Any:
    row = rows and type(data) in (list, tuple) and bool(data) and all(map(_is_plain, data))
    if isinstance(data, torch.Tensor) or row:
        return change(data)
    return with_items(data, lambda one: _changed(one, change, rows=rows))


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN)


def _cut(data: Any, plan: _Plan, shares: Shares) -> Any:
    along = iter(plan.inputs)

    def cut(one: Any) -> Any:
        dim = next(along)
        if dim is None:
            return one
        if isinstance(one, torch.Tensor):
            part = part_of(one, dim, shares)
            # A model may view it as it could view the whole.
            return part.contiguous() if one.is_contiguous() else part
        return one[shares.begin : shares.begin + shares.own]

    return _changed(data, cut, rows=True)


def _compared(
    whole: _Trial, part: _Trial, shares: Shares, rounding: float
) -> tuple[list[_Output], str]:
    """How outputs of a part are found in those of the whole; or why they are not."""
    if len(whole.outputs) != len(part.outputs) or not _same(whole.rest, part.rest):
        return [], _RELATED
    outputs = []
    for one, own in zip(whole.outputs, part.outputs, strict=True):
        found = _output(one, own, shares, rounding)
        if found is None:
            return [], _RELATED
        outputs.append(found)
    for name, moved in whole.buffers.items():
        if name not in part.buffers or not _alike(part.buffers[name], moved, rounding):
            return [], f"it keeps what it computes of a batch in buffers ({name})"
    return outputs, ""


def _alike(
    one: tuple[torch.Tensor | None, torch.Tensor],
    other: tuple[torch.Tensor | None, torch.Tensor],
    rounding: float,
) -> bool:
    """Whether two buffers, which were the same before, have moved alike."""
    (before, now), (_, expected) = one, other
    if before is None or before.shape != now.shape or not now.is_floating_point():
        return _close(now, expected, rounding)
    moved = (expected.double() - before.double()).abs().max() if now.numel() else 0.0
    least = 3e-7 * expected.double().abs().max() if now.numel() else 0.0
    apart = (now.double() - expected.double()).abs().max() if now.numel() else 0.0
    return now.dtype == expected.dtype and bool(apart <= rounding * moved + least)


def _same(one: Any, other: Any) -> bool:
    if any(isinstance(leaf, (bool, int, float)) for leaf in _numbers(one)):
        # It may be made of samples, and is the same by chance.
        return False
    try:
        return bool(one == other)
    except (ValueError, RuntimeError, TypeError):
        return False


def _numbers(value: Any) -> list[Any]:
    found: list[Any] = []

    def note(one: Any) -> Any:
        if isinstance(one, (bool, int, float)):
            found.append(one)
        return one if isinstance(one, (bool, int, float, str)) else with_items(one, note)

    note(value)
    return found


def _output(
    whole: torch.Tensor, part: torch.Tensor, shares: Shares, rounding: float
) -> _Output | None:
    if whole.dim() != part.dim() or whole.dtype != part.dtype:
        return None
    unlike = [dim for dim, (a, b) in enumerate(zip(whole.shape, part.shape, strict=True)) if a != b]
    if not unlike:
        if whole.dim() == 0 and whole.is_floating_point():
            return _Output(_LOSS)
        # What is made of samples may be the same by chance.
        return _Output(_ALIKE) if part.is_leaf and part.requires_grad else None
    each, rest = divmod(whole.shape[unlike[0]], sum(shares.sizes))
    if len(unlike) > 1 or rest or part.shape[unlike[0]] != each * shares.own:
        return None
    own = part_of(whole, unlike[0], shares.times(each))
    return _Output(unlike[0], each) if _close(part, own, rounding) else None


def _close(one: torch.Tensor, other: torch.Tensor, rounding: float) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.detach().to(wide), other.detach().to(wide)
    both = torch.isfinite(one) & torch.isfinite(other)
    if not torch.equal(one[~both].nan_to_num(), other[~both].nan_to_num()):
        return False
    if not both.any():
        return True
    sizes = other[both].abs()
    # Masks by huge numbers say nothing of the others.
    usual = sizes[sizes <= 1e4 * (sizes.median() + 1e-30)]
    scale = usual.max() if usual.numel() else sizes.max()
    return bool(((one - other)[both].abs() <= rounding * torch.maximum(sizes, scale)).all())


def _with_copies(data: Any, plan: _Plan, shares: Shares) -> Any:
    """A batch of whose parts each is the first sample of it, again and again."""
    along = iter(plan.inputs)
    taken = [
        first for first, size in zip(shares.begins, shares.sizes, strict=True) for _ in range(size)
    ]

    def copied(one: Any) -> Any:
        dim = next(along)
        if dim is None:
            return one
        if isinstance(one, torch.Tensor):
            return one.detach().index_select(dim, torch.tensor(taken, device=one.device))
        return type(one)(one[at] for at in taken)

    return _changed(data, copied, rows=True)


def _along(plan: _Plan) -> int | None:
    """The dimension of the first input that samples lie along."""
    return next(dim for dim in plan.inputs if dim is not None)


def _attributes(module: nn.Module) -> dict[str, list[Any]]:
    """The tensors that attributes of modules hold, and what objects do, as meters."""
    own = set(vars(nn.Module()))
    return {
        f"{name}.{key}".lstrip("."): [id(one) for one in _leaves(value, rows=False)]
        or _marks_of(value)
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if key not in own
    }


def _marks_of(value: Any, depth: int = 2) -> list[Any]:
    """What tells whether an object was changed within: its numbers and texts, and lengths."""
    held = getattr(value, "__dict__", None)
    if held is None or isinstance(value, (nn.Module, type)) or callable(value):
        return []
    marks: list[Any] = []
    for key, one in held.items():
        if _is_plain(one):
            marks.append((key, one))
        elif isinstance(one, torch.Tensor):
            marks.append((key, id(one), one._version))
        elif isinstance(one, Sized):
            marks.append((key, len(one)))
        elif depth:
            marks += _marks_of(one, depth - 1)
    return marks
