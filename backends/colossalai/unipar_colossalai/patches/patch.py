"""A patch: what it changes in Colossal-AI, in which version, why, and for which runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Undo = Callable[[], None]


@dataclass(frozen=True)
class Patch:
    """A change to Colossal-AI in memory.

    Attributes:
        name: what it is called.
        target: the function that is replaced, as ``module:qualified.name``.
        source: SHA-256 of that function's source in :data:`unipar_colossalai.installed.VERSION`,
            which the replacement was written against.
        reason: what goes wrong without it, and where upstream.
        device_types: where it is needed.
        plugins: the plugins it is needed for.
        apply: makes the change, and returns what takes it back.
    """

    name: str
    target: str
    source: str
    reason: str
    device_types: frozenset[str]
    plugins: frozenset[str]
    apply: Callable[[], Undo]

    def needed(self, device_type: str, plugin: str) -> bool:
        return device_type in self.device_types and plugin in self.plugins
