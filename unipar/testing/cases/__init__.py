"""The cases that every strategy is held to: one function for each thing that it owes."""

from __future__ import annotations

from unipar.testing.cases import capabilities, loops, numbers, robustness, shapes, state, views
from unipar.testing.cases.case import Case, refuses_world

ALL: tuple[Case, ...] = tuple(
    case
    for module in (numbers, shapes, views, loops, robustness, state, capabilities)
    for case in vars(module).values()
    if isinstance(case, Case)
)
"""Every case, in the order in which they are written."""

__all__ = ["ALL", "Case", "refuses_world"]
