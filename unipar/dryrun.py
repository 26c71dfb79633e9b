"""What a run would be: everything checked that can be without starting a process."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn

from unipar import launch, registry
from unipar.checks import check_capabilities, check_trainable
from unipar.data import Loader
from unipar.data.sources import batch_size_of
from unipar.devices import device_memory, resolve_device_type, resolve_num_devices
from unipar.errors import ConfigError
from unipar.runfile import RunFile
from unipar.settings import Settings
from unipar.strategy import EngineSpec, Needs
from unipar.world import Placement


@dataclass(frozen=True)
class ResolvedRun:
    """A run with nothing left to be found out.

    Attributes:
        values: a run file's content, every default and strategy option filled in.
        facts: what follows from it: world size, accumulation and the like.
    """

    values: dict[str, Any]
    facts: dict[str, Any]


def resolve_run(settings: Settings) -> ResolvedRun:
    """Import what the run names, make its data, and check it against its strategy.

    Raises:
        ConfigError: the run could not start.
    """
    run = settings.run
    arguments = run.arguments(settings.where)
    placement = _placement(run)
    strategy = registry.resolve(
        run.strategy, Needs(placement.size, None, device_memory(placement.device_type))
    )
    if isinstance(arguments["model"], nn.Module):
        check_trainable(arguments["model"])
    loader = _loader(run, arguments["data"], placement)
    spec = EngineSpec(
        arguments["model"],
        precision=run.precision,
        max_grad_norm=run.max_grad_norm,
        activation_checkpointing=run.activation_checkpointing,
        compile=run.compile,
        on_nan=run.on_nan,
        seed=run.seed,
        global_batch_size=loader.global_batch_size,
        micro_batch_size=loader.micro_batch_size,
        accumulation=loader.accumulation,
    )
    check_capabilities(strategy, spec, placement)
    values = run.model_dump(mode="json", by_alias=True)
    values = {
        **{key: values.pop(key) for key in ("model", "data")},
        **values,
        "strategy": {"name": strategy.name, **strategy.options.model_dump(mode="json")},
        "device": placement.device_type,
        "devices": placement.local_size,
        "global_batch_size": loader.global_batch_size,
    }
    found_later = run.micro_batch_size == "auto"
    facts = {
        "world size": placement.size,
        "samples in a micro-batch": "to be found" if found_later else loader.micro_batch_size,
        "micro-batches in a step": "to be found" if found_later else loader.accumulation,
        "steps in an epoch": loader.num_batches or "unknown",
    }
    return ResolvedRun({key: value for key, value in values.items() if value is not None}, facts)


def _placement(run: RunFile) -> Placement:
    device_type = resolve_device_type(run.device)
    found = launch.detect()
    if found is None:
        devices = resolve_num_devices(run.devices, device_type)
        size = devices * run.num_nodes
        found = Placement(size=size, local_size=devices, num_nodes=run.num_nodes)
    return dataclasses.replace(found, device_type=device_type, timeout=run.timeout)


def _loader(run: RunFile, data: Any, placement: Placement) -> Loader:
    size = run.global_batch_size or batch_size_of(data)
    if size is None:
        raise ConfigError(
            "global_batch_size is not set, and the data has no batch size of its own. "
            "Set global_batch_size, the samples of one step over all devices."
        )
    return Loader(
        data,
        global_batch_size=size,
        micro_batch_size=None if run.micro_batch_size == "auto" else run.micro_batch_size,
        data_size=placement.size,
        shuffle=run.shuffle,
        num_workers=run.num_workers,
    )
