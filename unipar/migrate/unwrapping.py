"""Taking out a ``with`` whose block stays."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.source import Source
from unipar.migrate.tree import inside


def unwrap(source: Source, with_: cst.With) -> bool:
    """Take out a ``with`` of one item, and move its block to the left.

    Returns:
        Whether it could be done: not where strings go over several lines, or a comment stands
        behind the colon.
    """
    block = with_.body
    data = source.edits.data
    start, stop = source.span(with_)
    colon = data.find(b":", source.span(with_.items[-1])[1])
    first = data.find(b"\n", colon) + 1
    if not isinstance(block, cst.IndentedBlock) or len(with_.items) != 1:
        return False
    if data[colon + 1 : first].strip() or any(_is_long(source, one) for one in inside(block)):
        return False
    outer = start - source.line_start(with_)
    inner = source.span(block.body[0])[0] - source.line_start(block.body[0])
    head = source.line_start(with_)
    if data[head:start].strip() or data[head:start] != data[source.line_start(block.body[0])
                                                            :][:outer]:  # fmt: skip
        return False
    end = data.find(b"\n", stop)
    end = len(data) if end < 0 else end
    source.edits.replace((head, first), "")
    at = first
    while at < end:
        next_ = data.find(b"\n", at, end)
        next_ = end if next_ < 0 else next_
        line = data[at:next_]
        margin = len(line) - len(line.lstrip(b" \t"))
        if line.strip():
            source.edits.replace((at, at + min(margin, inner - outer)), "")
        at = next_ + 1
    return True


def _is_long(source: Source, node: cst.CSTNode) -> bool:
    """Return whether a string's own lines would be moved too."""
    return isinstance(node, (cst.SimpleString, cst.FormattedString)) and "\n" in source.code(node)
