"""The run of a migrated script, and the engines in it.

The run's settings stand in ``unipar.yaml`` beside the script; ``UNIPAR_STRATEGY`` and other
variables of that form override them. A process has one run, which the first call that needs it
opens, so that functions need not hand it around::

    from unipar.migrated import script

    optimizer = script.prepare(model, optimizer=lambda named: SGD([p for _, p in named], 0.1)).optimizer
    for x, y in loader:
        loss = criterion(script.engine(model)(x), y)
        script.backward(loss, optimizer)
        script.engine(optimizer).step()

The random numbers of the script stay its own: neither opening the run nor preparing a model draws
from torch's generators or seeds them.
"""  # noqa: E501

from __future__ import annotations

from unipar.compat.runconfig import ScriptConfig
from unipar.migrated.script.data import split
from unipar.migrated.script.engines import (
    autocast,
    backward,
    engine,
    grad_norm,
    is_prepared,
    no_sync,
    prepare,
)
from unipar.migrated.script.exchange import all_gather, all_reduce
from unipar.migrated.script.run import (
    close,
    device,
    open,
    placement,
    session,
    settings,
    spawn,
    world,
)
from unipar.migrated.script.states import (
    broadcast_optimizer,
    broadcast_weights,
    gathered,
    save,
    whole,
)

__all__ = [
    "ScriptConfig", "all_gather", "all_reduce", "autocast", "backward", "broadcast_optimizer",
    "broadcast_weights", "close", "device", "engine", "gathered", "grad_norm", "is_prepared",
    "no_sync", "open", "placement", "prepare", "save", "session", "settings", "spawn", "split",
    "whole", "world",
]  # fmt: skip
