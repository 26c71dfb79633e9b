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
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from unipar.compat.adopted import AdoptedModel
from unipar.compat.batch_norms import normalize_over
from unipar.compat.inner_losses import UNSURE, share_of, why_unsure
from unipar.compat.shares import Shares, mean_over, part_of, whole_of
from unipar.data.move import with_items
from unipar.engine import StepEngine
from unipar.engine.outputs import tensors_of
from unipar.engine.replicas import unlike
from unipar.engine.trials import digest, torch_generators, trial
from unipar.errors import ConfigError, first_few
from unipar.world import World

log = logging.getLogger("unipar")

_ALIKE, _LOSS = -1, -2
"""Outputs that are the same of a part as of the whole, and numbers that are made of samples."""
_MOST_TRIALS, _SOON = 12, 8
_OFTEN, _SELDOM = 16, 16
"""So many of the first passes are compared among ranks, and one of so many later on."""
_ROUNDING, _ROUNDING_HALF = 2e-4, 5e-2
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
    """

    inputs: tuple[int | None, ...]
    outputs: tuple[_Output, ...]


class _Trial(NamedTuple):
    """What a model has computed without leaving a trace, or why that cannot be told."""

    outputs: list[torch.Tensor]
    buffers: dict[str, torch.Tensor]
    why: str = ""
    rest: Any = None
    drew: bool = False

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

    Attributes:
        shares: of no batch.
    """

    def __init__(self, model: AdoptedModel, tell: Callable[..., None]) -> None:
        self._model, self._tell = model, tell
        self._rounding = _ROUNDING_HALF if model.in_half else _ROUNDING
        world = model.world
        self._group = world.mesh("batch").get_group()
        self.shares = Shares.of(0, world.data_rank, world.data_size, self._group)
        self._plans: dict[Any, _Plan | None] = {}
        self._looked_into = False
        self._untold = 0
        self._calls: dict[Any, int] = {}
        self._shapes: dict[Any, list[torch.Size]] = {}
        # What the script has put into the model before the strategy has.
        self._hooked = _described(_hooks_in(model.module))
        self._hooks, self._handles = _hooks_in(model.module), RemovableHandle.next_id

    def look_at(self, args: Any, kwargs: Any) -> None:
        """Try how the model computes in parts, before a strategy has it. Collective.

        An error in the middle of it would leave what divides weights half way.
        """
        given = _leaves((args, kwargs))
        if self._has_samples(given) and not self._hooked:
            self._decide(self._kind(given), args, kwargs, given)

    def begin(self) -> None:
        """Leave aside what the strategy itself has put into the model."""
        self._hooks, self._handles = _hooks_in(self._model.module), RemovableHandle.next_id

    def compute(self, args: Any, kwargs: Any) -> Any:
        """A forward pass that may be trained on. Collective.

        Raises:
            ConfigError: ranks are given other batches; or what the model does with parts of them
                is no longer what it did.
        """
        given = _leaves((args, kwargs))
        trains = torch.is_grad_enabled() and self._model.learns
        if not trains or not self._has_samples(given):
            return self._whole(args, kwargs)
        kind = self._kind(given)
        calls = self._calls[kind] = self._calls.get(kind, 0) + 1
        if is_looked_at(calls):
            check_alike({f"input {at}": one for at, one in enumerate(given)}, self._world)
        why = self._hooked or self._new_hooks()
        if why:
            self._plans[kind] = None
            self._tell_whole(why)
        elif kind not in self._plans:
            if self._model.divided:
                self._plans[kind] = None
                self._tell_whole("it was called otherwise at first, when its weights were whole")
            else:
                self._decide(kind, args, kwargs, given)
        plan = self._plans.get(kind)
        shares = None if plan is None else self._shares(plan, given)
        if plan is None or shares is None:
            return self._whole(args, kwargs)
        if calls > 1 and not calls & (calls - 1):
            self._try_again(plan, args, kwargs, given)
        return self._in_parts(plan, shares, args, kwargs, given)

    def _kind(self, given: Sequence[Any]) -> Any:
        return (*map(_kind, given), self._model.module.training)

    def _decide(self, kind: Any, args: Any, kwargs: Any, given: Sequence[Any]) -> None:
        plan, why = self._find(args, kwargs, given)
        if plan is not None or why:
            self._plans[kind] = plan
        if why:
            self._tell_whole(why)

    @property
    def _world(self) -> World:
        return self._model.world

    def _has_samples(self, given: Sequence[Any]) -> bool:
        first = next((shape for one in given if (shape := _shape(one))), ())
        return max(first[:2], default=0) >= self._world.data_size

    def _whole(self, args: Any, kwargs: Any) -> Any:
        normalize_over(None, self._model.module)
        return self._model.forward(*args, **kwargs)

    def _tell_whole(self, why: str) -> None:
        self._tell(
            "each of %d ranks computes all of every batch by %s: %s. Results are those of one "
            "process, and no faster.",
            self._world.data_size, type(self._model.module).__name__, why,
        )  # fmt: skip

    # -- a pass in parts -------------------------------------------------------------------------

    def _shares(self, plan: _Plan, given: Sequence[Any]) -> Shares | None:
        """How this batch is cut up; ``None`` where it has fewer samples than there are ranks."""
        lengths = {_shape(one)[dim] for one, dim in zip(given, plan.inputs, strict=True)
                   if dim is not None}  # fmt: skip
        if len(lengths) != 1 or min(lengths) < self._world.data_size:
            return None
        return Shares.of(lengths.pop(), self._world.data_rank, self._world.data_size, self._group)

    def _in_parts(
        self, plan: _Plan, shares: Shares, args: Any, kwargs: Any, given: Sequence[Any]
    ) -> Any:
        part = _cut((args, kwargs), plan, shares)
        normalize_over(self._group, self._model.module)
        with _drawing_apart(self._world) as draws:
            output = self._model.forward(*part[0], **part[1])
        if draws:
            self._tell(
                "%s draws random numbers, as for dropout: each rank draws others, for its part of "
                "a batch, so results are those of one process only as another seed's are.",
                type(self._model.module).__name__,
            )
        found = _held(output)
        self._check_shapes(plan, shares, found, tuple(map(_shape, given)))
        makers = iter(plan.outputs)

        def whole(one: torch.Tensor) -> torch.Tensor:
            kind = next(makers)
            if kind.dim == _ALIKE:
                return one
            if kind.dim == _LOSS:
                factor = self._factor(one, shares)
                return mean_over(one * factor, shares)
            return whole_of(one, kind.dim, shares.times(kind.each))

        return _changed(output, whole)

    def _factor(self, loss: torch.Tensor, shares: Shares) -> torch.Tensor | float:
        found = share_of(loss, shares)
        if isinstance(found, str):
            raise ConfigError(
                f"{type(self._model.module).__name__} gives a loss that {found}, and did not when "
                "it was tried: what it would be of the whole batch cannot be told. Compute the "
                "loss outside of the model, of what it gives."
            )
        return found

    def _check_shapes(
        self, plan: _Plan, shares: Shares, found: list[torch.Tensor] | None, key: Any
    ) -> None:
        """Refuse outputs that other ranks' do not fit; they would wait for what never comes."""
        shapes = None if found is None else [one.shape for one in found]
        fits = shapes is not None and len(shapes) == len(plan.outputs) and all(
            kind.dim < 0 or shape[kind.dim] == shares.own * kind.each
            for shape, kind in zip(shapes, plan.outputs, strict=True)
        )  # fmt: skip
        if key not in self._shapes:
            others = self._world.gather((fits, [
                (*shape[: kind.dim], *shape[kind.dim + 1 :]) if kind.dim >= 0 else tuple(shape)
                for shape, kind in zip(shapes or (), plan.outputs, strict=False)
            ]))  # fmt: skip
            fits = all(one == others[0] and one[0] for one in others)
        else:
            fits = fits and shapes == self._shapes[key]
        if not fits:
            raise ConfigError(
                f"{type(self._model.module).__name__} gives parts of a batch that do not fit "
                "together: the shapes of what it gives depend on the values of what it is given, "
                "as where it cuts sequences at the longest of a batch. Cut them before the model "
                "is called, or run on one process."
            )
        if shapes is not None:
            self._shapes[key] = shapes

    # -- trials ----------------------------------------------------------------------------------

    def _find(self, args: Any, kwargs: Any, given: Sequence[Any]) -> tuple[_Plan | None, str]:
        """How inputs can be cut up so that parts make the whole; or why they cannot. Collective.

        Neither, where that cannot be told yet: the model gives the same for all samples, as one
        whose last layer is zero at first.
        """
        normalize_over(None, self._model.module)
        whole = self._run(args, kwargs)
        why = self._agreed(whole.why)
        self._looked_into = not why
        if why:
            return None, why
        if not whole.tells:
            return None, self._for_now("it gives the same for every sample")
        for inputs in itertools.islice(self._ways(given), _MOST_TRIALS):
            plan, reason = self._tried(whole, inputs, args, kwargs, given)
            if plan is not None:
                return plan, ""
            why = why or reason
        return None, self._for_now(why) if why.endswith(UNSURE) else why

    def _for_now(self, why: str) -> str:
        """A reason that may be gone with the next batch; none, unless that cannot be tried."""
        self._untold += 1
        return why if self._untold > _SOON or self._model.divided else ""

    def _ways(self, given: Sequence[Any]) -> Iterator[tuple[int | None, ...]]:
        """Dimensions of the inputs that samples may lie along: of all, those of the same size."""
        shapes = list(map(_shape, given))
        first = next(at for at, shape in enumerate(shapes) if shape)
        for along, length in enumerate(shapes[first][:2]):
            if length < self._world.data_size:
                continue
            choices = [
                [along] if at == first
                else [*(dim for dim, size in enumerate(shape) if size == length), None]
                for at, shape in enumerate(shapes)
            ]  # fmt: skip
            yield from itertools.product(*choices)

    def _tried(
        self, whole: _Trial, inputs: tuple[int | None, ...], args: Any, kwargs: Any,
        given: Sequence[Any], *, first: bool = True,
    ) -> tuple[_Plan | None, str]:  # fmt: skip
        """Whether parts that are cut up so make the whole, as all ranks find. Collective."""
        plan = _Plan(inputs, ())
        shares = self._shares(plan, given)
        assert shares is not None
        normalize_over(self._group, self._model.module)
        part = self._run(*_cut((args, kwargs), plan, shares))
        outputs, why = _compared(whole, part, shares, self._rounding)
        if why and part.drew:
            why = "it draws random numbers otherwise than for dropout"
        found = self._world.gather((outputs, part.why or why))
        for others, reason in found:
            if reason or others != outputs:
                return None, reason or "parts of a batch do not make the whole"
        plan = plan._replace(outputs=tuple(outputs))
        # A graph without a backward pass is nothing for what divides weights.
        whole_weights = self._model.training_by is None or not self._model.divided
        if whole_weights and any(kind.dim == _LOSS for kind in outputs):
            why = self._agreed(self._tried_losses(whole, plan, shares, args, kwargs, first))
        return (None, why) if why else (plan, "")

    def _tried_losses(
        self, whole: _Trial, plan: _Plan, shares: Shares, args: Any, kwargs: Any, first: bool
    ) -> str:
        """Why losses that the model computes cannot be put together, if they cannot. Collective."""
        part = self._run(*_cut((args, kwargs), plan, shares), graph=True)
        why = self._agreed(part.why)
        if why:
            return why
        for kind, one, expected in zip(plan.outputs, part.outputs, whole.outputs, strict=True):
            if kind.dim != _LOSS:
                continue
            why = why_unsure(one, shares)
            # What an earlier batch has told, this one need not.
            factor = why if why and (first or why != UNSURE) else share_of(one, shares)
            if isinstance(factor, str):
                return f"it gives a loss that {factor}"
            if not _close(mean_over(one.detach() * factor, shares), expected, self._rounding):
                return "it gives a loss that is not the mean or the sum of those of parts"
        return ""

    def _try_again(self, plan: _Plan, args: Any, kwargs: Any, given: Sequence[Any]) -> None:
        normalize_over(None, self._model.module)
        whole = self._run(args, kwargs)
        again, why = self._tried(whole, plan.inputs, args, kwargs, given, first=False)
        if again != plan:
            raise ConfigError(
                f"{type(self._model.module).__name__} computed each sample of a batch by itself, "
                f"and does not any longer: {why or 'its outputs are others'}. Steps since it was "
                "last looked at may not be those of one process. Run on one process."
            )

    def _run(self, args: Any, kwargs: Any, *, graph: bool = False) -> _Trial:
        """Let the model compute without a trace, for nobody to learn from."""
        module, training = self._model.module, self._model.training_by
        # Not by a call of the engine, to which one that fails would be a step that has failed.
        called, surrounding = module, contextlib.nullcontext
        if training is not None and isinstance(training.engine, StepEngine):
            called = module if graph else training.engine.eval_model
            surrounding = training.engine.precision.forward
        # What it writes into what it is given, the script would find.
        args, kwargs = _changed((args, kwargs), lambda one: one.detach().clone())
        copies = _held((args, kwargs)) or []
        versions = [one._version for one in copies]
        began = digest([one.numpy() for one in torch_generators(self._world.device)])
        with (
            warnings.catch_warnings(),
            torch.set_grad_enabled(graph),
            trial(module, self._world.device) as draws,
            _own_weights(module, first=not self._looked_into) as written,
            _EvenDraws(),
            surrounding(),
        ):
            warnings.simplefilter("ignore")
            before = _attributes(module)
            try:
                output = called(*args, **kwargs)
            except (RuntimeError, ValueError, IndexError, AssertionError) as error:
                return _Trial([], {}, f"it fails with a part of a batch ({error})"[:300])
            found = _held(output)
            after = _attributes(module)
            buffers = dict(module.named_buffers())
        why = ""
        kept = [name for name, held in after.items() if held and before.get(name) != held]
        if written:
            why = f"it changes its weights as it computes ({first_few(written)})"
        elif kept:
            why = f"it keeps what it computes of a batch in attributes ({first_few(kept)})"
        elif draws.on_host:
            why = "it draws random numbers by random or NumPy"
        elif [one._version for one in copies] != versions:
            why = "it changes what it is given in place"
        elif found is None:
            why = f"it gives a {type(output).__name__}, in which tensors are not found"
        drew = draws.torch != began
        return _Trial(found or [], buffers, why, _changed(output, lambda one: None), drew)

    def _agreed(self, why: str) -> str:
        """The first reason that a rank has. Collective."""
        return next(filter(None, self._world.gather(why)), "")

    # -- hooks -----------------------------------------------------------------------------------

    def _new_hooks(self) -> str:
        """What hooks the script has put into the model since the strategy took it."""
        if RemovableHandle.next_id == self._handles:
            return ""
        self._handles = RemovableHandle.next_id
        return _described(_hooks_in(self._model.module) - self._hooks)


