"""DeepSpeed's configuration, wherever a script has it: a JSON file or a dict of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

import libcst as cst

from unipar.migrate.history import last_write
from unipar.migrate.literals import argument, constant
from unipar.migrate.plan import Plan
from unipar.migrate.tree import inside

_KNOWN = {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization",
          "gradient_accumulation_steps"}  # fmt: skip


Table = cst.Dict | cst.Call


class Config:
    """Settings by their keys; values are plain, or expressions of the script.

    Args:
        values: nested mappings.
        file: the JSON file that they stand in; empty where they stand in the script.
    """

    def __init__(self, values: Mapping[str, Any], file: str = "") -> None:
        self.values, self.file = values, file

    def section(self, key: str) -> Mapping[str, Any]:
        """The settings below a key; none where there is no such."""
        found = self.values.get(key)
        return found if isinstance(found, Mapping) else {}


def find_config(plan: Plan, call: cst.Call) -> Config | None:
    """The configuration that ``deepspeed.initialize`` is given; refused where it is not seen."""
    given = argument(call, 10, "config") or argument(call, 12, "config_params")
    if given is None or plan.flow.source(given).code(given) == "None":
        return _named_on_command_line(plan, call)
    file = constant(given)
    dicts = _tables(plan, given)
    _check_untouched(plan, given, dicts)
    if len(dicts) == 1:
        return Config(_Reader(plan, given).mapping(dicts[0]))
    if not isinstance(file, str) and not dicts:
        file = _file_of(plan, given)
    if isinstance(file, str):
        return _read(plan, call, file)
    plan.refuse(
        call, "it cannot be seen which configuration this is.",
        "Write config= as a dict or as the name of a JSON file beside the script.",
    )  # fmt: skip
    return None


def is_table(plan: Plan, node: cst.CSTNode) -> bool:
    """Return whether an expression is written as a dict: ``{"a": b}`` or ``dict(a=b)``."""
    return isinstance(node, cst.Dict) or (
        isinstance(node, cst.Call) and "dict" in plan.flow.names(node.func)
    )


def _tables(plan: Plan, node: cst.BaseExpression) -> list[Table]:
    """The dicts that an expression may hold."""
    made = [one.node for one in plan.flow.values(node)]
    return [
        one for one in made if isinstance(one, (cst.Dict, cst.Call)) and is_table(plan, one)
    ]  # fmt: skip


def default_of(plan: Plan, name: str) -> str | None:
    """Return argparse's value of an option that is not on the command line, if it is text."""
    for _, call, _ in plan.methods("add_argument"):
        flags = [constant(one.value) for one in call.args if one.keyword is None]
        if f"--{name}" in flags or f"--{name.replace('_', '-')}" in flags:
            default = constant(argument(call, None, "default"))
            return default if isinstance(default, str) else None
    return None


def _named_on_command_line(plan: Plan, call: cst.Call) -> Config | None:
    default = default_of(plan, "deepspeed_config")
    if default is not None:
        return _read(plan, call, default)
    found = [name for name, text in plan.settings.items() if _is_configuration(text)]
    if len(found) == 1:
        return _read(plan, call, found[0])
    which = f"there are {', '.join(found)}" if found else "no JSON file of DeepSpeed's is there"
    plan.refuse(
        call,
        f"the command line names the configuration, and beside the script {which}.",
        "Write config=\"ds_config.json\" here, or keep only that file there.",
    )  # fmt: skip
    return None


def _is_configuration(text: str) -> bool:
    try:
        values = json.loads(text)
    except ValueError:
        return False
    return isinstance(values, dict) and bool(_KNOWN & values.keys())


def _read(plan: Plan, call: cst.Call, file: str) -> Config | None:
    name = PurePosixPath(file).name
    found = [path for path in plan.settings if path == file or PurePosixPath(path).name == name]
    if len(found) != 1:
        plan.refuse(
            call, f"{file} is not found beside the script.",
            "Put it there, or migrate the directory that holds both.",
        )  # fmt: skip
        return None
    try:
        values = json.loads(plan.settings[found[0]])
    except ValueError as error:
        plan.refuse(call, f"{found[0]} is no JSON: {error}.", "Mend it.")
        return None
    if not isinstance(values, dict):
        plan.refuse(call, f"{found[0]} holds no settings.", "Name DeepSpeed's configuration.")
        return None
    return Config(values, name)


def _file_of(plan: Plan, given: cst.BaseExpression) -> str | None:
    """The JSON file that an expression names or has been read from."""
    if isinstance(given, cst.Attribute):
        text = default_of(plan, given.attr.value)
        if text is not None:
            return text
    if isinstance(given, cst.Name):
        return _file_of_name(plan, given)
    if isinstance(given, cst.Call):
        names = plan.flow.names(given.func)
        if names & {"json.load", "open", "pathlib.Path", "str"} and given.args:
            inner = given.args[0].value
            return constant(inner) or _file_of(plan, inner)
    return None


def _file_of_name(plan: Plan, given: cst.Name) -> str | None:
    source = plan.flow.source(given)
    values: list[cst.BaseExpression] = [
        one.value for one in source.all(cst.Assign)
        if any(isinstance(t.target, cst.Name) and t.target.value == given.value
               for t in one.targets)
    ]  # fmt: skip
    values += [
        one.item for one in source.all(cst.WithItem)
        if one.asname is not None and source.code(one.asname.name) == given.value
    ]  # fmt: skip
    if len(values) != 1 or values[0] is given:
        return None
    text = constant(values[0])
    return text if isinstance(text, str) else _file_of(plan, values[0])


