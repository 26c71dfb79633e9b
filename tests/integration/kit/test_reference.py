"""The reference owes nothing to what it is the reference of."""

from __future__ import annotations

import ast
from pathlib import Path

from unipar.testing import reference


def test_reference_imports_nothing_of_unipar() -> None:
    tree = ast.parse(Path(reference.__file__).read_text())
    imported = [
        name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([a.name for a in node.names] + [getattr(node, "module", None) or ""])
    ]
    assert not [name for name in imported if name.startswith("unipar")]
