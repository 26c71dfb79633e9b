"""Safe YAML with the scalars of YAML 1.2, within what a config can mean to hold."""

from __future__ import annotations

import re
from typing import Any

import yaml

MAX_DEPTH = 50
"""How deep lists and mappings of a config may nest."""

MAX_VALUES = 100_000
"""How many values a config may hold, one that stands in several places counted in each."""

MAX_DIGITS = 100
"""How long a whole number may be."""


class UnusableYAML(yaml.MarkedYAMLError):
    """The text is YAML, and holds what no config can use; ``problem`` is a sentence's end."""


class Loader(yaml.SafeLoader):
    """Safe YAML with the scalars of YAML 1.2.

    PyYAML follows YAML 1.1, in which ``off`` is false and ``1e-3`` is a string: both are what
    people write in a training config, and neither is what they mean.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        if self.depth > MAX_DEPTH:
            raise _too_deep(self.peek_event())
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        kind = node.tag.rpartition(":")[2]
        if kind == "int" and len(node.value) > MAX_DIGITS:
            raise _unusable(f"a number has {len(node.value)} digits", node)
        try:
            return super().construct_object(node, deep)
        except (AttributeError, LookupError, ValueError) as error:
            # What PyYAML makes of `!!int abc`, `!!bool maybe` or `!!timestamp soon`.
            raise _unusable(f"{node.value!r:.60} is no !!{kind}", node) from error


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    (
        "float",
        r"[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("merge", r"<<", "<"),
):
    Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}",
        re.compile(f"^(?:{_pattern})$"),
        [*_first.replace("\0", ""), *([""] if "\0" in _first else [])],
    )


def compose_yaml(text: str) -> yaml.Node | None:
    """The nodes of a YAML text; ``None`` where it holds nothing.

    Raises:
        UnusableYAML: it nests too deeply, holds itself, grows too large where its aliases are
            written out, or has a key that is no text.
        yaml.YAMLError: it is not YAML.
    """
    loader = Loader(text)
    try:
        node = loader.get_single_node()
    finally:
        loader.dispose()
    if node is not None:
        _measure(node, set(), {})
    return node


def construct_yaml(node: yaml.Node | None) -> Any:
    """The value that nodes stand for.

    Merge keys (``<<``) are replaced in ``node`` by what they stand for.

    Raises:
        UnusableYAML: a number is too long, or a value is not what its tag says.
        yaml.YAMLError: a tag is unknown, or stands at what it cannot be.
    """
    return None if node is None else Loader("").construct_document(node)


def _measure(
    node: yaml.Node, within: set[int], measured: dict[int, tuple[int, int]]
) -> tuple[int, int]:
    """How many values a node is with its aliases written out, and how deep they nest.

    An alias follows what it stands for, so that is measured already and this never goes deep.
    """
    if id(node) in measured:
        return measured[id(node)]
    if id(node) in within:
        raise _unusable("a value holds itself, through its own alias", node)
    within.add(id(node))
    size, depth = 1, 0
    for child in _children(node):
        child_size, child_depth = _measure(child, within, measured)
        size, depth = size + child_size, max(depth, child_depth + 1)
    within.remove(id(node))
    if size > MAX_VALUES:
        raise _unusable(f"with its aliases written out it has over {MAX_VALUES:,} values", node)
    if depth > MAX_DEPTH:
        raise _too_deep(node)
    measured[id(node)] = size, depth
    return size, depth


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        return node.value
    if not isinstance(node, yaml.MappingNode):
        return []
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            kind = "list" if isinstance(key, yaml.SequenceNode) else "mapping"
            raise _unusable(f"a key is text, and this one is a {kind}", key)
    return [part for pair in node.value for part in pair]


def _too_deep(at: Any) -> UnusableYAML:
    return _unusable(f"lists and mappings are nested more than {MAX_DEPTH} deep", at)


def _unusable(problem: str, at: Any) -> UnusableYAML:
    return UnusableYAML(problem=problem, problem_mark=at.start_mark)
