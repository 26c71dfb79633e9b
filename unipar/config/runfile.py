"""A run file: the fields of a run, and import paths for what only code can say."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    RootModel,
    StringConstraints,
    Tag,
    field_validator,
)

from unipar.config import RunFields
from unipar.config.import_paths import PATTERN, load
from unipar.config.optimizers import (
    BY_NAME,
    BY_PATH,
    BY_TARGET,
    GROUPED,
    OPTIMIZER_NAME,
    OptimizerConfig,
    Params,
    SchedulerConfig,
    form,
    form_of_one,
)
from unipar.errors import ConfigError
from unipar.utils.documents import KeyPath
from unipar.utils.validation import dotted

ImportPath = Annotated[
    str, StringConstraints(pattern=PATTERN), Field(examples=["package.module:name"])
]


class Target(BaseModel, frozen=True, extra="allow"):
    """An import path, with keyword arguments beside it."""

    target: ImportPath = Field(description="What to import: package.module:name")

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments that were written beside ``target``."""
        return dict(self.model_extra or {})


_ByPath = Annotated[ImportPath, Tag(BY_PATH)]
_ByTarget = Annotated[Target, Tag(BY_TARGET)]
_Scheduler = Annotated[
    _ByPath | Annotated[SchedulerConfig, Tag(BY_NAME)] | _ByTarget, Discriminator(form_of_one)
]


def _name_only(given: Any) -> Any:
    return {"name": given} if isinstance(given, str) and ":" not in given else given


class NamedGroup(OptimizerConfig, frozen=True, extra="allow"):
    """One of several optimizers, of torch.optim; the keys beside those below are its arguments."""

    name: str = OPTIMIZER_NAME
    params: Params = None
    lr_scheduler: Annotated[_Scheduler | None, BeforeValidator(_name_only)] = Field(
        None, description="The scheduler of these parameters."
    )


class TargetGroup(Target, frozen=True, extra="allow"):
    """One of several optimizers, that a function builds; other keys are arguments of it."""

    params: Params = None
    lr_scheduler: Annotated[_Scheduler | None, BeforeValidator(_name_only)] = Field(
        None, description="The scheduler of these parameters."
    )


class Groups(
    RootModel[
        dict[
            str,
            Annotated[
                Annotated[NamedGroup, Tag(BY_NAME)] | Annotated[TargetGroup, Tag(BY_TARGET)],
                Discriminator(form_of_one),
            ],
        ]
    ],
    frozen=True,
):
    """Several optimizers by name, each for other parameters."""


class RunFile(RunFields, frozen=True):
    """The contents of a YAML or TOML run file."""

    model: ImportPath | Target
    """A module, or a function that builds one: package.module:name, or a mapping with target."""
    data: ImportPath | Target
    """The training data, or a function that gives it."""
    eval_data: ImportPath | Target | None = None
    """The evaluation data, or a function that gives it."""
    loss: ImportPath | Target | None = None
    """loss(model, batch), or an Objective; left out: the model's output has a loss."""
    predict: ImportPath | Target | None = None
    """predict(model, batch), or an Objective: what metrics see of a batch."""
    metrics: dict[str, ImportPath | Target] = {}  # noqa: RUF012
    """Evaluation metrics by name: functions, or torchmetrics classes."""
    callbacks: tuple[ImportPath | Target, ...] = ()
    """Callback classes, or functions that give callbacks."""
    optimizer: Annotated[
        _ByPath
        | Annotated[OptimizerConfig, Tag(BY_NAME)]
        | _ByTarget
        | Annotated[Groups, Tag(GROUPED)],
        Discriminator(form),
    ] = OptimizerConfig(name="adamw")
    """An optimizer of torch.optim by its lower-cased name, with its arguments; a function of
    the named parameters by import path; or several of these by names, each with its params."""
    lr_scheduler: _Scheduler | None = None
    """A scheduler of torch.optim.lr_scheduler by its lower-cased name, with its arguments; or a
    function of the optimizer by import path."""

    @field_validator("optimizer", "lr_scheduler", mode="before")
    @classmethod
    def _name_only(cls, given: Any) -> Any:
        return _name_only(given)

    def arguments(self, where: Callable[[KeyPath], str] = lambda key: "") -> dict[str, Any]:
        """Import everything and give the arguments of :func:`unipar.fit`.

        Functions that give data are called; ``model`` and the factories are not.

        Args:
            where: tells where a key was set, such as a file and line, or an empty string.

        Raises:
            ConfigError: something cannot be imported or called; with its place and key.
        """

        def imported(key: str, use: Callable[[Any, dict[str, Any]], Any]) -> Any:
            return _import(getattr(self, key), use, (key,), where)

        arguments: dict[str, Any] = {
            "model": imported("model", _bind),
            "data": imported("data", _call),
            "eval_data": imported("eval_data", _call),
            "loss": imported("loss", _bind_or_make),
            "predict": imported("predict", _bind_or_make),
            "metrics": {
                name: _import(path, _bind_or_make, ("metrics", name), where)
                for name, path in self.metrics.items()
            },
            "callbacks": [
                _import(path, _call, ("callbacks", index), where)
                for index, path in enumerate(self.callbacks)
            ],
        }
        for key in ("optimizer", "lr_scheduler"):
            arguments[key] = _factory(getattr(self, key), (key,), where)
        plain = {key: getattr(self, key) for key in RunFields.model_fields}
        return {**plain, **{key: value for key, value in arguments.items() if value is not None}}


