"""The optimizer and scheduler of a run beside those that a checkpoint was made with."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from unipar.checkpoint.manifest import Manifest
from unipar.combined import OPTIMIZER as GROUP
from unipar.combined import optimizers_in, schedulers_in
from unipar.strategy import Engine

OPTIMIZER, SCHEDULER = "optimizer_class", "lr_scheduler_class"
"""Where the names of the classes stand in the ``extra`` of a stored engine."""


def class_names(engine: Engine) -> dict[str, str]:
    """The classes that an engine trains with, by name.

    Frameworks put optimizers of their own in place of torch's; of those none is told, because under
    another framework the same optimizer has another class.
    """
    names: dict[str, str] = {}
    if engine.optimizer is not None:
        kinds = {name: _innermost(one) for name, one in optimizers_in(engine.optimizer).items()}
        if listed := _listed(kinds, "torch.optim."):
            names[OPTIMIZER] = listed
    if engine.lr_scheduler is not None:
        names[SCHEDULER] = _listed(schedulers_in(engine.lr_scheduler))
    return names


def _listed(built: Mapping[str, Any], module: str = "") -> str:
    """The classes' names, each after its group's; without those of other modules."""
    texts = []
    for group, one in built.items():
        # Some of torch's say that they are of the package itself.
        known = f"{type(one).__module__}.".startswith(module)
        kind = type(one).__name__ if known else ""
        texts.append(": ".join(text for text in (group, kind) if text))
    return ", ".join(texts)


def other_training(
    manifest: Manifest, engines: Mapping[str, Engine], *, scheduler: bool
) -> list[str]:
    """Why the engines would train on otherwise than the run that made the checkpoint.

    An engine without an optimizer trains nothing, so nothing is asked of it; nor is anything asked
    of schedulers where the caller has them.
    """
    refusals: list[str] = []
    for name, engine in engines.items():
        stored = manifest.engines.get(name)
        if stored is None or engine.optimizer is None:
            continue
        where = f"the checkpoint {manifest.path} was made"
        whose = "this run" if len(manifest.engines) == 1 else f"the engine '{name}'"
        instead = "or begin a new run from the checkpoint's weights (unipar.load_model)."
        saved = "lr_scheduler" in stored.extra
        own = class_names(engine)
        if scheduler and saved and engine.lr_scheduler is None:
            kind = stored.extra.get(SCHEDULER, "one")
            refusals.append(
                f"{where} with a learning-rate scheduler ({kind}), and {whose} has none: its "
                f"learning rate would stay as it is. Pass the same lr_scheduler, {instead}"
            )
        elif scheduler and engine.lr_scheduler is not None and not saved:
            refusals.append(
                f"{where} without a learning-rate scheduler, and {whose} has one "
                f"({own[SCHEDULER]}), which would begin at its first step. Leave lr_scheduler out, "
                f"{instead}"
            )
        named = ((OPTIMIZER, "optimizer"), (SCHEDULER, "lr_scheduler"))
        for key, argument in named[: 1 + scheduler]:
            was, now = stored.extra.get(key), own.get(key)
            if was and now and was != now:
                refusals.append(
                    f"{where} with the {argument} {was}, and {whose} has {now}, which cannot go "
                    f"on from its state. Pass the same {argument}, {instead}"
                )
    return refusals


def training_values(engines: Mapping[str, Engine], *, scheduler: bool) -> dict[str, Any]:
    """Return what optimizers and schedulers were built with, but for what training moves.

    Args:
        engines: by name.
        scheduler: whether schedulers are the engines'; else the caller's move learning rates.
    """
    values: dict[str, Any] = {}
    for name, engine in engines.items():
        prefix = "" if len(engines) == 1 else f"{name}: "
        optimizer = engine.optimizer
        groups = [] if optimizer is None else optimizer.param_groups
        several = {} if optimizer is None else optimizers_in(optimizer)
        for number, group in enumerate(groups):
            own = several.get(group.get(GROUP, ""), optimizer)
            known = _arguments(_innermost(own)) - {"params"} | {"initial_lr"}
            suffix = "" if len(groups) == 1 else f" of group {number}"
            moved: set[str] = set()
            if "initial_lr" in group or not scheduler:
                moved.add("lr")
            if "max_momentum" in group:
                moved |= {"momentum", "betas"}
            for key in known & group.keys() - moved:
                values[f"{prefix}{key}{suffix}"] = _plain(group[key])
        for name, one in schedulers_in(engine.lr_scheduler).items():
            held, whose = vars(one), f" of '{name}'" * bool(name)
            for key in _arguments(one) & held.keys() - {"last_epoch"}:
                values[f"{prefix}{key} of lr_scheduler{whose}"] = _plain(held[key])
    return values


def overridden_values(given: Mapping[str, Any], restored: Mapping[str, Any]) -> list[str]:
    """List what a checkpoint has put in place of what was given, one text for each value."""
    return [
        f"{name} is {restored[name]} (given: {value})"
        for name, value in sorted(given.items())
        if None not in (value, restored.get(name)) and restored[name] != value
    ]


def _innermost(optimizer: Any) -> Any:
    """The optimizer that does the arithmetic, within those of frameworks that divide its state."""
    for name in ("optim", "optimizer"):
        inner = getattr(optimizer, name, None)
        if hasattr(inner, "param_groups"):
            return _innermost(inner)
    return optimizer


def _arguments(built: Any) -> set[str]:
    return set(inspect.signature(type(built)).parameters)


def _plain(value: Any) -> Any:
    """A value that can be compared and shown; ``None`` for any other."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, (list, tuple)):
        items = tuple(_plain(item) for item in value)
        return None if None in items else items
    return value if isinstance(value, (bool, int, float, str)) else None
