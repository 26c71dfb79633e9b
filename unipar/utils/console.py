"""The terminal, as everything of unipar's writes to it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def open_console(
    *, stderr: bool = False, soft_wrap: bool = False, width_of_pipe: int | None = None
) -> Console:
    """Open standard output or standard error for rich.

    Strings are printed as they are. Names, paths and messages come from the user, and rich would
    take ``:bug:`` in them for an emoji and ``[red]`` for a style. What is to have a style is a
    ``rich.text.Text``.

    Args:
        stderr: write to standard error.
        soft_wrap: leave it to the terminal to break lines.
        width_of_pipe: columns where the output is no terminal, which has none; ``COLUMNS`` of the
            environment comes first. Left out: rich's own, 80.
    """
    # Here and not above: rich takes time to import.
    from rich.console import Console

    console = Console(
        stderr=stderr, soft_wrap=soft_wrap, emoji=False, markup=False, highlight=False
    )
    if width_of_pipe and not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = width_of_pipe
    return console