def _described(hooks: set[Any]) -> str:
    """Why hooks keep a model from computing parts."""
    return "hooks in it are to see whole batches" if hooks else ""


def _hooks_in(module: nn.Module) -> set[Any]:
    found: set[Any] = set()
    for one in module.modules():
        for kind in ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks"):
            found |= {(kind, number) for number in getattr(one, kind)}
    for one in module.parameters():
        found |= {("parameter", number) for number in one._backward_hooks or ()}
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
        other = other or unlike(((name, one.detach()) for name, one in tensors.items()), world)
    if other:
        raise ConfigError(
            f"ranks do not have the same batch ({first_few(other)} of what the model is given). "
            "Each runs this script as one process would, so what it draws or reads must be the "
            "same on all of them. Seed what it draws by, before anything is drawn: random.seed(0), "
            "numpy.random.seed(0), torch.manual_seed(0), and generators of its own; and let data "
            "depend on neither the time nor the order of a set or of a directory."
        )


@contextlib.contextmanager
def _drawing_apart(world: World) -> Iterator[list[bool]]:
    """Other random numbers on each rank within, and the same on all after it.

    Yields:
        Something once it has ended, if any were drawn.
    """
    before, drawn = torch_generators(world.device), list[bool]()
    seed = int(digest([one.numpy() for one in before])[:12], 16)
    if world.data_rank:
        # The first keeps the stream of the script.
        torch.manual_seed(seed + world.data_rank)
    began = torch_generators(world.device)
    yield drawn
    now = torch_generators(world.device)
    if any(not torch.equal(one, other) for one, other in zip(now, began, strict=True)):
        drawn.append(True)
        torch.manual_seed(seed)
    elif world.data_rank:
        torch.set_rng_state(before[0])
        if len(before) > 1:
            torch.cuda.set_rng_state(before[1], world.device)