def _factory(value: Any, key: KeyPath, where: Callable[[KeyPath], str]) -> Any:
    """What ``fit`` takes for an optimizer or a scheduler as it is written here."""
    if value is None or isinstance(value, (OptimizerConfig, SchedulerConfig)):
        return value
    if not isinstance(value, Groups):
        return _import(value, _bind, key, where)
    groups: dict[str, Any] = {}
    for name, group in value.root.items():
        own = (*key, name)
        if isinstance(group, TargetGroup):
            given = {"target": _import(group, _bind, own, where), "params": group.params}
        else:
            given = group.model_dump(exclude={"lr_scheduler"})
        scheduler = _factory(group.lr_scheduler, (*own, "lr_scheduler"), where)
        named = isinstance(scheduler, SchedulerConfig)
        given["lr_scheduler"] = scheduler.model_dump() if named else scheduler
        groups[name] = given
    return groups


def _import(
    path: str | Target | None,
    use: Callable[[Any, dict[str, Any]], Any],
    key: KeyPath,
    where: Callable[[KeyPath], str],
) -> Any:
    if path is None:
        return None
    target = path if isinstance(path, Target) else Target(target=path)
    try:
        return use(load(target.target), target.kwargs)
    except ConfigError as error:
        place = where(key)
        prefix = f"{place}: {dotted(key)}" if place else dotted(key)
        raise ConfigError(f"{prefix}: {error}") from error


def _bind(found: Any, kwargs: dict[str, Any]) -> Any:
    if not kwargs:
        return found
    _check_arguments(found, kwargs, partial=True)
    return functools.partial(found, **kwargs)


def _bind_or_make(found: Any, kwargs: dict[str, Any]) -> Any:
    return _call(found, kwargs) if inspect.isclass(found) else _bind(found, kwargs)


def _call(found: Any, kwargs: dict[str, Any]) -> Any:
    if inspect.isclass(found) or inspect.isroutine(found) or isinstance(found, functools.partial):
        _check_arguments(found, kwargs, partial=False)
        return found(**kwargs)
    if kwargs:
        _check_arguments(found, kwargs, partial=False)
    return found


def _check_arguments(found: Any, kwargs: dict[str, Any], *, partial: bool) -> None:
    name = getattr(found, "__name__", type(found).__name__)
    if not callable(found):
        raise ConfigError(
            f"'{name}' is an object, not a function, so it takes no arguments "
            f"({', '.join(kwargs)} given)."
        )
    try:
        signature = inspect.signature(found)
    except ValueError:  # Some built-in functions have no signature to check against.
        return
    try:
        (signature.bind_partial if partial else signature.bind)(**kwargs)
    except TypeError as error:
        raise ConfigError(f"{name}{signature} cannot be called: {error}.") from error
