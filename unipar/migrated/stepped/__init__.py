"""Engines that count micro-batches by themselves: what scripts migrated from DeepSpeed call.

``backward()`` and ``step()`` are called for every micro-batch, and every so many of them the
weights are updated::

    from unipar.migrated import stepped

    engine, optimizer, _, _ = stepped.initialize(
        model, optimizer=lambda named: SGD([p for _, p in named], 0.1), accumulation_steps=4
    )
    for x, y in loader:
        loss = criterion(engine(x), y)
        engine.backward(loss)
        engine.step()
"""

from __future__ import annotations

from unipar.migrated.stepped.arguments import add_config_arguments
from unipar.migrated.stepped.engine import SteppedEngine
from unipar.migrated.stepped.initializing import initialize
from unipar.migrated.stepped.schedules import Warmup

__all__ = ["SteppedEngine", "Warmup", "add_config_arguments", "initialize"]
