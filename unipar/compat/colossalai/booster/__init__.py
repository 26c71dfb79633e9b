"""``Booster``, and the plugins and precisions that it is made with."""

from __future__ import annotations

from unipar.compat.colossalai.booster import mixed_precision, plugin
from unipar.compat.colossalai.booster.booster import Booster
from unipar.compat.colossalai.booster.plugin_base import Plugin
from unipar.compat.colossalai_names import BOOSTER_MODULE

__all__ = ["Booster", "Plugin", "mixed_precision", "plugin"]

__getattr__ = BOOSTER_MODULE.refusing(__name__)
