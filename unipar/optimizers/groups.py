"""The forms of ``optimizer=`` and ``lr_scheduler=``: functions, names, or several in groups."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unipar.combined import CombinedOptimizer, CombinedScheduler
from unipar.errors import ConfigError, first_few
from unipar.optimizers.factories import (
    CheckedOptimizer,
    CheckedScheduler,
    OptimizerFactory,
    SchedulerFactory,
    refuse_built,
)
from unipar.optimizers.named import NamedOptimizer, NamedScheduler, takes_metric
from unipar.utils.functions import check_function, described

Predicate = Callable[[str, nn.Parameter], bool]
Named = list[tuple[str, nn.Parameter]]

DEFAULT = "adamw"
"""The optimizer of a mapping that names none."""


def is_groups(given: Any) -> bool:
    """Return whether what was given for ``optimizer`` is several in named groups, not one."""
    if not isinstance(given, Mapping) or "name" in given or "target" in given:
        return False
    return any(isinstance(value, Mapping) for value in given.values())


def holds_functions(given: Any) -> bool:
    """Return whether a value is a function, or a mapping with one in it: nothing for a config."""
    if isinstance(given, Mapping):
        return any(map(holds_functions, given.values()))
    return callable(given)


def factories(
    optimizer: Any, lr_scheduler: Any
) -> tuple[OptimizerFactory | None, SchedulerFactory | None]:
    """Make the functions that build the optimizer and the scheduler that were asked for.

    Args:
        optimizer: a function, a name, a mapping of ``name`` and arguments, or a mapping of groups.
        lr_scheduler: a function, a name, or a mapping of ``name`` and arguments.

    Raises:
        ConfigError: a name, an argument or a group is not what it may be.
    """
    built, scheduler = _optimizer(optimizer), _scheduler(lr_scheduler)
    if not isinstance(built, GroupedOptimizer) or built.lr_scheduler is None:
        return built, scheduler
    if scheduler is not None and not isinstance(scheduler, GroupedScheduler):
        raise ConfigError(
            f"lr_scheduler was given, and so was optimizer.{built.lr_scheduler.names[0]}."
            "lr_scheduler. Give one scheduler for all groups, or one in each group that is to "
            "have one."
        )
    return built, built.lr_scheduler


def chooses_by_name(optimizer: OptimizerFactory) -> bool:
    """Return whether no function of the user's says what is trained, and by what.

    Args:
        optimizer: what builds it; checks around it are looked through.
    """
    built = inspect.unwrap(optimizer)
    if isinstance(built, GroupedOptimizer):
        own = [group for group in built.groups if not callable(group.params)]
        return own == [*built.groups] and all(chooses_by_name(group.build) for group in own)
    return isinstance(built, NamedOptimizer)


def check_choice(optimizer: OptimizerFactory, model: nn.Module) -> None:
    """Refuse groups that a model does not fall into; see :meth:`GroupedOptimizer.choose`.

    Args:
        optimizer: what builds the optimizer; of groups or not.
        model: whole, as its user knows it.
    """
    if isinstance(optimizer, GroupedOptimizer):
        optimizer.choose(model.named_parameters())


@dataclass(frozen=True)
class OptimizerGroup:
    """One of several optimizers, and the parameters that it gets.

    Attributes:
        name: what it is called, in checkpoints too.
        build: builds it over its parameters.
        params: patterns of names, of which ``*`` stands for any text, dots included; or a function
            of name and parameter that says whether it is one; ``None`` takes what others leave.
        lr_scheduler: builds its scheduler.
    """

    name: str
    build: OptimizerFactory
    params: tuple[str, ...] | Predicate | None = None
    lr_scheduler: SchedulerFactory | None = None

    def chosen(self, trained: Named) -> Named:
        """Those that it names, of all parameters that are trained."""
        if not isinstance(self.params, tuple):
            choose = self.params or (lambda name, parameter: False)
            found = [(name, p) for name, p in trained if choose(name, p)]
            if self.params is not None and not found:
                raise ConfigError(
                    f"optimizer.{self.name}.params takes none of the {len(trained)} parameters to "
                    f"train: {_names(trained)}."
                )
            return found
        for pattern in self.params:
            if not any(fnmatchcase(name, pattern) for name, _ in trained):
                raise ConfigError(
                    f"optimizer.{self.name}.params has '{pattern}', which matches none of the "
                    f"{len(trained)} parameters to train: {_names(trained)}."
                )
        return [
            (name, p) for name, p in trained if any(fnmatchcase(name, one) for one in self.params)
        ]


@dataclass(frozen=True)
class GroupedOptimizer:
    """Builds several optimizers as one; an :data:`unipar.strategy.OptimizerFactory`.

    Attributes:
        groups: in the order in which their parameter groups follow each other.

    Raises:
        ConfigError: several groups take what the others leave.
    """

    groups: tuple[OptimizerGroup, ...]

    def __post_init__(self) -> None:
        rest = [group.name for group in self.groups if group.params is None]
        if len(rest) > 1:
            raise ConfigError(
                f"the groups {', '.join(rest)} of optimizer have no params, and one group may take "
                "what the others leave. Give params to the others: a pattern of parameter names "
                "('blocks.*.weight'), a list of them, or, in Python, a function (name, parameter)."
            )

    @property
    def lr_scheduler(self) -> GroupedScheduler | None:
        """Builds the groups' schedulers, if one of them has one."""
        own = {g.name: g.lr_scheduler for g in self.groups if g.lr_scheduler is not None}
        return GroupedScheduler(tuple(own), tuple(own.values())) if own else None

    def choose(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Named]:
        """The parameters of each group, by its name.

        Raises:
            ConfigError: a parameter to train is of no group or of several, or a pattern or group
                is without any.
        """
        trained = [(name, p) for name, p in named_parameters if p.requires_grad]
        chosen = {group.name: group.chosen(trained) for group in self.groups}
        owners: dict[str, list[str]] = {name: [] for name, _ in trained}
        for group, members in chosen.items():
            for name, _ in members:
                owners[name].append(group)
        twice = [f"{name} ({' and '.join(own)})" for name, own in owners.items() if len(own) > 1]
        if twice:
            raise ConfigError(
                f"optimizer: {len(twice)} parameters are of several groups: {first_few(twice)}. "
                "Each is trained by one optimizer: make the params of these groups exclude each "
                "other."
            )
        left = [(name, p) for name, p in trained if not owners[name]]
        rest = next((group.name for group in self.groups if group.params is None), None)
        if left and rest is None:
            raise ConfigError(
                f"optimizer: {len(left)} parameters to train are of none of the groups "
                f"{', '.join(chosen)}: {_names(left)}. Leave params out of one group, which then "
                "takes the rest, or freeze them with requires_grad_(False)."
            )
        if rest is not None:
            if not left:
                raise ConfigError(
                    f"optimizer.{rest} is to take what the other groups leave, and they take all "
                    f"{len(trained)} parameters to train. Leave the group out, or narrow theirs."
                )
            chosen[rest] = left
        return chosen

    def __call__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        """Build each over its parameters.

        Raises:
            ConfigError: a group's function does not take what it is given, or as in :meth:`choose`.
        """
        chosen = self.choose(named_parameters)
        return CombinedOptimizer({g.name: _build(g, chosen[g.name]) for g in self.groups})


