"""Optimizers, the models that they update, and the calls of those models."""

from __future__ import annotations

from collections.abc import Mapping

import libcst as cst

from unipar.migrate.branches import exclusive
from unipar.migrate.expressions import Origin, Values
from unipar.migrate.flow import Flow
from unipar.migrate.groups import collected, defer, models_behind, sorted_into
from unipar.migrate.literals import argument
from unipar.migrate.plan import Plan
from unipar.migrate.precision import under_autocast, without_gradients
from unipar.migrate.source import Source
from unipar.migrate.tree import inside

DDP = ("torch.nn.parallel.DistributedDataParallel", "torch.nn.DistributedDataParallel",
       "torch.nn.parallel.distributed.DistributedDataParallel")  # fmt: skip
FSDP = ("torch.distributed.fsdp.FullyShardedDataParallel",
        "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel")  # fmt: skip
_NO_FACTORY = (cst.Await, cst.NamedExpr, cst.Yield)


def find_optimizers(plan: Plan, *, refuses: bool = True) -> None:
    """Fill in ``plan.optimizers`` and ``plan.models``.

    Args:
        plan: the program.
        refuses: whether to refuse what no engine can hold, or cannot be seen; a face does so when
            the program runs.
    """
    seen: dict[Origin, list[cst.Call]] = {}
    for source in plan.sources:
        for call in source.all(cst.Call):
            for one in plan.flow.values(call):
                if one.node is not call or not is_optimizer(one) or call in plan.handled:
                    continue
                model = _model_of(plan, source, call)
                if model is None:
                    continue
                plan.flow.instantiate(model)
                owned = {o for o in plan.flow.values(model) if o.kind == "call"}
                if not owned and refuses:
                    plan.refuse(
                        call,
                        f"it cannot be seen what `{source.code(model)}` is.",
                        "Give migrate the file that builds it too.",
                    )
                others = {each for o in owned for each in seen.get(o, ())} - {call}
                if refuses and any(
                    plan.flow.source(each) is not source or not exclusive(source, each, call)
                    for each in others
                ):
                    plan.refuse(
                        call,
                        "a second optimizer over the same model; an engine has one.",
                        "Use parameter groups of one optimizer.",
                    )
                for o in owned:
                    seen.setdefault(o, []).append(call)
                plan.models |= owned
                plan.optimizers[one] = model


def is_optimizer(origin: Origin) -> bool:
    """Return whether a call builds an optimizer."""
    name = origin.name
    if origin.kind != "call" or not isinstance(origin.node, cst.Call):
        return False
    if name.startswith(("torch.optim.", "colossalai.nn.optimizer.")):
        last = name.rpartition(".")[2]
        return last[:1].isupper() and ".lr_scheduler." not in name and ".swa_utils" not in name
    first = origin.node.args[0].value if origin.node.args else None
    last = name.rpartition(".")[2]
    return (
        (last[:1].isupper() or "optim" in last)
        and isinstance(first, cst.Call)
        and isinstance(first.func, cst.Attribute)
        and first.func.attr.value == "parameters"
        and not name.startswith("torch.")
    )


def optimizers_of(values: Values) -> set[Origin]:
    """The optimizers among some values."""
    return {one for one in values if is_optimizer(one)}


def _parameter_calls(node: cst.CSTNode) -> list[cst.Call]:
    """The calls of ``parameters()`` and ``named_parameters()`` in an expression."""
    return [
        one for one in inside(node)
        if isinstance(one, cst.Call)
        and isinstance(one.func, cst.Attribute)
        and one.func.attr.value in ("parameters", "named_parameters")
    ]  # fmt: skip


def _model_of(plan: Plan, source: Source, call: cst.Call) -> cst.BaseExpression | None:
    """The expression for the model that an optimizer is built over."""
    given = argument(call, 0, "params")
    if given is None:
        return None
    calls, behind = _parameter_calls(given), models_behind(plan, given)
    gone_through = [one.value for one in collected(plan, source, given)]
    for one in gone_through or (() if calls or behind else sorted_into(source, given)):
        calls += _parameter_calls(one)
        behind += models_behind(plan, one)
    if not calls and not behind:
        plan.refuse(
            call,
            "it cannot be seen which model's parameters these are.",
            "Write model.parameters() where the optimizer is built.",
        )
        return None
    models = [
        _whole(plan.flow, one.func.value) for one in calls if isinstance(one.func, cst.Attribute)
    ]
    models += [_whole(plan.flow, one) for one in behind]
    if len({source.code(one) for one in models}) > 1:
        plan.refuse(
            call,
            "one optimizer over several models; an engine holds one.",
            "Put the models into one nn.Module that calls them, or give each its optimizer.",
        )
        return None
    return models[0]


