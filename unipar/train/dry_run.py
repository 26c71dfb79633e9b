"""Dry run: every check that needs no process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from unipar.config import RunFields
from unipar.config.settings import Settings
from unipar.optimizers.groups import factories
from unipar.strategy import EngineSpec
from unipar.train import preflight
from unipar.world import Placement


@runtime_checkable
class Places(Protocol):
    """A strategy that can say beforehand where each parameter goes."""

    def placements(self, spec: EngineSpec, placement: Placement) -> list[tuple[str, str]]:
        """Names, and the words for them, in order."""
        ...


@dataclass(frozen=True)
class ResolvedRun:
    """A run with nothing left to be found out.

    Attributes:
        values: a run file's content, every default and strategy option filled in.
        facts: what follows from it: world size, accumulation and the like.
        placements: where the strategy would put parameters, if it says so.
        rendered: what the launcher would give to its system, such as a batch script.
    """

    values: dict[str, Any]
    facts: dict[str, Any]
    placements: list[tuple[str, str]]
    rendered: str


def resolve_run(settings: Settings) -> ResolvedRun:
    """Import what the run names, make its data, and check it against its strategy.

    Raises:
        ConfigError: the run could not start.
    """
    run = settings.run
    arguments = run.arguments(settings.where)
    # Groups of optimizers may be by functions, which are known only now.
    factories(arguments.get("optimizer"), arguments.get("lr_scheduler"))
    planned = preflight.plan(run, arguments["model"])
    strategy, placement = planned.strategy, planned.placement
    given = {name: arguments.get(name) for name in ("loss", "predict")}
    loader = preflight.check(run, planned, arguments["model"], arguments["data"], **given)
    values = run.model_dump(mode="json", by_alias=True)
    values = {
        **{key: values.pop(key) for key in ("model", "data")},
        **values,
        "strategy": {"name": strategy.name, **strategy.options.model_dump(mode="json")},
        "device": placement.device_type,
        "devices": run.devices if planned.sizes else placement.local_size,
        "global_batch_size": loader.global_batch_size,
    }
    found_later = run.micro_batch_size == "auto"
    elastic = {"numbers of ranks": ", ".join(map(str, planned.sizes))} if planned.sizes else {}
    facts = {
        "world size": placement.size,
        **elastic,
        "samples in a micro-batch": "to be found" if found_later else loader.micro_batch_size,
        "micro-batches in a step": (
            "to be found" if found_later or run.shares == "auto" else loader.accumulation
        ),
        "steps in an epoch": loader.num_batches or "unknown",
    }
    if run.shares == "auto":
        facts["samples of each rank"] = "to be found"
    elif run.shares is not None:
        facts["samples of each rank"] = ", ".join(map(str, loader.share_sizes))
    placements: list[tuple[str, str]] = []
    if isinstance(strategy, Places):
        placements = strategy.placements(EngineSpec(arguments["model"]), placement)
    values = {key: value for key, value in values.items() if value is not None}
    return ResolvedRun(values, facts, placements, _rendered(run, planned))


def _rendered(run: RunFields, planned: preflight.Plan) -> str:
    output_dir = (run.output_dir or Path("runs", "NEW_DIRECTORY")).absolute()
    directory = output_dir / "launch" / "000"
    task = preflight.task(run, planned, _nothing, directory, output_dir.name)
    return planned.launcher.rendered(task)


def _nothing(placement: Placement) -> None:
    """Stand for a run's function, which is not made here."""
