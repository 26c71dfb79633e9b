"""Refusal of optimizers that would treat parts of tensors differently from whole ones.

A rank that holds a part of a tensor updates that part alone. This is right where the update of an
element depends on that element only, and where the parts are DTensors, by whose operations ranks
communicate. Else Adafactor's means, LAMB's norms and Muon's matrices would be those of the part,
without a word. What an optimizer needs cannot be read off it, so it is tried.
"""

from __future__ import annotations

import copy
import math
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import nn, optim
from torch.optim import Optimizer

from unipar.combined import optimizers_in
from unipar.engine.divisions import Division, Part, Undivided, whole_of
from unipar.errors import ConfigError, UniparError
from unipar.strategy import EngineSpec, OptimizerFactory
from unipar.world import World

ELEMENTWISE = frozenset(
    {
        *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
        *(optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.ASGD),
    }
)
"""Optimizers of torch that update each element by itself, and are not tried. (So does Rprop, but by
operations that DTensors lack.)"""

TOLERANCE = 0.05
"""The largest difference that is rounding, relative to the largest update of a tensor."""

NUM_STEPS = 3
LEARNING_RATE = 0.01
"""Of the trial: a schedule may begin with nothing, and a small step would drown in rounding."""

_LARGEST_DIM, _LARGEST_SIZE, _ALIKE = 256, 2**20, 2


def with_divisible_optimizer(
    spec: EngineSpec, strategy: str, world: World, *divisions: Division
) -> EngineSpec:
    """The same request, with an optimizer that is refused where it cannot be divided.

    Args:
        spec: what the user asked for.
        strategy: the name of the one that divides.
        world: the joined processes.
        divisions: each way in which it divides what the optimizer updates.
    """
    if spec.optimizer is None or not divisions:
        return spec
    return replace(spec, optimizer=_CheckedOptimizer(spec.optimizer, strategy, world, divisions))


@dataclass(frozen=True)
class _CheckedOptimizer:
    """A function that builds an optimizer, and refuses one that cannot be divided."""

    build: OptimizerFactory
    strategy: str
    world: World
    divisions: Sequence[Division]

    @property
    def __wrapped__(self) -> OptimizerFactory:
        """What it is around; see :attr:`unipar.strategy.EngineSpec.named_optimizer`."""
        return self.build

    def __call__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        optimizer = self.build(named_parameters)
        check_divisible(optimizer, self.strategy, self.world, *self.divisions)
        return optimizer


def check_divisible(
    optimizer: Optimizer, strategy: str, world: World, *divisions: Division
) -> None:
    """Refuse an optimizer that updates parts of tensors otherwise than the whole. Collective.

    A copy of it takes a few steps on small tensors, whole and divided, and the two are compared.
    The optimizer itself is left as it is. A dimension beyond 256 is cut off, so what an optimizer
    does to larger tensors only is not seen; neither is what it begins in later steps. Of several
    optimizers each is tried by itself, on what it updates.

    Args:
        optimizer: as the user's function has built it.
        strategy: the name of the one that divides, for the message.
        world: the joined processes.
        divisions: each way in which it divides what the optimizer updates.

    Raises:
        ConfigError: on every rank, if it differs on one, or cannot be tried.
    """
    for name, one in optimizers_in(optimizer).items():
        # torch 2.13, optim/optimizer.py.
        hooks = one._optimizer_step_pre_hooks or one._optimizer_step_post_hooks
        # Frameworks that begin Adagrad's sums again look for an Adagrad, and see several.
        begun = one is not optimizer and any(
            p in one.state for group in one.param_groups for p in group["params"]
        )
        if type(one) in ELEMENTWISE and not hooks and not begun:
            continue
        if has_modes(one) and any(division.elsewhere for division in divisions):
            raise ConfigError(_refusal_of_modes(one, name, strategy, world))
        for division in divisions:
            problem = next(filter(None, world.gather(_problem(one, division))), None)
            if problem:
                raise ConfigError(_refusal(one, name, strategy, problem, world))


