"""Trying whether parts of a batch make the whole: what a model gives, draws, and learns by."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from unipar.compat.adopted import AdoptedModel
from unipar.compat.dividing.alike import TO_WHOLE, UNSEEN
from unipar.compat.dividing.batch_norms import (
    ALONE,
    has_batch_norms,
    is_batch_norm,
    normalize_over,
)
from unipar.compat.dividing.comparing import RELATED, compared, gave_alike, kept, unlike_in
from unipar.compat.dividing.cutting import (
    ALIKE,
    LOSS,
    Plan,
    along,
    cut,
    shape_of,
    with_copies,
)
from unipar.compat.dividing.inner_losses import UNSURE, Divisors, share_of, weighed, why_apart
from unipar.compat.dividing.relations import relates
from unipar.compat.dividing.runs import FAILS, Run, Runner
from unipar.compat.dividing.shares import Shares, part_of
from unipar.compat.dividing.whole_draws import Drawing, Place, WholeDraws
from unipar.errors import ConfigError
from unipar.world import World

SOON = 8
"""Up to so many batches may not tell yet."""
_MOST_TRIALS = 12
_ROUNDING, _ROUNDING_HALF = 5e-5, 5e-2
"""Differences up to which parts make the whole, relative to the largest value: what kernels for
other shapes make."""
_SCALES = (1 / 32, 1e-3, 1e3)
"""By what outputs count in more comparisons of gradients, where functions are not torch's."""
_OWN_ROUNDING = 20
"""By so much more gradients of one weight may differ, relative to the largest of its own."""
_HIDDEN = "which of its random numbers belong to which sample does not show in what it gives"
UNLIKE_WEIGHTS = "ranks use other weights of it for their parts, as of experts"
_DRAWS = "it draws random numbers that have no samples, or by which others are drawn"


class _Tried(NamedTuple):
    """A plan by which parts make the whole, or why they do not; and the run of this rank's.

    Attributes:
        tells: whether the batch can tell of losses.
    """

    plan: Plan | None
    why: str
    part: Run
    drawing: Drawing | None = None
    tells: bool = True


