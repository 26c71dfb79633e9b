"""Frameworks whose scripts are recognized and refused by name."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.dialects.base import Dialect
from unipar.migrate.imports import imported
from unipar.migrate.plan import Plan


class Unread(Dialect):
    """A framework whose scripts are not rewritten yet."""

    def rewrite(self, plan: Plan) -> None:
        for source in plan.sources:
            for node in (*source.all(cst.Import), *source.all(cst.ImportFrom)):
                if any(self.marked(name) for name in imported(node)):
                    plan.refuse(
                        node,
                        f"this is a script for {self.title}, which migrate does not rewrite.",
                        "Port it by hand to unipar.Session (docs/how-to/own-loop.md).",
                    )


class ColossalAI(Unread):
    name, title = "colossalai", "Colossal-AI"
    marks = ("colossalai.",)
