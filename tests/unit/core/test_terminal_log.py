"""unipar's log lines on the terminal, unless the application has its own."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import pytest

from unipar.utils.logs import logging_to_terminal

LOG = logging.getLogger("unipar")


@contextlib.contextmanager
def root_with(*handlers: logging.Handler) -> Iterator[None]:
    """As in a process that has set up only these; pytest sets up its own for each test."""
    root = logging.getLogger()
    before, root.handlers = root.handlers, list(handlers)
    try:
        yield
    finally:
        root.handlers = before


@pytest.mark.parametrize(
    ("level", "main", "shown"),
    [
        ("info", True, ["a", "b"]),
        ("warning", True, ["b"]),
        ("info", False, ["b"]),
        ("error", True, []),
        ("error", False, []),
    ],
)
def test_the_level_decides_and_other_ranks_only_warn(
    capsys: pytest.CaptureFixture[str], level: str, main: bool, shown: list[str]
):
    with root_with(), logging_to_terminal(level, main=main):
        LOG.info("a")
        LOG.warning("b")
    LOG.error("after")
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("unipar: ")] == [
        f"unipar: {text}" for text in shown
    ]
    assert (LOG.handlers, LOG.level) == ([], logging.NOTSET)


def test_the_applications_handlers_are_left_to_it(capsys: pytest.CaptureFixture[str]):
    with root_with(logging.NullHandler()), logging_to_terminal("debug", main=True):
        LOG.warning("b")
        assert LOG.handlers == []
    assert "unipar: b" not in capsys.readouterr().err
