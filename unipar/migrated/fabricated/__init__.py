"""Functions for scripts migrated from Lightning Fabric, beside :mod:`unipar.migrated.script`.

A :class:`Run` names its methods as ``Fabric`` does, so that most of a script stays as it is; Fabric
itself is not imported. The strategy, the precision and the device stand in ``unipar.yaml``.
"""

from __future__ import annotations

from unipar.migrated.fabricated.run import Run
from unipar.migrated.fabricated.training import engine, seed_everything

__all__ = ["Run", "engine", "seed_everything"]