def _check_untouched(plan: Plan, given: cst.BaseExpression, tables: list[Table]) -> None:
    """Refuse a configuration that is changed after it was written or read, however deep in it."""
    parts = {one for table in tables for one in inside(table)}
    # What is read from a file is known by its name alone.
    name = given.value if isinstance(given, cst.Name) and not tables else None
    for source in plan.sources:
        for one in source.all(cst.Subscript):
            above = source.parent(one)
            target = isinstance(above, cst.AssignTarget) or (
                isinstance(above, (cst.AugAssign, cst.AnnAssign)) and above.target is one
            )
            if target and _is_of(plan, one.value, parts, name):
                _refuse_change(plan, one)
    for _, call, func in plan.methods("update", "setdefault", "pop"):
        if _is_of(plan, func.value, parts, name):
            _refuse_change(plan, call)


def _is_of(plan: Plan, node: cst.BaseExpression, parts: set[cst.CSTNode], name: str | None) -> bool:
    """Return whether an expression may be a configuration, or a part of it."""
    for _ in range(20):
        held = any(one.node in parts for one in plan.flow.values(node))
        if held or (isinstance(node, cst.Name) and node.value == name):
            return True
        if isinstance(node, cst.Subscript):
            node = node.value
            continue
        write = last_write(plan.flow.source(node), node)
        if write is None or write.value is node:
            break
        node = write.value
    return False


def _refuse_change(plan: Plan, node: cst.CSTNode) -> None:
    plan.refuse(
        node, "the configuration is changed after it was written.", "Write the value into it.",
    )  # fmt: skip


class _Reader:
    """Reads a dict of the script's, in the words of the place where it is used.

    Args:
        plan: the program.
        given: the expression for it there, which may be a call of the function that holds it.
    """

    def __init__(self, plan: Plan, given: cst.BaseExpression) -> None:
        self._plan, self._call = plan, given if isinstance(given, cst.Call) else None

    def mapping(self, node: Table) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for one in node.args if isinstance(node, cst.Call) else node.elements:
            key: Any = None
            if isinstance(one, cst.Arg) and one.keyword is not None:
                key = one.keyword.value
            elif isinstance(one, cst.DictElement):
                key = constant(one.key)
            if not isinstance(key, str):
                self._plan.refuse(
                    node, "not all keys of the configuration are seen.", "Write them out."
                )
                continue
            found[key] = self._value(one.value)
        return found

    def _value(self, node: cst.BaseExpression) -> Any:
        node = self._argument(node)
        held = _tables(self._plan, node)
        if len(held) == 1:
            return self.mapping(held[0])
        value = literal(node)
        return node if value is None and not _is_none(node) else value

    def _argument(self, node: cst.BaseExpression) -> cst.BaseExpression:
        """What a parameter of the function around the dict is called with."""
        if not isinstance(node, cst.Name) or self._call is None:
            return node
        source = self._plan.flow.source(node)
        function = source.function(node)
        if function not in self._plan.flow.functions(self._call.func):
            return node
        assert isinstance(function, cst.FunctionDef)
        skip = int(source.class_(function) is not None and not function.decorators)
        for index, one in enumerate(function.params.params):
            if one.name.value == node.value:
                given = argument(self._call, index - skip, node.value)
                return given or one.default or node
        return node


def literal(node: cst.CSTNode) -> Any:
    """The value of a literal, also of lists and negative numbers; ``None`` where it is none."""
    if isinstance(node, (cst.List, cst.Tuple)):
        values = [literal(one.value) for one in node.elements]
        return None if any(one is None for one in values) else values
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Minus):
        value = literal(node.expression)
        return -value if isinstance(value, (int, float)) else None
    return constant(node)


def settled(plan: Plan, values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the values of variables that are given a literal once."""
    found = dict(values)
    for key, value in values.items():
        if isinstance(value, cst.BaseExpression):
            write = last_write(plan.flow.source(value), value)
            if write is not None and write.operator is None and literal(write.value) is not None:
                found[key] = literal(write.value)
    return found


def _is_none(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Name) and node.value == "None"


def same_words(plan: Plan, given: cst.BaseExpression | None, node: cst.Name) -> bool:
    """Return whether a parameter of the function around a dict gets a variable of its name."""
    if not isinstance(given, cst.Call):
        return False
    source = plan.flow.source(node)
    function = source.function(node)
    if not isinstance(function, cst.FunctionDef) or function not in plan.flow.functions(given.func):
        return False
    skip = int(source.class_(function) is not None and not function.decorators)
    for index, one in enumerate(function.params.params):
        value = argument(given, index - skip, one.name.value)
        if one.name.value == node.value and isinstance(value, cst.Name):
            return value.value == node.value
    return False


def expressions(values: Mapping[str, Any]) -> Iterator[cst.BaseExpression]:
    """The expressions of the script among settings."""
    for one in values.values():
        if isinstance(one, Mapping):
            yield from expressions(one)
        elif isinstance(one, cst.BaseExpression):
            yield one
