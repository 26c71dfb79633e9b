"""Devices: where a script puts its tensors, and the ranks that launchers give."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.literals import argument, constant
from unipar.migrate.plan import Plan
from unipar.migrate.source import Source
from unipar.migrate.tree import inside

LOCAL_RANK = "unipar:local_rank"
_ENVIRONMENT = {"LOCAL_RANK": "local_rank", "RANK": "rank", "WORLD_SIZE": "size",
                "LOCAL_WORLD_SIZE": "local_size"}  # fmt: skip
_TEXTS = (cst.SimpleString, cst.FormattedString)
_OTHERS = ("cpu", "mps", "xpu")
_ASKING = ("torch.cuda.is_available", "torch.backends.mps.is_available", "torch.xpu.is_available",
           "torch.accelerator.is_available")  # fmt: skip


def rewrite_devices(plan: Plan) -> None:
    """Replace what picks a device by ``script.device()``.

    A script that never leaves the CPU stays there, for its tensors do.
    """
    found = False
    for source, call in plan.calls("torch.device"):
        given = argument(call, 0, "type")
        if given is not None and constant(given) == "cpu":
            continue
        if _is_literal_cuda(given) or not _is_plain_constant(given):
            found = True
            if given is not None and "args" in source.code(given):
                plan.tell(call, "unipar.yaml's `device` decides now, not the command line.")
            plan.replace(call, "script.device()")
    for source in plan.sources:
        for node in source.nodes:
            if isinstance(node, cst.IfExp):
                chosen = _picks(plan, node)
            else:
                chosen = isinstance(node, _TEXTS) and _names_device(source, node)
            found |= chosen
            if chosen and not _is_settled(plan, source, node):
                plain = not any(isinstance(one, cst.FormattedString) for one in inside(node))
                plan.replace(node, "script.device().type" if plain else "str(script.device())")
    found |= _rewrite_moves(plan)
    for _, call in plan.calls("torch.cuda.set_device"):
        found = True
        plan.drop(call)
    if not found:
        plan.config["device"] = "cpu"


def rewrite_environment(plan: Plan) -> None:
    """Replace what is read of a launcher's variables by what any launcher tells."""
    for source in plan.sources:
        for node in source.nodes:
            name = _variable(plan, node)
            if name is None or not isinstance(node, cst.BaseExpression):
                continue
            outer = source.parent(source.parent(node) or node)
            text = f"script.placement().{_ENVIRONMENT[name]}"
            if isinstance(outer, cst.Call) and "int" in plan.flow.names(outer.func):
                plan.replace(outer, text)
            elif not isinstance(source.parent(node), cst.AssignTarget):
                plan.replace(node, f"str({text})")
        for node in source.all(cst.Assign):
            target = node.targets[0].target
            if isinstance(target, cst.Subscript) and _key(target) in ("MASTER_ADDR", "MASTER_PORT"):
                source.remove(node)


def _variable(plan: Plan, node: cst.CSTNode) -> str | None:
    """The launcher's variable that an expression reads."""
    if isinstance(node, cst.Subscript):
        key = _key(node) if "os.environ" in plan.flow.names(node.value) else None
        return key if isinstance(key, str) and key in _ENVIRONMENT else None
    if isinstance(node, cst.Call) and plan.flow.names(node.func) & {"os.environ.get", "os.getenv"}:
        key = constant(argument(node, 0, "key"))
        return key if key in _ENVIRONMENT else None
    return None


def _key(node: cst.Subscript) -> object:
    index = node.slice[0].slice
    return constant(index.value) if isinstance(index, cst.Index) else None


def _rewrite_moves(plan: Plan) -> bool:
    found = False
    for source, call, func in plan.methods("cuda", "to"):
        if plan.flow.names(func) or plan.flow.functions(func):
            continue
        if func.attr.value == "cuda":
            found = True
            rest = [one for one in call.args if one.keyword and one.keyword.value != "device"]
            more = "".join(f", {source.code(one)}" for one in rest)
            plan.replace(call, func.value, f".to(script.device(){more})")
            continue
        where = argument(call, 0, "device")
        if where is None:
            continue
        names = plan.flow.names(where)
        if _is_literal_cuda(where) or LOCAL_RANK in names or _reads_local_rank(plan, where):
            found = True
            plan.replace(where, "script.device()")
    return found


def _reads_local_rank(plan: Plan, node: cst.BaseExpression) -> bool:
    """Return whether a value is the local rank, as an integer device."""
    for one in plan.flow.values(node):
        call = one.node
        given = call.args[:1] if isinstance(call, cst.Call) and one.name == "int" else ()
        if any(_variable(plan, arg.value) == "LOCAL_RANK" for arg in given):
            return True
        if one.name in ("torch.distributed.get_rank", "torch.cuda.current_device"):
            return True
    return False


def _picks(plan: Plan, node: cst.BaseExpression) -> bool:
    """Return whether an expression chooses among the names of devices by what there is."""
    if not isinstance(node, cst.IfExp):
        return _is_literal_cuda(node) or constant(node) in _OTHERS or any(
            "torch.accelerator.current_accelerator" in plan.flow.names(one.func)
            for one in inside(node) if isinstance(one, cst.Call)
        )  # fmt: skip
    asks = any(
        name in _ASKING
        for one in inside(node.test) if isinstance(one, cst.Call)
        for name in plan.flow.names(one.func)
    )  # fmt: skip
    return asks and _picks(plan, node.body) and _picks(plan, node.orelse)


def _names_device(source: Source, node: cst.BaseExpression) -> bool:
    """Whether a text is the GPU that a variable, parameter or option called device is given."""
    above = source.parent(node)
    named: cst.CSTNode | None = None
    if isinstance(above, cst.Assign):
        named = above.targets[0].target
    elif isinstance(above, cst.AnnAssign):
        named = above.target
    elif isinstance(above, cst.Param):
        named = above.name if above.default is node else None
    elif isinstance(above, cst.DictElement):
        named = above.key if above.value is node else None
    elif isinstance(above, cst.Arg) and above.keyword is not None:
        call = source.parent(above)
        option = above.keyword.value == "default" and isinstance(call, cst.Call)
        named = call.args[0].value if option and isinstance(call, cst.Call) else above.keyword
    return (
        named is not None
        and source.code(named).strip("'\"").endswith("device")
        and _is_literal_cuda(node)
    )


def _is_settled(plan: Plan, source: Source, node: cst.CSTNode) -> bool:
    """Return whether a choice of a device is part of another one, or of a ``torch.device``."""
    above = source.parent(node)
    if isinstance(above, cst.IfExp):
        return _picks(plan, above)
    call = source.parent(above) if above is not None else None
    return isinstance(call, cst.Call) and "torch.device" in plan.flow.names(call.func)


def _is_literal_cuda(node: cst.BaseExpression | None) -> bool:
    if isinstance(node, cst.FormattedString):
        first = node.parts[0] if node.parts else None
        return isinstance(first, cst.FormattedStringText) and first.value.startswith("cuda")
    value = constant(node)
    return isinstance(value, str) and value.startswith("cuda")


def _is_plain_constant(node: cst.BaseExpression | None) -> bool:
    return constant(node) is not None