@dataclass(frozen=True)
class GroupedScheduler:
    """Builds the schedulers of several optimizers as one.

    Attributes:
        names: of the groups that have one.
        builds: what builds each.
    """

    names: tuple[str, ...]
    builds: tuple[SchedulerFactory, ...]

    def __call__(self, optimizer: Optimizer) -> LRScheduler:
        """Build each over its optimizer.

        Raises:
            ConfigError: one waits for a metric.
        """
        assert isinstance(optimizer, CombinedOptimizer)
        schedulers: dict[str, LRScheduler] = {}
        for name, build in zip(self.names, self.builds, strict=True):
            schedulers[name] = CheckedScheduler(build)(optimizer.optimizers[name])
            if takes_metric(schedulers[name]):
                raise _waits_for_metric(name)
        return CombinedScheduler(optimizer, schedulers)


def _build(group: OptimizerGroup, members: Named) -> Optimizer:
    shapes = [f"{name} {tuple(p.shape)}" for name, p in members]
    try:
        optimizer = CheckedOptimizer(group.build)(members)
    except ConfigError as error:
        raise ConfigError(
            f"optimizer.{group.name}: {error} Its parameters are {first_few(shapes)}."
        ) from error
    held = {id(p) for own in optimizer.param_groups for p in own["params"]}
    left = [(name, p) for name, p in members if id(p) not in held]
    if left:
        raise ConfigError(
            f"optimizer.{group.name}: the function gave its {type(optimizer).__name__} "
            f"{len(held)} of the {len(members)} parameters that it was called with, so that "
            f"nothing would train {_names(left)}. Let it take all of them, and choose by params."
        )
    return optimizer


