"""Atomic writing: a file is written whole or not at all."""

from __future__ import annotations

from pathlib import Path

from unipar.utils.replacing import replacing


def replace(file: Path, text: str) -> None:
    """Write a file whole or not at all, for a benchmark may be ended at any moment."""
    with replacing(file) as partial:
        partial.write_text(text, encoding="utf-8")
