"""Frameworks that have a face: it is imported in their place, and the script stays as it is."""

from __future__ import annotations

import functools
import symtable
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import libcst as cst

from unipar.compat.tables import NOT_KEPT, Table
from unipar.migrate.dialects.base import Dialect, Row
from unipar.migrate.literals import constant
from unipar.migrate.plan import Plan
from unipar.migrate.source import Source

_BY_STRING = {"importlib.import_module", "importlib.util.find_spec"}


class FaceDialect(Dialect):
    """Scripts for a framework whose face is a package with the framework's own modules and names.

    Attributes:
        package: the framework's.
        face: what is imported instead.
        modules: those that the face has, by what follows the package in their names (``""`` is the
            package itself), each with what becomes of its names; ``None``: it has those that its
            file binds. What stands below one of them, and is not listed, is imported from that one.
        members: what becomes of the attributes of the framework's main object, if that is asked.
        inner: for attributes of it that are objects of the framework's, too: what the flow calls
            these, and what becomes of their attributes.
        calls: further tables of what is refused, for the docs.
    """

    package: ClassVar[str]
    face: ClassVar[str]
    modules: ClassVar[Mapping[str, Table | None]]
    members: ClassVar[Table | None] = None
    inner: ClassVar[Mapping[str, tuple[str, Table]]] = {}
    calls: ClassVar[tuple[Table, ...]] = ()

    def __init_subclass__(cls) -> None:
        inner = [table for _, table in cls.inner.values()]
        tables = [*cls.calls, *filter(None, (cls.members, *inner, *cls.modules.values()))]
        cls.refused = tuple(
            Row("`, `".join(_told(name, table) for name in row.names.split()), row.why)
            for table in dict.fromkeys(tables)
            for row in table.rows
            if row.fate == "refused"
        )

    def rewrite(self, plan: Plan) -> None:
        for source in plan.sources:
            for node in source.all(cst.ImportFrom):
                self._rewrite_from(plan, source, node)
            for node in source.all(cst.Import):
                self._rewrite_import(plan, source, node)
            for node in source.all(cst.Attribute):
                self._refuse_attribute(plan, node)
            for call in source.calls():
                self._tell_of_question(plan, call)
        self._refuse_members(plan)
        for name, (made, table) in self.inner.items():
            self._refuse_inner(plan, name, made, table)

    def inside(self, module: str) -> str | None:
        """What follows the package in a module's name; ``None`` if the module is another's."""
        if module != self.package and not module.startswith(f"{self.package}."):
            return None
        return module[len(self.package) + 1 :]

    def nearest(self, inside: str) -> str | None:
        """The module of the face that has the names of one of the framework's, if there is one."""
        while inside and inside not in self.modules:
            inside = inside.rpartition(".")[0]
            if not inside:
                return None
        return inside

    def _rewrite_from(self, plan: Plan, source: Source, node: cst.ImportFrom) -> None:
        if node.module is None or node.relative:
            return
        inside = self.inside(source.code(node.module))
        if inside is None:
            return
        self._tell_of_guard(plan, source, node)
        place = self.nearest(inside)
        if place is None:
            self._refuse_module(plan, node, inside)
            plan.replace(node.module, f"{self.face}.{inside}")
            return
        if isinstance(node.names, cst.ImportStar):
            plan.refuse(node, f"it imports whatever {self.package} has.", "Name what is used.")
            return
        there = f"{self.face}.{place}" if place else self.face
        for alias in node.names:
            name = source.code(alias.name)
            why = self._why_not(place, there, name)
            if why is not None and (f"{inside}.{name}" if inside else name) not in self.modules:
                plan.refuse_where_reached(alias, f"the face has no {name}.", why)
        plan.replace(node.module, there)

    def _why_not(self, place: str, there: str, name: str) -> str | None:
        """Why a module of the face has not a name, and what to do; ``None`` where it has it."""
        table = self.modules[place]
        if table is not None and table.find(name) is not None:
            return table.why_not(name)
        return None if name in _bound_in(there) else NOT_KEPT

    def _rewrite_import(self, plan: Plan, source: Source, node: cst.Import) -> None:
        for alias in node.names:
            module = source.code(alias.name)
            inside = self.inside(module)
            if inside is None:
                continue
            self._tell_of_guard(plan, source, node)
            place = self.nearest(inside)
            if place is None:
                self._refuse_module(plan, node, inside)
            elif alias.asname is not None:
                plan.replace(alias.name, f"{self.face}.{place}" if place else self.face)
            elif module == self.package and "." not in module:
                plan.replace(alias, f"{self.face} as {module}")
            else:
                plan.refuse(
                    node, f"import {module} binds the name {module.partition('.')[0]}.",
                    f"Write import {module} as …, or from {module} import ….",
                )  # fmt: skip

    def _refuse_attribute(self, plan: Plan, node: cst.Attribute) -> None:
        """Refuse ``L.Trainer``, of a package that is imported as a whole."""
        name, table = node.attr.value, self.modules.get("")
        why = table.why_not(name) if table is not None else None
        if why is not None and f"{self.package}.{name}" in plan.flow.names(node):
            plan.refuse_where_reached(node, f"the face has no {name}.", why)

    def _tell_of_guard(self, plan: Plan, source: Source, node: cst.CSTNode) -> None:
        """Note an import that may fail in the script, and never does of the face."""
        if source.is_tried(node):
            plan.tell(
                node, f"the face is there whether or not {self.package} is installed, so what "
                "follows `except` never runs.",
                "Where that decides how the script trains, let a flag decide.",
            )  # fmt: skip

    def _tell_of_question(self, plan: Plan, call: cst.Call) -> None:
        """Note what asks for the framework by a string, or whether it is installed."""
        names = plan.flow.names(call.func)
        asked = constant(call.args[0].value) if call.args else None
        if (
            isinstance(asked, str) and self.inside(asked) is not None
            and (names & _BY_STRING or plan.flow.source(call).code(call.func) == "__import__")
        ) or any(one.endswith(f".is_{self.package}_available") for one in names):  # fmt: skip
            plan.tell(
                call, f"it asks for {self.package} itself, and not for its face.",
                "Import it by a statement, and let a flag decide what depends on it.",
            )  # fmt: skip

    def _refuse_module(self, plan: Plan, node: cst.CSTNode, inside: str) -> None:
        known = ", ".join(f"{self.package}.{one}".rstrip(".") for one in sorted(self.modules))
        module = f"{self.package}.{inside}".rstrip(".")
        what = f"the face has no {module}."
        plan.refuse_where_reached(node, what, f"Import names from {known}.")

    def _refuse_members(self, plan: Plan) -> None:
        """Refuse, where it can be seen, what the face refuses when it is called."""
        if self.members is None:
            return
        for _, call, func in plan.methods(*_refused_in(self.members)):
            if plan.made_by(plan.flow.values(func.value), *self.main):
                row = self.members.find(func.attr.value)
                assert row is not None
                plan.refuse_where_reached(call, f"the face refuses {func.attr.value}.", row.why)

    def _refuse_inner(self, plan: Plan, held: str, made: str, table: Table) -> None:
        """Refuse, where it can be seen, attributes that an object within the main one has not."""
        names = _refused_in(table)
        for source in plan.sources:
            for node in source.all(cst.Attribute):
                if (name := node.attr.value) not in names:
                    continue
                of = node.value
                found = plan.made_by(plan.flow.values(of), made) or (
                    isinstance(of, cst.Attribute)
                    and of.attr.value == held
                    and plan.made_by(plan.flow.values(of.value), *self.main)
                )
                if found:
                    why = table.why_not(name)
                    plan.refuse_where_reached(node, f"the face has no {name} there.", why or "")


def _refused_in(table: Table) -> set[str]:
    """The names that a table refuses, but for those that are patterns."""
    refused = (row.names.split() for row in table.rows if row.fate == "refused")
    return {name for names in refused for name in names if "*" not in name}


def _told(name: str, table: Table) -> str:
    """A name of a table, for one that stands beside those of other tables."""
    return f"{table.title}.*" if name == "*" else name


@functools.cache
def _bound_in(module: str) -> set[str]:
    """The names that a module of ours binds, without importing it, and torch with it."""
    path = Path(__file__).parents[2].joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    symbols = symtable.symtable(path.read_text("utf-8"), str(path), "exec").get_symbols()
    return {one.get_name() for one in symbols if one.is_assigned() or one.is_imported()}