class Trials:
    """Those of one model.

    Args:
        model: the engine's side of it.
        runner: lets it compute.
        draws: what is learned of how it draws.
        may_draw_whole: whether ranks can draw the random numbers of the whole batch.

    Attributes:
        placed: of what was drawn in the last one, where samples lie.
        divisors: what is known of what sums are divided by in losses that it gives.
    """

    def __init__(
        self, model: AdoptedModel, runner: Runner, draws: WholeDraws, *, may_draw_whole: bool
    ) -> None:
        self._model, self._runner, self._draws = model, runner, draws
        self._may_draw_whole = may_draw_whole
        self._group = model.world.mesh("batch").get_group()
        self._untold = 0
        self._shown: set[tuple[int, str]] = set()
        self.placed: list[Place | None] = []
        self.divisors = Divisors()
        self._apart = self._by_functions = False
        self._unsteady: set[str] = set()

    @property
    def _world(self) -> World:
        return self._model.world

    def shares(self, plan: Plan, given: Sequence[Any]) -> Shares | None:
        """How a batch is cut up; ``None`` where a rank would have less than two samples.

        One alone is often another thing to a model, as where it squeezes dimensions. It is ``None``
        too where the batch is not made of whole units.
        """
        lengths = {shape_of(one)[dim] for one, dim in zip(given, plan.inputs, strict=True)
                   if dim is not None}  # fmt: skip
        size, unit = self._world.data_size, plan.unit
        length = lengths.pop()
        if lengths or length % unit or length < max(2, unit) * size:
            return None
        return Shares.of(length // unit, self._world.data_rank, size, self._group).times(unit)

    def find(self, args: Any, kwargs: Any, given: Sequence[Any]) -> tuple[Plan | None, str]:
        """How inputs can be cut up so that parts make the whole; or why they cannot. Collective.

        Neither, where that cannot be told yet: the model gives the same for all samples, as one
        whose last layer is zero at first.
        """
        plan, why = self._find(args, kwargs, given)
        return self._find(args, kwargs, given) if self._is_to_autocast(why) else (plan, why)

    def _find(self, args: Any, kwargs: Any, given: Sequence[Any]) -> tuple[Plan | None, str]:
        normalize_over(None, self._runner.module)
        whole, why = self._run_whole(args, kwargs, draws_whole=True)
        self._runner.looked_into = not why
        if why:
            return None, why
        if not whole.tells:
            return None, self._for_now("what it gives does not tell samples apart")
        unit_of = functools.cache(lambda inputs: self._unit(inputs, args, kwargs, given))
        for draws_whole in (self._may_draw_whole, False):
            if not draws_whole:
                if not whole.drew and self._may_draw_whole:
                    break
                # Without dropout, where each rank is to draw others.
                whole, why = self._runner.run(args, kwargs), ""
            for inputs in itertools.islice(self._ways(given), _MOST_TRIALS):
                asked = Plan(inputs, draws_whole=draws_whole, unit=unit_of(inputs))
                tried = self._tried(whole, asked, args, kwargs, given)
                if tried.why == _DRAWS and self._lie_otherwise(tried):
                    tried = self._tried(whole, asked, args, kwargs, given)
                if tried.plan is not None:
                    if self._hidden_draws(whole, tried, args, kwargs, given):
                        return None, self._for_now(_HIDDEN)
                    why = self._on_copies(tried, args, kwargs, given)
                    why = why or self._backward(tried.plan, args, kwargs, given)
                    return (None, why) if why else (tried.plan, "")
                why = why or tried.why
        return None, self._for_now(why) if why.endswith(UNSURE) else why

    def _unit(
        self, inputs: tuple[int | None, ...], args: Any, kwargs: Any, given: Sequence[Any]
    ) -> int:  # fmt: skip
        """How many samples parts can be made of, and multiples of that, as of clips. Collective.

        That is 1 where few can be computed, and where no number of them.
        """
        lengths = (shape_of(one)[dim] for one, dim in zip(given, inputs, strict=True)
                   if dim is not None)  # fmt: skip
        length = next(lengths)

        def works(samples: int) -> bool:
            first = Shares((samples, length - samples), 0, self._group)
            run = self._runner.run(*cut((args, kwargs), Plan(inputs), first))
            return not run.why.startswith(FAILS)

        unit = 1
        if not (works(3) and works(2)):
            most = length // self._world.data_size
            several = (one for one in range(2, most + 1) if length % one == 0)
            unit = next(filter(works, several), 1)
        return math.lcm(*self._world.gather(unit))

    def again(self, plan: Plan, args: Any, kwargs: Any, given: Sequence[Any]) -> str:
        """Why parts no longer make the whole, if they do not. Collective."""
        why = self._again(plan, args, kwargs, given)
        return self._again(plan, args, kwargs, given) if self._is_to_autocast(why) else why

    def _is_to_autocast(self, why: str) -> bool:
        """Whether to try once more, under the autocast that a failed trial has left out.

        A model may not run in fp32, for want of memory or of dtypes that fit.
        """
        leaves_out = why.startswith(FAILS) and self._runner.leaves_out_autocast
        self._runner.in_fp32 &= not leaves_out
        return leaves_out

    def _again(self, plan: Plan, args: Any, kwargs: Any, given: Sequence[Any]) -> str:
        normalize_over(None, self._runner.module)
        whole, why = self._run_whole(args, kwargs, draws_whole=plan.draws_whole)
        if why:
            return why
        tried = self._tried(whole, plan, args, kwargs, given, first=False)
        if tried.plan != plan:
            return tried.why or "its outputs are others"
        if self._hidden_draws(whole, tried, args, kwargs, given):
            return _HIDDEN
        why = self._on_copies(tried, args, kwargs, given)
        if not why and tried.tells and any(self._world.gather(tried.part.by_functions)):
            why = self._backward(plan, args, kwargs, given)
        return why

    def agreed(self, why: str) -> str:
        """The first reason that a rank has. Collective."""
        return next(filter(None, self._world.gather(why)), "")

    def _noting(self) -> Drawing:
        return Drawing(self._world.device)

    def _for_now(self, why: str) -> str:
        """A reason that may be gone with the next batch; none, unless that cannot be tried."""
        self._untold += 1
        return why if self._untold > SOON or self._model.divided else ""

    def _ways(self, given: Sequence[Any]) -> Iterator[tuple[int | None, ...]]:
        """Dimensions of the inputs that samples may lie along: of all, those of the same size."""
        shapes = list(map(shape_of, given))
        first = next(at for at, shape in enumerate(shapes) if shape)
        for dim, length in enumerate(shapes[first][:2]):
            if length < 2 * self._world.data_size:
                continue
            choices = [
                [dim] if at == first
                else [*(other for other, size in enumerate(shape) if size == length), None]
                for at, shape in enumerate(shapes)
            ]  # fmt: skip
            yield from itertools.product(*choices)

    def _run_whole(self, args: Any, kwargs: Any, *, draws_whole: bool) -> tuple[Run, str]:
        """The run of all samples, and why parts cannot make it, if that shows there. Collective.

        What is stored otherwise in a second one, as the time, tells nothing of samples.

        Raises:
            ConfigError: what it gives is another in a second one.
        """
        whole = self._runner.run(args, kwargs, self._noting() if draws_whole else None)
        why = self.agreed(whole.why or kept(whole))
        if not why:
            other = self._runner.run(args, kwargs, self._noting() if draws_whole else None)
            # Kernels may round otherwise in each.
            rounding = _rounding(whole, other)
            unlike = unlike_in(whole, other, rounding / 5)
            stored = {**other.stored, **whole.stored}
            self._unsteady |= {
                path for path in unlike if not isinstance(stored[path].after, torch.Tensor)
            }
            if any(self._world.gather(not gave_alike(whole, other, rounding))):
                raise ConfigError(
                    f"{type(self._runner.module).__name__} gives other results when it is run "
                    "twice on one batch. It keeps something of its calls where that is not seen, "
                    f"{UNSEEN}, so that trials of how it computes parts of a batch have changed "
                    f"it. {TO_WHOLE}"
                )
        return whole, why

    def _run_part(
        self, whole: Run, plan: Plan, args: Any, kwargs: Any, shares: Shares,
        swapped: int | None = None, of: Any = None,
    ) -> tuple[Run, Drawing | None]:  # fmt: skip
        part, graph, drawing = cut((args, kwargs), plan, shares), self._runner.has_graphs, None
        normalize_over(self._group, self._runner.module)
        if plan.draws_whole:
            drawing = Drawing(
                self._world.device, draws=WholeDraws(), shares=shares,
                expected=whole.noted, apart=self._apart, swapped=swapped,
            )  # fmt: skip
        return self._runner.run(part[0], part[1], drawing, graph=graph, of=of), drawing

    def _tried(
        self, whole: Run, plan: Plan, args: Any, kwargs: Any, given: Sequence[Any], *,
        first: bool = True,
    ) -> _Tried:  # fmt: skip
        """Whether parts that are cut up so make the whole, as all ranks find. Collective."""
        shares = self.shares(plan, given)
        assert shares is not None
        if first and has_batch_norms(self._runner.module):
            # One that fails leaves others waiting where they normalize.
            normalize_over(ALONE, self._runner.module)
            alone = self._runner.run(*cut((args, kwargs), plan, shares))
            why = self.agreed(alone.why)
            if why:
                return _Tried(None, why, alone)
        part, drawing = self._run_part(whole, plan, args, kwargs, shares)
        outputs, why = compared(whole, part, shares, _rounding(whole, part), self._unsteady)
        astray = drawing is not None and (
            drawing.astray or part.generators != whole.generators
            or not self._draws.learn(whole.noted, part.noted, shares, apart=self._apart)
        )  # fmt: skip
        # Where outputs are alike, what is kept is not so for what was drawn.
        if (why and part.drew and not outputs) or astray:
            why = _DRAWS
        if not why and relates(whole.calls, part.calls):
            why = f"{RELATED}, as by a mean of all of them"
        found = self._world.gather((outputs, part.why or why))
        # All ranks go on by the same reason.
        why = next((reason for _, reason in found if reason), "")
        if not why and any(others != outputs for others, _ in found):
            why = "parts of a batch do not make the whole"
        if why:
            return _Tried(None, why, part, drawing)
        plan, tells = plan._replace(outputs=tuple(outputs)), True
        if any(kind.dim == LOSS for kind in outputs):
            if along(plan) != 0:
                why = "it gives a loss, and samples do not lie along the first dimension"
            elif self._runner.has_graphs:
                why, tells = self._losses(whole, part, plan, shares, first)
        return _Tried(None if why else plan, why, part, drawing, tells)

    def _lie_otherwise(self, tried: _Tried) -> bool:
        """Take the entries of samples for lying apart from now on, if any has several. Collective.

        Rows of (time, samples) may have been flattened, or all samples repeated.
        """
        several = tried.drawing is not None and bool(tried.drawing.between_samples)
        self._apart = not self._apart and all(self._world.gather(several))
        if self._apart:
            self._draws.forget()
        return self._apart

    def _losses(
        self, whole: Run, part: Run, plan: Plan, shares: Shares, first: bool
    ) -> tuple[str, bool]:
        """Why losses that the model computes cannot be put together, if they cannot. Collective.

        Returns:
            That, and whether the batch can tell.
        """
        tells = True
        pairs = zip(plan.outputs, part.outputs, whole.outputs, strict=True)
        for at, (kind, one, expected) in enumerate(pairs):
            if kind.dim != LOSS:
                continue
            # Their sums are more exact than what they are of.
            why, told = why_apart(
                one, expected, shares, self.divisors, (plan, at), _rounding(whole, part) / 5,
                first=first,
            )  # fmt: skip
            why, tells = self.agreed(why), tells and told
            if why:
                return why, tells
        return "", tells

    def _hidden_draws(
        self, whole: Run, tried: _Tried, args: Any, kwargs: Any, given: Sequence[Any]
    ) -> bool:
        """Whether it cannot be seen which of some random numbers belong to which sample.

        Entries of a sample may lie one after another, or apart; and what is drawn may have no
        effect yet, as behind a gate that is zero, or be the same for all. Collective.
        """
        plan, drawing = tried.plan, tried.drawing
        if plan is None or drawing is None:
            return False
        self.placed = drawing.placed
        draws = [(at, drawing.noted[at][0]) for at in drawing.between_samples]
        draws = [one for one in draws if one not in self._shown][:_MOST_TRIALS]
        shares = self.shares(plan, given)
        assert shares is not None
        for one in draws:
            other, _ = self._run_part(whole, plan, args, kwargs, shares, swapped=one[0])
            pairs = zip(other.outputs, tried.part.outputs, strict=True)
            if not any(self._world.gather(any(not torch.equal(*pair) for pair in pairs))):
                return True
            self._shown.add(one)
        return False

    def _on_copies(self, before: _Tried, args: Any, kwargs: Any, given: Sequence[Any]) -> str:
        """The same with a batch in which each part is one sample again and again. Collective.

        What depends on how unlike samples are, as on the longest of them, or on how many tokens
        want one expert, is another thing there.
        """
        plan = before.plan
        assert plan is not None
        norms = [one for one in self._runner.module.modules() if is_batch_norm(one)]
        shares = self.shares(plan, given)
        assert shares is not None
        if any(one.running_mean is None for one in norms):
            # Of values that are all the same it makes noise.
            return ""
        args, kwargs = with_copies((args, kwargs), plan, shares)
        normalize_over(None, self._runner.module)
        self._runner.in_eval = True
        try:
            whole = self._runner.run(args, kwargs, self._noting() if plan.draws_whole else None)
            tried = self._tried(whole, plan, args, kwargs, given, first=False)
        finally:
            self._runner.in_eval = False
        if tried.plan != plan:
            return tried.why or RELATED
        uses_others = self._model.sums_in_order and tried.part.used != before.part.used
        return self.agreed(UNLIKE_WEIGHTS if uses_others else "")

    def _backward(self, plan: Plan, args: Any, kwargs: Any, given: Sequence[Any]) -> str:
        """Why gradients of parts do not add up to those of the whole, if they do not. Collective.

        Functions of a script's own may do anything in their backward passes, and what is behind a
        gate that is zero shows in its gradient alone.
        """
        shares = self.shares(plan, given)
        if shares is None or not (self._runner.has_graphs and self._runner.has_backward):
            return ""
        why = self._gradients(plan, args, kwargs, shares, 1.0)
        # Functions of a script's own may be linear in large gradients alone, or in small ones.
        for scale in _SCALES if self._by_functions else ():
            why = why or self._gradients(plan, args, kwargs, shares, scale)
        return why

    def _gradients(self, plan: Plan, args: Any, kwargs: Any, shares: Shares, scale: float) -> str:
        """Compare gradients of what the model gives by numbers of some scale. Collective."""
        normalize_over(None, self._runner.module)
        whole = self._runner.run(
            args, kwargs, self._noting() if plan.draws_whole else None, graph=True,
            of=functools.partial(_probe, plan, None, scale),
        )  # fmt: skip
        part, _ = self._run_part(
            whole, plan, args, kwargs, shares, of=functools.partial(_probe, plan, shares, scale)
        )
        why = self.agreed(whole.why or part.why)
        had = whole.gradients is not None and part.gradients is not None
        told = self._world.gather((had, part.by_functions))
        self._by_functions = any(by_functions for _, by_functions in told)
        if why or not all(one for one, _ in told):
            return why
        assert whole.gradients is not None
        assert part.gradients is not None
        largest = max((float(one.abs().max()) for one in whole.gradients if one.numel()), default=0)
        unlike, rounding = False, _rounding(whole, part)
        for one, expected in zip(part.gradients, whole.gradients, strict=True):
            dist.all_reduce(one, group=self._group)
            if not one.numel():
                continue
            mean = one.double() / len(shares.sizes)
            apart = float((mean - expected.double()).abs().max())
            own = _OWN_ROUNDING * rounding * float(expected.abs().max())
            unlike |= apart > rounding * largest and apart > own
        told_of = RELATED if not whole.drew else _DRAWS
        return self.agreed(f"{told_of}, as its gradients show" if unlike else "")


def _rounding(whole: Run, part: Run) -> float:
    return _ROUNDING_HALF if whole.in_half or part.in_half else _ROUNDING


def _probe(
    plan: Plan, shares: Shares | None, scale: float, outputs: list[torch.Tensor]
) -> torch.Tensor | None:
    """A sum of what a model gives, each element of which counts for something else.

    Of parts it counts as often as there are ranks, over which gradients are averaged: as in passes
    that are trained on.

    Args:
        plan: how outputs of parts make those of the whole.
        shares: how the batch is divided; ``None`` for what is given of the whole.
        scale: of what elements count.
        outputs: of the model.
    """
    terms: list[torch.Tensor] = []
    for kind, one in zip(plan.outputs, outputs, strict=True):
        if kind.dim == ALIKE or not (one.requires_grad and one.is_floating_point()):
            continue
        if kind.dim == LOSS:
            factor = 1.0 if shares is None else share_of(one, shares)
            assert not isinstance(factor, str)
            terms.append(weighed(one, factor) * scale)
            continue
        whole = list(one.shape)
        own = None if shares is None else shares.times(kind.each)
        whole[kind.dim] = whole[kind.dim] if own is None else sum(own.sizes)
        counts = torch.arange(math.prod(whole), dtype=torch.float64, device=one.device).cos()
        counts = (counts * scale).view(whole).to(one.dtype)
        # Where it masks by infinity nothing is learned.
        given = one.nan_to_num(0.0, 0.0, 0.0)
        if own is None:
            terms.append((given * counts).sum())
        else:
            own_counts = part_of(counts, kind.dim, own) * len(own.sizes)
            terms.append((given * own_counts).sum())
    return sum(terms[1:], terms[0]) if terms else None
