"""The plugins of Colossal-AI's Booster, each in one class.

Nothing of Colossal-AI is imported before an engine is made.
"""

from __future__ import annotations

from unipar_colossalai.plugins.base import Plugin
from unipar_colossalai.plugins.ddp import DDP
from unipar_colossalai.plugins.fsdp import FSDP
from unipar_colossalai.plugins.gemini import Gemini
from unipar_colossalai.plugins.hybrid import Hybrid
from unipar_colossalai.plugins.zero import ZeRO1, ZeRO2

PLUGINS: dict[str, type[Plugin]] = {
    "ddp": DDP,
    "zero1": ZeRO1,
    "zero2": ZeRO2,
    "gemini": Gemini,
    "fsdp": FSDP,
    "hybrid": Hybrid,
}
"""By the option's value, in the order in which messages name them."""

__all__ = ["PLUGINS", "Plugin"]
