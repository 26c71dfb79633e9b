"""Atomic writing: a file is written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def replace(file: Path, text: str) -> None:
    """Write a file whole or not at all, for a benchmark may be ended at any moment."""
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)