def has_modes(optimizer: Any) -> bool:
    """Whether it steps by other weights than an evaluation is of, as schedule-free ones do."""
    return all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))


def _refusal_of_modes(optimizer: Optimizer, name: str, strategy: str, world: World) -> str:
    group = f" of group '{name}'" if name else ""
    return (
        f"{strategy}: the optimizer {type(optimizer).__qualname__}{group} has train() and eval(), "
        "which put other weights into the model, and what it updates here lies elsewhere: the "
        "model would not get them. Use strategy='fsdp', or one that keeps tensors whole "
        f"({_whole(world)})."
    )


def _whole(world: World) -> str:
    # It is a floor above, and only messages need it.
    from unipar.strategy.registry import keeping_tensors_whole

    return ", ".join(keeping_tensors_whole(world.placement)) or "none is installed"


def _refusal(optimizer: Optimizer, name: str, strategy: str, problem: str, world: World) -> str:
    others = sorted(kind.__name__ for kind in ELEMENTWISE - {type(optimizer)})
    group = f" of group '{name}'" if name else ""
    return (
        f"{strategy}: the optimizer {type(optimizer).__qualname__}{group} cannot be used where "
        f"ranks divide what it updates: in a trial on small tensors {problem}. Use a strategy that "
        f"keeps tensors whole ({_whole(world)}), or an optimizer whose update of an element "
        f"depends on that element alone, like {', '.join(others)}."
    )


# -- the trial -----------------------------------------------------------------------------------

Seen = dict[str, torch.Tensor]
"""What a trial has come to, by what it is: tensors, and numbers as tensors of one for each rank."""


class _Sample(NamedTuple):
    """A parameter that is tried, and the shape and place of what stands for it."""

    number: int
    parameter: torch.Tensor
    shape: tuple[int, ...]
    device: torch.device


class _Indivisible(Exception):
    """An optimizer keeps what cannot be divided."""


def _problem(optimizer: Optimizer, division: Division) -> str:
    """Compare the divided trial with the whole one; empty if nothing."""
    samples = list(_samples(optimizer, division))
    whole = _try(optimizer, Undivided(), samples)
    if isinstance(whole, str):
        return f"it could not be tried at all, since {whole}"
    parts = _try(optimizer, division, samples)
    return parts if isinstance(parts, str) else _difference(whole, parts)


def _samples(optimizer: Optimizer, division: Division) -> Iterator[_Sample]:
    """Of each group and shape a few parameters, since all would take long."""
    number = 0
    for group in optimizer.param_groups:
        alike: dict[tuple[int, ...], int] = defaultdict(int)
        for parameter in group["params"]:
            shape = _small(tuple(parameter.shape))
            if parameter.requires_grad and math.prod(shape) and alike[shape] < _ALIKE:
                alike[shape] += 1
                device = division.device or parameter.device
                yield _Sample(number, parameter, shape, device)
                number += 1


