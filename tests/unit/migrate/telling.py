"""What a migration says, for tests of it."""

from __future__ import annotations

from typing import Any

from unipar.migrate import Migration, migrate_source


def told(migration: Migration, kind: str) -> str:
    """The notes of a kind, a line each."""
    return "\n".join(str(note) for note in migration.notes if note.kind == kind)


def refusal(source: str, **options: Any) -> str:
    """Why a script is refused, which leaves it as it is."""
    migration = migrate_source(source, file="train.py", **options)
    assert migration.refused
    assert not migration.changed
    assert migration.code == source
    assert not migration.config
    return told(migration, "refused")
