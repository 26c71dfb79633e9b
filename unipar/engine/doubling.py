"""Steps to look at: the first, the second, the fourth, the eighth, …, of those that are seen."""

from __future__ import annotations


class Doubling:
    """Tells which steps are to be looked at, ever more rarely, from the first that it is asked of.

    A run that goes on is looked at in its first step again, for ranks may be others.
    """

    def __init__(self) -> None:
        self._before: int | None = None

    def is_due(self, steps: int) -> bool:
        """Whether the step after so many is one of them; it can be asked of again."""
        if self._before is None:
            self._before = steps
        number = steps - self._before + 1
        return not number & (number - 1)