def _whole(flow: Flow, node: cst.BaseExpression) -> cst.BaseExpression:
    """The model that a part (``model.backbone``, ``model[0]``) belongs to."""
    chain: list[cst.BaseExpression] = [node]
    while isinstance(chain[-1], (cst.Attribute, cst.Subscript)):
        chain.append(chain[-1].value)
    for one in reversed(chain):
        made = [o for o in flow.values(one) if o.kind == "call"]
        if made and all(flow.is_module(o) for o in made):
            return one
    return node


def holds_wrapper(flow: Flow, node: cst.BaseExpression) -> bool:
    """Return whether an expression may be a wrapper of a module, or that module."""
    return any(one.name in (*DDP, *FSDP) for one in flow.values(node))


def rewrite_optimizers(plan: Plan, clipped: Mapping[Origin, str]) -> None:
    """Build each optimizer once the strategy has the model: ``script.prepare(...).optimizer``."""
    # A call has several origins where it is seen to be of one class or of another.
    for call, (origin, model) in {one.node: (one, m) for one, m in plan.optimizers.items()}.items():
        assert isinstance(call, cst.Call)
        source = plan.flow.source(call)
        if any(isinstance(one, _NO_FACTORY) for one in inside(call)):
            plan.refuse(call, "this cannot stand in a function.", "Compute it beforehand.")
        defer(plan, source, call.args[0].value)
        calls = _parameter_calls(call.args[0].value)
        single = calls[0] if len(calls) == 1 else None
        used = {one.value for one in inside(call) if isinstance(one, cst.Name)}
        name = next(one for one in ("_", "__", "_unused", "_parameters") if one not in used)
        given = "named" if "named" not in used else "named_parameters_"
        if single is not None and isinstance(single.func, cst.Attribute):
            whole = source.code(single.func.value) == source.code(model)
            plain = single.func.attr.value == "parameters" and not single.args
            if whole and plain:
                plan.replace(single, f"[p for _, p in {given}]")
                name = given
        clip: list[str | cst.CSTNode] = []
        if origin in clipped:
            clip = [", max_grad_norm=", clipped[origin]]
        elif origin in plan.norms:
            clip = [", max_grad_norm=", plan.norms[origin]]
        plan.replace(
            call, "script.prepare(", model, f", optimizer=lambda {name}: ", call, *clip,
            ").optimizer",
        )  # fmt: skip


def rewrite_calls(plan: Plan, *, wrapped: bool, in_autocast: bool) -> None:
    """Let calls of the trained models go through their engines.

    Args:
        plan: the program.
        wrapped: only calls of wrappers; a call of the module inside goes around them.
        in_autocast: only calls under autocast, since an engine computes in the run's precision;
            others are refused, but for those without gradients.
    """
    reached: set[Origin] = set()
    for source in plan.sources:
        for call in source.all(cst.Call):
            if isinstance(call.func, cst.Call):
                continue
            values = plan.flow.values(call.func)
            owned = values & plan.models
            inner = isinstance(call.func, cst.Attribute) and call.func.attr.value == "module"
            if not owned or inner or _before_prepared(plan, source, call, owned):
                continue
            if wrapped and not holds_wrapper(plan.flow, call.func):
                continue
            if not in_autocast or under_autocast(plan, source, call):
                plan.replace(call.func, f"{plan.words.engine}(", call.func, ")")
                reached |= owned
            elif not without_gradients(plan, source, call):
                plan.refuse(
                    call, "the script has autocast, and this forward pass, which may be trained "
                    "on, is not seen to be under it; an engine computes all of them in one "
                    "precision.",
                    "Write `with torch.autocast(...):` around it, in the same function; with "
                    "enabled=args.amp, where a flag decides, in place of two branches. What only "
                    "evaluates goes under torch.no_grad().",
                )  # fmt: skip
                reached |= owned
    for origin, model in plan.optimizers.items():
        owned = plan.flow.values(model) & plan.models
        if owned and not owned & reached and origin.node is not None:
            plan.refuse(
                origin.node,
                "no call of its model is seen, so the gradients' way cannot be followed.",
                "Call the model as model(...) where the loss is computed.",
            )


def _before_prepared(plan: Plan, source: Source, call: cst.Call, owned: Values) -> bool:
    """Return whether a call stands before the model's optimizer, in the same function."""
    for origin, model in plan.optimizers.items():
        node = origin.node
        if node is None or not plan.flow.values(model) & owned or plan.flow.source(node) != source:
            continue
        same = source.function(node) is source.function(call)
        if same and source.span(call)[0] < source.span(node)[0] and not source.loops(node):
            return True
    return False