class _EvenDraws(TorchFunctionMode):
    """Lets everything pass where layers of a script's own leave something out, as DropPath."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.fill_(1) if func is torch.Tensor.bernoulli_ else found


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else (len(leaf),)


def _kind(leaf: Any) -> Any:
    return (leaf.dim(), leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf)


def _leaves(data: Any) -> list[Any]:
    """The tensors in containers, and the lists of numbers and texts, which may be of samples."""
    found: list[Any] = []

    def note(one: Any) -> Any:
        found.append(one)
        return one

    _changed(data, note, rows=True)
    return found


def _in_containers(data: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(one: torch.Tensor) -> torch.Tensor:
        found.append(one)
        return one

    _changed(data, note)
    return found


def _held(data: Any) -> list[torch.Tensor] | None:
    """The tensors in containers, in order; ``None`` if there are others in what is none."""
    found = _in_containers(data)
    return found if {id(one) for one in tensors_of(data)} == {id(one) for one in found} else None


def _changed(data: Any, change: Callable[[Any], Any], *, rows: bool = False) -> Any:
    row = rows and type(data) in (list, tuple) and bool(data) and all(map(_is_plain, data))
    if isinstance(data, torch.Tensor) or row:
        return change(data)
    return with_items(data, lambda one: _changed(one, change, rows=rows))


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str))


def _cut(data: Any, plan: _Plan, shares: Shares) -> Any:
    along = iter(plan.inputs)

    def cut(one: Any) -> Any:
        dim = next(along)
        if dim is None:
            return one
        if isinstance(one, torch.Tensor):
            return part_of(one, dim, shares)
        return one[shares.begin : shares.begin + shares.own]

    return _changed(data, cut, rows=True)


def _compared(
    whole: _Trial, part: _Trial, shares: Shares, rounding: float
) -> tuple[list[_Output], str]:
    """How outputs of a part are found in those of the whole; or why they are not."""
    apart = (
        "it sets the samples of a batch in relation to each other, or they do not lie along the "
        "first or second dimension of its first input"
    )
    if len(whole.outputs) != len(part.outputs) or not _same(whole.rest, part.rest):
        return [], apart
    outputs = []
    for one, own in zip(whole.outputs, part.outputs, strict=True):
        found = _output(one, own, shares, rounding)
        if found is None:
            return [], apart
        outputs.append(found)
    for name, buffer in whole.buffers.items():
        if not _close(part.buffers[name], buffer, rounding):
            return [], f"it keeps what it computes of a batch in buffers ({name})"
    return outputs, ""


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (ValueError, RuntimeError, TypeError):
        return False


def _output(
    whole: torch.Tensor, part: torch.Tensor, shares: Shares, rounding: float
) -> _Output | None:
    if whole.dim() != part.dim() or whole.dtype != part.dtype:
        return None
    unlike = [dim for dim, (a, b) in enumerate(zip(whole.shape, part.shape, strict=True)) if a != b]
    if not unlike:
        if whole.dim() == 0 and whole.is_floating_point():
            return _Output(_LOSS)
        return _Output(_ALIKE) if _close(part, whole, rounding) else None
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
    one, other = one.detach().double(), other.detach().double()
    both = torch.isfinite(one) & torch.isfinite(other)
    if not torch.equal(one[~both].nan_to_num(), other[~both].nan_to_num()):
        return False
    if not both.any():
        return True
    scale = other[both].abs().max().item()
    return (one - other)[both].abs().max().item() <= rounding * scale


def _attributes(module: nn.Module) -> dict[str, list[int]]:
    """The tensors that attributes of modules hold, beside parameters and buffers."""
    own = set(vars(nn.Module()))
    return {
        f"{name}.{key}".lstrip("."): [id(one) for one in _in_containers(value)]
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if key not in own
    }
