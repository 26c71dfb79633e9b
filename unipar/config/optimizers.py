"""Optimizers and schedulers in a config: by name with their arguments, and several in groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field, RootModel, field_validator, model_validator

from unipar.errors import ConfigError
from unipar.optimizers.groups import factories, is_groups
from unipar.optimizers.named import NamedOptimizer, NamedScheduler
from unipar.strategy import OptimizerFactory
from unipar.utils.validation import refuse_objects

# Spelled so that they cannot be taken for keys in the location of an error.
BY_PATH, BY_NAME, BY_TARGET, GROUPED = "<path>", "<name>", "<target>", "<groups>"


def _built(config: Any) -> Any:
    """Find out by building it; pydantic takes a ValueError for an error of the value's."""
    try:
        config.factory()
    except ConfigError as error:
        raise ValueError(str(error)) from error
    refuse_objects(config.model_extra or {}, "Pass a function that builds it with this argument.")
    return config


class OptimizerConfig(BaseModel, frozen=True, extra="allow"):
    """An optimizer of ``torch.optim``; all keys but ``name`` are its own arguments."""

    name: str = Field("adamw", description="Class of torch.optim, lower-cased: adamw, sgd, …")

    _can_be_built = model_validator(mode="after")(_built)

    def factory(self) -> NamedOptimizer:
        """The function that builds it over a model's trainable parameters."""
        return NamedOptimizer(self.name, self.model_extra or {})


OPTIMIZER_NAME: Any = Field(description="Class of torch.optim, lower-cased: adamw, sgd, …")
"""Of one of several, which has no default."""


class SchedulerConfig(BaseModel, frozen=True, extra="allow"):
    """A scheduler of ``torch.optim.lr_scheduler``; all keys but ``name`` are its own arguments."""

    name: str = Field(
        description="Class of torch.optim.lr_scheduler, lower-cased: cosineannealinglr, …. "
        "Its lengths count optimizer steps."
    )

    _can_be_built = model_validator(mode="after")(_built)

    def factory(self) -> NamedScheduler:
        """The function that builds it over an optimizer."""
        return NamedScheduler(self.name, self.model_extra or {})


Params = Annotated[
    str | tuple[str, ...] | None,
    Field(
        description="Which parameters it is for: a pattern of their names, in which * stands for "
        "any text, or a list of patterns. Left out in one group, which takes the rest."
    ),
]


class GroupConfig(OptimizerConfig, frozen=True, extra="allow"):
    """One of several optimizers; the keys beside those below are its own arguments."""

    name: str = OPTIMIZER_NAME
    params: Params = None
    lr_scheduler: SchedulerConfig | None = Field(
        None, description="A scheduler of torch.optim.lr_scheduler for these parameters."
    )

    @field_validator("lr_scheduler", mode="before")
    @classmethod
    def _name_only(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given


class OptimizerGroups(RootModel[dict[str, GroupConfig]], frozen=True):
    """Several optimizers by name, each for other parameters."""

    _can_be_built = model_validator(mode="after")(_built)

    def factory(self) -> OptimizerFactory:
        """The function that builds them over a model's trainable parameters."""
        build, _ = factories(self.model_dump(), None)
        assert build is not None
        return build


def form(given: Any) -> str:
    """How an optimizer or a scheduler is written."""
    return GROUPED if isinstance(given, RootModel) or is_groups(given) else form_of_one(given)


def form_of_one(given: Any) -> str:
    """The same, of what is not several."""
    if isinstance(given, str):
        return BY_PATH
    has_target = "target" in given if isinstance(given, Mapping) else hasattr(given, "target")
    return BY_TARGET if has_target else BY_NAME
