"""The classes of what ``booster.boost`` gives back, for annotations and ``isinstance``."""

from __future__ import annotations

from unipar.compat.colossalai.booster.boosted import BoostedModel as ModelWrapper
from unipar.compat.colossalai.booster.boosted import BoostedOptimizer as OptimizerWrapper
from unipar.compat.colossalai_names import INTERFACE

__all__ = ["ModelWrapper", "OptimizerWrapper"]

__getattr__ = INTERFACE.refusing(__name__)
