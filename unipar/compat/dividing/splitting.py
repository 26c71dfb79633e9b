"""A script that knows nothing of ranks, on several: each runs it whole, and computes a part.

Every rank has whole batches, and draws the same random numbers, so that all of the script, its loss
too, is computed as on one process. A model that an engine trains computes this rank's part of what
it is called with, and what ranks give is put together on all of them.

That parts together make the whole is tried, and not assumed: before a model's first pass with
inputs of a kind, and again before later ones, it computes both. What it does with the samples of a
batch in relation to each other shows there, and all ranks then compute the whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from unipar.compat.adopted import AdoptedModel
from unipar.compat.common_draws import drawing_apart
from unipar.compat.dividing.alike import check_alike, is_looked_at
from unipar.compat.dividing.batch_norms import computing, normalize_over
from unipar.compat.dividing.comparing import UNFIT
from unipar.compat.dividing.cutting import (
    ALIKE,
    LOSS,
    Plan,
    changed,
    cut,
    is_dense,
    kind_of,
    leaves_in,
    needs_whole_gradient,
    shape_of,
    tensors_held,
)
from unipar.compat.dividing.inner_losses import (
    LITTLE,
    Divisor,
    kind_of_loss,
    share_of,
    weighed,
    why_not_told,
)
from unipar.compat.dividing.model_hooks import described, draws_by_itself, hooks_in, is_compiled
from unipar.compat.dividing.runs import Runner
from unipar.compat.dividing.settings import Settings, attributes_of
from unipar.compat.dividing.shares import Shares, layout_of, mean_over, tied, whole_of
from unipar.compat.dividing.signatures import Signatures
from unipar.compat.dividing.trying import SOON, UNLIKE_WEIGHTS, Trials
from unipar.compat.dividing.whole_draws import Drawing, WholeDraws
from unipar.engine.broadcast import with_copies
from unipar.engine.snapshots import Snapshot
from unipar.engine.trials import (
    host_generators,
    set_host_generators,
    set_torch_generators,
    torch_generators,
)
from unipar.errors import ConfigError
from unipar.world import World

_AGAIN = 128
"""A model is tried again in passes whose number is a power of two, and in one of so many."""
_EXACT = 2**52
"""Whole numbers up to this are floating-point numbers, too."""
_ALL_TRIED = 2
"""Up to so many changes of settings each is tried."""


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
        world = model.world
        self._group = world.mesh("batch").get_group()
        self.shares = Shares.of(0, world.data_rank, world.data_size, self._group)
        self._plans: dict[Any, Plan | None] = {}
        self._parameters: list[int] = []
        self._numbers: dict[int, int] = {}
        self._changes = self._small = 0
        self._settings = Settings(model.module)
        self._calls: dict[Any, int] = {}
        self._tried_at: dict[Any, int] = {}
        self._signatures: dict[Any, Signatures] = {}
        self._draws, self._runner = WholeDraws(), Runner(model)
        # Compilers have random numbers of their own.
        may_draw_whole = not (compiled or any(map(is_compiled, model.module.modules())))
        self._runner.notes_calls = may_draw_whole
        self._trials = Trials(model, self._runner, self._draws, may_draw_whole=may_draw_whole)
        # What the script has put into the model before the strategy has.
        self._hooks, self._handles = hooks_in(model.module), RemovableHandle.next_id
        self._hooked = described(self._hooks) or draws_by_itself(model.module)
        self._own = attributes_of(model.module)

    def look_at(self, args: Any, kwargs: Any) -> None:
        """Try how the model computes in parts, before a strategy has it. Collective.

        An error in the middle of it would leave what divides weights half way.
        """
        given = leaves_in((args, kwargs))
        looks = self._divides and self._has_samples(given)
        looks = looks and not (self._hooked or _in_checkpoint())
        if looks and all(map(is_dense, given)):
            self._decide(self._kind(given, args, kwargs), args, kwargs, given)

    def begin(self) -> None:
        """Leave aside what the strategy itself has put into the model."""
        self._hooks, self._handles = hooks_in(self._model.module), RemovableHandle.next_id
        self._runner.apart = frozenset(attributes_of(self._model.module) - self._own)
        self._parameters = [id(one) for one in self._model.module.parameters()]
        self._numbers = {one: number for number, one in enumerate(self._parameters)}

    def compute(self, args: Any, kwargs: Any) -> Any:
        """A forward pass that may be trained on. Collective.

        Raises:
            ConfigError: ranks are given other batches; or what the model does with parts of them
                is no longer what it did.
        """
        given = leaves_in((args, kwargs))
        trains = torch.is_grad_enabled() and self._model.learns
        if not trains or not self._has_samples(given):
            if trains and self._divides and not given:
                self._tell_whole("it is given no tensors, and no lists of values, to be divided")
            elif trains and self._divides and self._small == SOON + 1:
                self._tell_whole(
                    f"{SOON} batches one after another have less than "
                    f"{2 * self._world.data_size} samples"
                )
            return self._whole(args, kwargs)
        kind = self._kind(given, args, kwargs)
        calls = self._calls[kind] = self._calls.get(kind, 0) + 1
        if not all(map(is_dense, given)):
            self._tell_whole("it is given tensors that are not dense")
            return self._whole(args, kwargs)
        if is_looked_at(calls):
            inputs = {f"input {at}": one for at, one in enumerate(given)}
            check_alike(inputs, self._world, divides=self._divides)
        if not self._divides:
            return self._whole(args, kwargs)
        if self._parameters != [id(one) for one in self._model.listed]:
            # As by functional_call, of whose weights each rank is to have the whole gradient.
            self._tell_whole(
                "it has other weights than when it was first called, as by functional_call, or "
                "where a part of it was replaced"
            )
            return self._whole(args, kwargs)
        why = self._hooked or self._new_hooks() or _in_checkpoint()
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
        shares = None if plan is None else self._trials.shares(plan, given)
        if plan is None or shares is None:
            return self._whole(args, kwargs)
        if any(map(needs_whole_gradient, given, plan.inputs)):
            # As fast weights, or a prompt that is learned, of which a part has a part of it.
            self._tell_whole("it is given tensors beside the batch that need gradients")
            return self._whole(args, kwargs)
        known = self._signatures.get(kind)
        again = calls % _AGAIN == 0 or (calls > 1 and _is_power(calls))
        changed, has_rows = self._settings.look(sum(shares.sizes))
        # Where they change in every step, as a rate does, only some changes ask for it.
        self._changes += changed
        is_set = changed and _is_power(self._changes)
        if is_set or has_rows or again:
            why = self._trials.again(plan, args, kwargs, given)
            # What was not there before has had no effect.
            tried = known is None or has_rows or self._tried_at[kind] == calls - 1
            if why and (tried or (is_set and self._changes <= _ALL_TRIED)):
                return self._whole_from_now_on(kind, why, args, kwargs)
            self._refuse_if(why)
            known = None
        if known is None:
            self._tried_at[kind] = calls
        return self._in_parts(plan, shares, args, kwargs, given, kind, tried=known is None)

    def _kind(self, given: Sequence[Any], args: Any, kwargs: Any) -> Any:
        """What tells calls apart that may compute other things."""
        asked = [(name, one) for name, one in (*enumerate(args), *kwargs.items())
                 if one is None or isinstance(one, (bool, str))]  # fmt: skip
        return (*map(kind_of, given), *asked, self._model.module.training)

    def _decide(self, kind: Any, args: Any, kwargs: Any, given: Sequence[Any]) -> None:
        with self._runner.copied():
            plan, why = self._trials.find(args, kwargs, given)
        if plan is not None or why:
            self._plans[kind] = plan
        if why:
            self._tell_whole(why)

    @property
    def _world(self) -> World:
        return self._model.world

    def _has_samples(self, given: Sequence[Any]) -> bool:
        first = next((shape for one in given if (shape := shape_of(one))), ())
        enough = 2 * self._world.data_size
        if first:
            # It may be a small batch, or time; the next ones will tell.
            self._small = 0 if first[0] >= enough else self._small + 1
        return max(first[: 1 + (self._small > SOON)], default=0) >= enough

    def _whole(self, args: Any, kwargs: Any) -> Any:
        normalize_over(None, self._model.module)
        with computing():
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

    def _in_parts(
        self, plan: Plan, shares: Shares, args: Any, kwargs: Any, given: Sequence[Any],
        kind: Any, *, tried: bool,
    ) -> Any:  # fmt: skip
        """A pass in parts; in which a graph that none had before is tried, unless it was."""
        part = cut((args, kwargs), plan, shares)
        normalize_over(self._group, self._model.module)
        device, drawing = self._world.device, None
        kept = _Kept(self._model.module, self._runner, device)
        if plan.draws_whole:
            drawing = Drawing(device, draws=self._draws, shares=shares)
            drawn = drawing.going_on()
        else:
            drawn = drawing_apart(self._world, kept.generators)
        with drawn as apart, computing():
            output = self._model.forward(*part[0], **part[1])
        parts = leaves_in(part)
        why, new, astray, by = self._looked_at(kind, plan, shares, output, parts, drawing)
        if why or astray or new or by:
            if not why and (astray or (new and not tried)):
                # What counts its calls, or draws what it does, is to do what it has done now.
                passed = kept.put_back()
                why = self._trials.again(plan, args, kwargs, given)
                self._tried_at[kind] = self._calls[kind]
                passed.put_back()
            # What was taken for a part, by what was known, may have been the whole.
            other = drawing is not None and self._trials.agreed(
                "" if self._trials.placed == drawing.placed else "other"
            )
            if why or astray or other or by:
                kept.put_back()
                if drawing is not None:
                    drawing.drop()
                if why:
                    return self._whole_from_now_on(kind, why, args, kwargs)
                # Now it is known how.
                output = self._whole(args, kwargs)
                self._note_divisors(by, output, plan, shares)
                return output
        if apart:
            self._tell(
                "%s draws random numbers, as for dropout: each rank draws others, for its part of "
                "a batch, so results are those of one process only as another seed's are.",
                type(self._model.module).__name__,
            )
        return self._together(output, plan, shares, parts)

    def _together(self, output: Any, plan: Plan, shares: Shares, parts: list[Any]) -> Any:
        """What parts make, on all ranks. Collective."""
        found = leaves_in(output, rows=False)
        learning = [one for one in parts if isinstance(one, torch.Tensor) and one.requires_grad]
        tying = [at for at, kind in enumerate(plan.outputs) if kind.dim != ALIKE]
        tie = tied([found[at] for at in tying], learning)
        makers, own = iter(enumerate(plan.outputs)), dict(zip(tying, tie, strict=True))

        def whole(one: torch.Tensor) -> torch.Tensor:
            at, kind = next(makers)
            if kind.dim == ALIKE:
                return one
            if kind.dim == LOSS:
                factor = share_of(one, shares)
                assert not isinstance(factor, str)
                return mean_over(weighed(own[at], factor), shares)
            return whole_of(own[at], kind.dim, shares.times(kind.each))

        return changed(output, whole)

    def _looked_at(
        self, kind: Any, plan: Plan, shares: Shares, output: Any, part: Any,
        drawing: Drawing | None,
    ) -> tuple[str, bool, bool, dict[int, Divisor]]:  # fmt: skip
        """Why ranks' outputs do not fit together, and whether any has a new graph, or new draws.

        Collective, on the host: it waits for a device only if a loss is divided by a tensor.

        Returns:
            These, and of losses by whose divisors it may not be told what they count for, those of
            this rank.
        """
        known, found = self._signatures.setdefault(kind, Signatures()), tensors_held(output)
        draws = () if drawing is None else drawing.noted
        drawn = [(name, len(shape)) for name, shape in draws]
        new = known.note(found or (), list(map(shape_of, part)), drawn, self._numbers)
        shapes = [one.shape for one in found or ()]
        fits = found is not None and len(shapes) == len(plan.outputs) and all(
            output.dim < 0 or shape[output.dim] == shares.own * output.each
            for shape, output in zip(shapes, plan.outputs, strict=True)
        )  # fmt: skip
        others = [
            (*shape[: kind.dim], *shape[kind.dim + 1 :], *layout_of(one))
            if kind.dim >= 0 else tuple(shape)
            for one, shape, kind in zip(found or (), shapes, plan.outputs, strict=False)
        ]  # fmt: skip
        losses = {
            at: kind_of_loss(one, shares.own)
            for at, (one, output) in enumerate(zip(found or (), plan.outputs, strict=False))
            if output.dim == LOSS
        }  # fmt: skip
        kinds = [one for one, _ in losses.values()]
        own_why = UNFIT if not fits else next(filter(None, map(why_not_told, kinds)), "")
        # One rank may have drawn in a branch that others have not taken.
        mark, used = _hash((len(draws), *others, *kinds)), known.used % _EXACT
        astray = drawing is not None and drawing.astray
        by = {
            at: losses.get(at, ("", None))[1]
            for at, output in enumerate(plan.outputs) if output.dim == LOSS
        }  # fmt: skip
        sent = [(0, 0, 0) if one is None else (-one.least, one.most, one.nothing)
                for one in by.values()]  # fmt: skip
        seen = torch.tensor(
            [new, bool(own_why), astray, mark, -mark, used, -used, *sum(sent, ())],
            dtype=torch.float64,
            device="cpu",
        )
        dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=self._group)
        is_new, unfit, strays, most, least, most_used, least_used, *rest = seen.tolist()
        training, why = self._model.training_by, ""
        if unfit or most != -least:
            why = self._trials.agreed(own_why) or UNFIT
        alike = most_used == -least_used
        if training is not None:
            training.uses_alike &= alike
            if self._model.sums_in_order and not alike:
                why = why or UNLIKE_WEIGHTS
        if known.endless:
            self._tell(
                "%s computes in ever other ways, so that it is not tried in each of them whether "
                "parts of a batch make the whole, but at times. With divide_batches: false in "
                "unipar.yaml each rank computes the whole.",
                type(self._model.module).__name__,
            )
        unsure: dict[int, Divisor] = {}
        for one, (at, own) in enumerate(by.items()):
            low, high, nothing = rest[3 * one : 3 * one + 3]
            ranks = Divisor(-low, high, bool(nothing))
            if own is not None and not self._trials.divisors.add_up((plan, at), ranks):
                unsure[at] = own
        return why, bool(is_new), bool(strays), unsure

    def _note_divisors(
        self, own: dict[int, Divisor], output: Any, plan: Plan, shares: Shares
    ) -> None:
        """Take notice of losses by whose divisors it was not told whether these add up.

        Collective.

        Args:
            own: those of this rank's part.
            output: what the whole has given.
            plan: how the batch was cut up.
            shares: how it was divided.
        """
        found = tensors_held(output) or []
        for at, one in own.items():
            by = kind_of_loss(found[at], sum(shares.sizes))[1] if at < len(found) else None
            ranks = self._world.gather(one.least)
            if by is not None and abs(sum(ranks) - by.least) <= LITTLE * abs(by.least):
                self._trials.divisors.note((plan, at), min(ranks))

    def _refuse_if(self, why: str) -> None:
        if why:
            raise ConfigError(
                f"{type(self._model.module).__name__} computed each sample of a batch by itself, "
                f"and does not any longer: {why}. Steps since it was last tried may not be those "
                "of one process. Set divide_batches: false in unipar.yaml, so that each rank "
                "computes the whole, or run on one process."
            )

    # -- hooks -----------------------------------------------------------------------------------

    def _new_hooks(self) -> str:
        """What hooks the script has put into the model since the strategy took it."""
        if RemovableHandle.next_id == self._handles:
            return ""
        self._handles = RemovableHandle.next_id
        found = hooks_in(self._model.module) - self._hooks
        if self._model.divided and any(kind in ("parameter", "gradient") for kind, _ in found):
            raise ConfigError(
                f"hooks were put on weights of {type(self._model.module).__name__}, of which each "
                "rank has a part, and would find the gradient of that part. Use a strategy that "
                "leaves weights whole, such as ddp."
            )
        self._hooked = described(found)
        return self._hooked


def _in_checkpoint() -> str:
    """Why a pass that the script itself has computed once more is to be of the whole.

    It is the module, and no pass of the engine's, that the backward pass will call.
    """
    # torch 2.8 to 2.13, csrc/autograd/init.cpp.
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]
    within = hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"
    return "the script calls it through torch.utils.checkpoint" if within else ""


class _Kept:
    """What a pass changes beside what it gives, for it to be computed once more.

    Args:
        module: the model.
        runner: says what was seen to be changed of it.
        device: whose generator is kept beside the host's.
    """

    def __init__(self, module: nn.Module, runner: Runner, device: torch.device) -> None:
        self._of = module, runner, device
        self.generators, self._host = torch_generators(device), host_generators()
        # A model changes them in place, or puts others in their place.
        parts = [one for one in module.modules() if one._buffers] if runner.traces else []
        self._buffers = [(one._buffers, dict(one._buffers)) for one in parts]
        held = {id(one): one for _, own in self._buffers for one in own.values() if one is not None}
        self._values = with_copies(held.values())
        self._objects = Snapshot({"": module} if runner.stores else {})

    def put_back(self) -> _Kept:
        """Put it back; what there was instead."""
        now = _Kept(*self._of)
        set_torch_generators(self.generators, self._of[2])
        set_host_generators(self._host)
        for buffers, before in self._buffers:
            buffers.update(before)
        for one, before in self._values:
            # A graph may have those of a batch norm that evaluates: no other version is to be seen.
            one.data.copy_(before)
        self._objects.put_back()
        return now


def _hash(told: tuple[Any, ...]) -> int:
    """One that all ranks have of the same; of texts Python's differs by process."""
    return int.from_bytes(hashlib.blake2b(repr(told).encode(), digest_size=6).digest(), "big")


def _is_power(number: int) -> bool:
    return not number & (number - 1)
