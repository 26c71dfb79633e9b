"""Autograd graphs, from what was computed back to what it was computed from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


def nodes_behind(
    roots: Iterable[Any], *, up_to: Callable[[Any], bool] = lambda node: False
) -> Iterator[Any]:
    """The nodes that a backward pass from some would come through, those first, and each once.

    Args:
        roots: nodes, or ``None`` for what has no graph.
        up_to: whether what lies behind a node is left out.
    """
    seen: set[Any] = set()
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if not up_to(node):
            todo += [following for following, _ in node.next_functions]
