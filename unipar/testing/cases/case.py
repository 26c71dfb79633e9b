"""A case: a name, the function that checks it, and where it can run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from unipar.engine.checks import check_capabilities
from unipar.errors import ConfigError
from unipar.testing.kit import Kit
from unipar.testing.scenarios import Scenario


@dataclass(frozen=True)
class Case:
    """Something that every strategy owes.

    Attributes:
        name: what it is called in a test's id.
        check: raises AssertionError, saying what was seen and what was expected.
        max_size: the largest world in which it means anything, or ``None``.
        also_at: world sizes at which it meets what two ranks do not show: no second rank, shares
            that are empty or padded, shards of several neighbors, sums in more than one order.
        in_brief: whether a strategy that is another with an option could fail it there, where that
            other does not.
    """

    name: str
    check: Callable[[Kit], None]
    max_size: int | None = None
    also_at: tuple[int, ...] = ()
    in_brief: bool = True

    def applies(self, size: int) -> bool:
        return self.max_size is None or size <= self.max_size


def case(check: Callable[[Kit], None]) -> Case:
    return Case(check.__name__, check)


def case_also_at(*sizes: int, in_brief: bool = True) -> Callable[[Callable[[Kit], None]], Case]:
    return lambda check: Case(check.__name__, check, also_at=sizes, in_brief=in_brief)


def _refuses_the_world(kit: Kit) -> None:
    """A number of processes that cannot be had is refused before any of them starts."""
    if kit.refuses(Scenario()):
        return
    try:
        check_capabilities(kit.target.make(), Scenario().spec(kit.size), kit.placement)
    except ConfigError as error:
        if len(str(error)) < 20:
            raise AssertionError(f"the refusal says too little: {error}") from error
        return
    raise AssertionError(f"{kit.target.name} takes {kit.size} devices; the case is misplaced")


refuses_world = Case("refuses_the_world", _refuses_the_world)
"""Stands for all cases where a strategy cannot have that many devices."""