def _small(shape: tuple[int, ...]) -> tuple[int, ...]:
    sizes = [min(size, _LARGEST_DIM) for size in shape]
    while math.prod(sizes) > _LARGEST_SIZE:
        largest = sizes.index(max(sizes))
        sizes[largest] = -(-sizes[largest] // 2)
    return tuple(sizes)


def _try(optimizer: Optimizer, division: Division, samples: list[_Sample]) -> Seen | str:
    """Run a trial; what it has come to, or how it failed."""
    devices = {sample.device.index for sample in samples if sample.device.type == "cuda"}
    if torch.cuda.is_initialized():
        # Seeding is of this one, too, where all samples are on the host.
        devices.add(torch.cuda.current_device())
    with torch.random.fork_rng(sorted(devices)):
        torch.manual_seed(0)
        try:
            return _steps(optimizer, division, samples)
        except _Indivisible as error:
            return str(error)
        except UniparError as error:
            # What follows the first sentence are remedies for a model.
            return str(error).partition(". ")[0]
        except Exception as error:
            # The user's own code may raise anything.
            said = textwrap.shorten(str(error), 160, placeholder=" …")
            return f"it raised {type(error).__name__}" + (f" ({said})" if said else "")


def _steps(optimizer: Optimizer, division: Division, samples: list[_Sample]) -> Seen:
    # Small ones, so that weight decay does not hide the rest of an update.
    weights = [_values(sample, 0) / 20 for sample in samples]
    split = [
        division.split(s.number, s.parameter, w) for s, w in zip(samples, weights, strict=True)
    ]
    ranks: list[Optimizer] = []
    try:
        for rank in range(division.num_shares):
            ranks.append(_of_rank(optimizer, division, samples, split, rank))
            if has_modes(ranks[rank]):
                # It may refuse to step in the mode in which it is built.
                cast("Any", ranks[rank]).train()
        for step in range(1, NUM_STEPS + 1):
            for sample, parts in zip(samples, split, strict=True):
                gradient = _values(sample, step)
                gradients = division.split(sample.number, sample.parameter, gradient)
                for part, own in zip(parts, gradients, strict=True):
                    if part is not None:
                        part.grad = own
            for one in ranks:
                one.step()
        return _seen(division, weights, split, ranks)
    finally:
        for one in ranks:
            # When it is deleted, its class may let go of what the user's own still needs.
            one.__class__ = Optimizer


def _values(sample: _Sample, step: int) -> torch.Tensor:
    """Numbers whose size depends on where in the tensor they are, and otherwise in each step."""
    generator = torch.Generator().manual_seed(1000 * step + sample.number)
    # Not on what a user's script has made torch's default device.
    values = torch.randn(sample.shape, generator=generator, device="cpu")
    for dim, size in enumerate(sample.shape):
        slope = torch.linspace(-1.5, 1.5, size, device="cpu").exp()
        others = (1,) * (len(sample.shape) - dim - 1)
        values *= (slope if step % 2 else slope.flip(0)).view(-1, *others)
    values *= 4.0 ** ((sample.number % 3 - 1) * (1 if step % 2 else -1))
    return values.to(sample.device, sample.parameter.dtype)


def _of_rank(
    optimizer: Optimizer,
    division: Division,
    samples: list[_Sample],
    split: list[list[Part]],
    rank: int,
) -> Optimizer:
    """The optimizer of one rank."""
    held: dict[int, torch.Tensor] = {}
    state: defaultdict[Any, Any] = defaultdict(dict)
    for sample, parts in zip(samples, split, strict=True):
        part, made = parts[rank], optimizer.state.get(sample.parameter)
        if part is None:
            continue
        held[id(sample.parameter)] = part.requires_grad_()
        if made and division.comes_first:
            state[part] = {
                key: _part_of_state(value, division, sample, rank) for key, value in made.items()
            }
    groups = [_group(group, held) for group in optimizer.param_groups]
    return division.build(optimizer, groups) or _copied(optimizer, groups, held, state, division)


def _group(group: dict[str, Any], held: dict[int, torch.Tensor]) -> dict[str, Any]:
    chosen = [index for index, p in enumerate(group["params"]) if id(p) in held]
    own = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
    own["params"] = [held[id(group["params"][index])] for index in chosen]
    if "param_names" in own:
        own["param_names"] = [own["param_names"][index] for index in chosen]
    if torch.is_tensor(own.get("lr")):
        own["lr"].fill_(LEARNING_RATE)
    elif own.get("lr") is not None:
        own["lr"] = LEARNING_RATE
    return own


def _part_of_state(value: Any, division: Division, sample: _Sample, rank: int) -> Any:
    """What was made for a parameter when the optimizer was built, for a part of what is tried."""
    if not torch.is_tensor(value) or not value.ndim or value.shape != sample.parameter.shape:
        return copy.deepcopy(value)
    small = whole_of(value)[tuple(slice(size) for size in sample.shape)]
    return division.split(sample.number, sample.parameter, small.clone())[rank]


def _copied(
    optimizer: Optimizer,
    groups: list[dict[str, Any]],
    held: dict[int, torch.Tensor],
    state: defaultdict[Any, Any],
    division: Division,
) -> Optimizer:
    """An optimizer that differs in its tensors only.

    It is copied, not built once more: its constructor may have taken more than hyperparameters, and
    the user's function may do more than to build it. What it keeps of parameters beside its groups
    is that of the parts only if these were there first.
    """
    made: Optimizer = object.__new__(type(optimizer))
    memo: dict[int, Any] = {
        id(p): torch.zeros(0) for group in optimizer.param_groups for p in group["params"]
    }
    if division.comes_first:
        memo |= held
    memo |= {id(optimizer): made, id(optimizer.state): state, id(optimizer.param_groups): groups}
    for real, own in zip(optimizer.param_groups, groups, strict=True):
        memo |= {id(real): own, id(real["params"]): own["params"]}
    for name, value in vars(optimizer).items():
        if name == "step":
            # A scheduler has put it there, and it steps the real one (torch 2.13,
            # optim/lr_scheduler.py, LRScheduler._patch_track_step_called).
            continue
        try:
            made.__dict__[name] = copy.deepcopy(value, memo)
        except Exception:
            # A process group, a lock, a generator or a sharded model cannot be, and need not be.
            made.__dict__[name] = value
    return made


# -- what is compared ----------------------------------------------------------------------------


def _seen(
    division: Division,
    weights: list[torch.Tensor],
    split: list[list[Part]],
    ranks: list[Optimizer],
) -> Seen:
    seen: Seen = {}
    for index, (weight, parts) in enumerate(zip(weights, split, strict=True)):
        held = [part for part in parts if part is not None]
        states = [
            one.state.get(part, {})
            for one, part in zip(ranks, parts, strict=True)
            if part is not None
        ]
        with torch.no_grad():
            seen[f"the update of tensor {index}"] = division.join(held, weight) - weight
        for key in states[0]:
            values = [state.get(key) for state in states]
            what = f"state '{key}' of tensor {index}"
            if all(map(_is_shaped_alike, values, held)):
                seen[what] = division.join(values, weight)
            elif all(map(_is_number, values)):
                seen[what] = _numbers(values)
            elif len(values) == 1 and torch.is_tensor(values[0]):
                seen[what] = whole_of(values[0])
            elif len(values) > 1 and values[0] is not None:
                raise _Indivisible(f"it kept state '{key}', which is not shaped like the tensor")
    for number in range(len(ranks[0].param_groups)):
        groups = [one.param_groups[number] for one in ranks if one.param_groups[number]["params"]]
        for key, value in groups[0].items() if groups else ():
            if _is_number(value):
                seen[f"hyperparameter '{key}' of group {number}"] = _numbers(g[key] for g in groups)
    return seen


def _is_shaped_alike(value: Any, part: torch.Tensor) -> bool:
    return torch.is_tensor(value) and value.shape == part.shape


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (torch.is_tensor(value) and value.numel() == 1)


def _numbers(values: Iterable[Any]) -> torch.Tensor:
    return torch.tensor([float(whole_of(value)) for value in values])


def _difference(whole: Seen, parts: Seen) -> str:
    for what, expected in whole.items():
        found = parts.get(what)
        if found is None:
            return f"{what} was there only for the whole"
        if found.shape != expected.shape and expected.numel() != 1:
            return f"{what} had the shape {tuple(found.shape)}, not {tuple(expected.shape)}"
        scale = expected.abs().max()
        off = (found - expected).abs().max() / scale if scale else found.abs().max()
        if not off <= TOLERANCE:
            return f"{what} was {float(off):.0%} off from that of the whole"
    return ""
