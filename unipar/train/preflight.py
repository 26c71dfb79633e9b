"""Facts and checks about a run before there are any processes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from unipar import checkpoint, launch, launchers
from unipar.config import CheckpointConfig, RunFields
from unipar.data import Loader
from unipar.engine.checks import (
    check_capabilities,
    check_dropout,
    check_gradients,
    check_initial_weights,
    check_model,
)
from unipar.errors import ConfigError
from unipar.evaluation.evaluate import Predict
from unipar.launch.elastic import Elastic, ranks
from unipar.launchers import Launcher, Task
from unipar.loss import LossFn
from unipar.objective import require_objective
from unipar.sizing import resolve_for
from unipar.strategy import EngineSpec, Strategy
from unipar.strategy.registry import is_auto
from unipar.train.loaders import training_loader
from unipar.train.speeds import check_tells_apart
from unipar.utils.devices import DeviceRange, device_range, resolve_device_type
from unipar.world import Placement

log = logging.getLogger("unipar")


@dataclass(frozen=True)
class Plan:
    """The processes and the strategy of a run.

    Attributes:
        placement: where this process stands in it; rank 0, where processes are yet to be started.
        joined: whether a launcher has started the processes already.
        launcher: what starts them otherwise.
        strategy: with its options.
        sizes: the numbers of ranks that it can be on, where their number may change.
    """

    placement: Placement
    joined: bool
    launcher: Launcher
    strategy: Strategy
    sizes: tuple[int, ...] = ()


def plan(config: RunFields, model: Any) -> Plan:
    """Find the run's processes, and resolve its strategy for them.

    Args:
        config: of the run.
        model: whose size ``strategy="auto"`` goes by: a module, or a function that builds one.

    Raises:
        ConfigError: a device, a strategy or an option does not exist, or the model is none.
    """
    launcher = launchers.resolve(config.launcher)
    found = launch.detect()
    wanted = device_range(config.devices)
    if found is not None:
        device_type = resolve_device_type(config.device)
        here = found
        if not launcher.starts_here:
            log.warning(
                "launcher '%s' starts nothing: another launcher has started this process, and the "
                "run joins its %d.",
                launcher.name,
                found.size,
            )
    else:
        if wanted is None:
            assert not isinstance(config.devices, str) or config.devices == "auto"
            device_type, devices = launcher.resolve_devices(
                config.device, config.devices, config.num_nodes
            )
        else:
            device_type, devices = launcher.resolve_range(config.device, wanted, config.num_nodes)
        size = devices * config.num_nodes
        here = Placement(size=size, local_size=devices, num_nodes=config.num_nodes)
        if wanted is None or launcher.starts_here:
            # The hosts are known; whether they share a disk is not yet.
            settings, hosts = config.checkpoint, config.num_nodes
            if isinstance(settings, CheckpointConfig) and settings.peers:
                checkpoint.check_hosts(settings.peers, hosts, hosts)
    placement = dataclasses.replace(here, device_type=device_type, timeout=config.timeout)
    check_model(model)
    if found is None and launcher.elsewhere and is_auto(config.strategy):
        raise ConfigError(
            f"strategy='auto' goes by the devices of this machine, and launcher '{launcher.name}' "
            "runs on others. Name one, such as strategy='fsdp'."
        )
    strategy = resolve_for(config.strategy, placement, (model,))
    if wanted is None:
        return Plan(placement, found is not None, launcher, strategy)
    sizes = elastic_sizes(config, wanted, strategy, placement, joined=found is not None)
    if found is None:
        placement = _of_size(placement, sizes[-1])
    return Plan(placement, found is not None, launcher, strategy, sizes)


def elastic_sizes(
    config: RunFields,
    wanted: DeviceRange,
    strategy: Strategy,
    placement: Placement,
    *,
    joined: bool,
) -> tuple[int, ...]:
    """The numbers of ranks that a run can be on, ascending; only data-parallel axes differ.

    Args:
        config: of the run.
        wanted: what was asked for.
        strategy: with its options.
        placement: of as many ranks as there are, or as there can be here.
        joined: whether there are as many.

    Raises:
        ConfigError: the strategy can be on no other number than one of them, or not on as many as
            there are.
    """
    if isinstance(config.shares, tuple):
        raise ConfigError(
            f"devices='{wanted}' is a range, and shares has {len(config.shares)} numbers, one for "
            "each data-parallel rank. Set shares='auto' or leave it out, or give devices a number."
        )
    most = wanted.most or placement.size
    found: dict[int, tuple[int, ...]] = {}
    refusal: ConfigError | None = None
    for size in range(wanted.least, most + 1):
        try:
            layout = strategy.layout(_of_size(placement, size))
            check_capabilities(strategy, EngineSpec(nn.Identity()), _of_size(placement, size))
        except ConfigError as error:
            refusal = error
        else:
            found[size] = (layout.tp, layout.pp, layout.cp, layout.ep)
    alike = [size for size, axes in found.items() if axes == found[max(found)]]
    why = f"\n{refusal}" if refusal is not None else ""
    if not alike or (len(alike) == 1 and most > wanted.least):
        only = f"on {ranks(alike[0])} alone" if alike else "on none of these numbers"
        number = f"devices={alike[0]}" if alike else "devices a number"
        raise ConfigError(
            f"devices='{wanted}' lets the number of ranks change, and in this range strategy "
            f"'{strategy.name}' with its options can be {only}. Give {number} or another range, or "
            f"use another strategy or other options.{why}"
        )
    here = tuple(size for size in alike if size <= placement.size)
    if not here or (joined and placement.size not in here):
        known = ", ".join(map(str, alike))
        raise ConfigError(
            f"devices='{wanted}', and there are {placement.size}: strategy '{strategy.name}' can "
            f"be on {known}.{why}"
        )
    return here


def _of_size(placement: Placement, size: int) -> Placement:
    """The placement of one of so many ranks; as it is where there are as many."""
    if size == placement.size:
        return placement
    return dataclasses.replace(placement, rank=0, size=size, local_size=size, num_nodes=1)


def task(
    config: RunFields,
    planned: Plan,
    fn: Callable[[Placement], Any],
    directory: Path,
    name: str,
    elastic: Elastic | None = None,
) -> Task:
    """What the launcher of a run is to run.

    Args:
        config: of the run.
        planned: its processes.
        fn: what each of them calls.
        directory: a private one, which all of them can reach.
        name: what a queue shows.
        elastic: how the number of processes may change; ``None``: it does not.
    """
    return Task(
        fn,
        devices=planned.placement.local_size,
        num_nodes=planned.placement.num_nodes,
        device_type=planned.placement.device_type,
        timeout=config.timeout,
        max_restarts=config.max_restarts,
        grace_period=config.grace_period,
        save_signal=config.save_signal_number,
        directory=directory,
        name=name,
        elastic=elastic,
    )


def check(
    config: RunFields,
    planned: Plan,
    model: nn.Module | Callable,
    data: Any,
    *,
    loss: LossFn | None,
    predict: Predict | None,
) -> Loader:
    """Check model, data, functions and strategy against each other.

    Returns:
        A loader over the data, as rank 0 would have it.

    Raises:
        ConfigError: the run cannot be done.
        DataError: the data cannot be trained on.
    """
    check_initial_weights(model, config.initial_weights)
    layout = planned.strategy.layout(planned.placement)
    loader = training_loader(config, data, data_size=layout.batch)
    spec = EngineSpec(
        model,
        precision=config.precision,
        loss_scale=config.loss_scale,
        max_grad_norm=config.max_grad_norm,
        activation_checkpointing=config.activation_checkpointing,
        activation_offload=config.activation_offload,
        compile=config.compile,
        on_nan=config.on_nan,
        seed=config.seed,
        dropout_seed=config.dropout_seed,
        global_batch_size=loader.global_batch_size,
        micro_batch_size=loader.micro_batch_size,
        accumulation=loader.accumulation,
    )
    check_capabilities(planned.strategy, spec, planned.placement)
    if config.shares == "auto" and layout.batch > 1:
        check_tells_apart(loader.micro_batch_size)
    if planned.strategy.capabilities().pipeline:
        for given in filter(None, (loss, predict)):
            require_objective(given)
    if isinstance(model, nn.Module):
        check_gradients(model, planned.strategy, spec)
        check_dropout(model, spec)
    return loader