def _optimizer(given: Any) -> Any:
    """What builds it; what is neither a name nor a mapping is for others to check."""
    if isinstance(given, str):
        return NamedOptimizer(given)
    if is_groups(given):
        return GroupedOptimizer(tuple(_group(name, values) for name, values in given.items()))
    if isinstance(given, Mapping):
        return _built_by("optimizer", dict(given), ("named_parameters",))
    return given


def _scheduler(given: Any) -> Any:
    if isinstance(given, str):
        return NamedScheduler(given)
    if isinstance(given, Mapping):
        return _built_by("lr_scheduler", dict(given), ("optimizer",))
    return given


def _group(name: Any, given: Any) -> OptimizerGroup:
    key = f"optimizer.{name}"
    if not isinstance(name, str) or not isinstance(given, Mapping):
        raise ConfigError(
            f"{key} is {given!r:.60}. Each group is a mapping: 'name' and the optimizer's "
            "arguments, 'params' and 'lr_scheduler'."
        )
    values = dict(given)
    if "name" not in values and "target" not in values:
        raise ConfigError(
            f"{key} does not say which optimizer it is. Give it a 'name', such as {{'name': "
            "'adamw', 'lr': 0.001}, or a 'target', a function of the named parameters."
        )
    params, scheduler = _params(key, values.pop("params", None)), values.pop("lr_scheduler", None)
    try:
        build, schedule = _built_by("optimizer", values, ("named_parameters",)), None
        if scheduler is not None:
            schedule = _scheduler(scheduler)
            refuse_built(None, schedule)
            check_function(schedule, "lr_scheduler", ("optimizer",))
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    if isinstance(schedule, NamedScheduler) and schedule.metric is not None:
        raise _waits_for_metric(name)
    return OptimizerGroup(name, build, params, schedule)


def _params(key: str, given: Any) -> tuple[str, ...] | Predicate | None:
    if given is None:
        return None
    if isinstance(given, str):
        return (given,)
    if isinstance(given, (list, tuple)) and given and all(isinstance(one, str) for one in given):
        return tuple(given)
    if callable(given):
        check_function(given, f"{key}.params", ("name", "parameter"))
        return cast(Predicate, given)
    raise ConfigError(
        f"{key}.params is {given!r:.60}. Give a pattern of parameter names ('blocks.*.weight'), a "
        "list of them, or, in Python, a function (name, parameter) that says whether it is one."
    )


def _built_by(kind: str, values: dict[str, Any], parameters: tuple[str, ...]) -> Any:
    """What builds one, from a mapping with its name or a function, and its arguments."""
    if "target" in values:
        if "name" in values:
            raise ConfigError(
                f"{kind} has both a 'name' ({values['name']!r:.60}) and a 'target'. Give 'name' "
                "for a class of torch, or 'target' for a function of your own."
            )
        target = values.pop("target")
        refuse_built(target, target)
        build = functools.partial(target, **values) if values and callable(target) else target
        _check_arguments(f"{kind}'s target", target, values)
        check_function(build, f"{kind}'s target", parameters)
        return build
    name = values.pop("name", DEFAULT if kind == "optimizer" else None)
    if not isinstance(name, str):
        raise ConfigError(f"{kind} has no name: {{'name': …}} and its arguments, or a function.")
    return NamedOptimizer(name, values) if kind == "optimizer" else NamedScheduler(name, values)


def _check_arguments(name: str, function: Any, given: Mapping[str, Any]) -> None:
    """Refuse arguments by name that a function does not take."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Some built-in functions have none.
        return
    try:
        signature.bind_partial(**given)
    except TypeError as error:
        raise ConfigError(
            f"{name} is {described(function)} of {signature}, and the keys beside it are its "
            f"arguments: {error}."
        ) from error


def _waits_for_metric(group: str) -> ConfigError:
    return ConfigError(
        f"optimizer.{group}.lr_scheduler is a ReduceLROnPlateau, which waits for a metric, and the "
        "schedulers of groups are stepped after each optimizer step. Give it as the lr_scheduler "
        "beside optimizer, where it is that of all groups."
    )


def _names(named: Named) -> str:
    return first_few([name for name, _ in named], 8)
