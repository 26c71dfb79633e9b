"""Turning an existing training script into a unipar script.

``migrate_source`` changes the imports of one file; :mod:`unipar.compat` is what the result imports,
and imports nothing of this package. LibCST is imported when the first file is migrated.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unipar.migrate.migrate import migrate_files, migrate_source
    from unipar.migrate.notes import Migration, Note

_MODULES = {
    "migrate_files": "migrate",
    "migrate_source": "migrate",
    "Migration": "notes",
    "Note": "notes",
}

__all__ = ["Migration", "Note", "migrate_files", "migrate_source"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'unipar.migrate' has no attribute '{name}'")
    return getattr(importlib.import_module(f"unipar.migrate.{_MODULES[name]}"), name)
