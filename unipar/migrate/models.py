"""Optimizers, and the models that they update."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.expressions import WRAPPERS, Origin, Values
from unipar.migrate.flow import Flow
from unipar.migrate.groups import collected, models_behind, sorted_into
from unipar.migrate.literals import argument
from unipar.migrate.plan import Plan
from unipar.migrate.source import Source
from unipar.migrate.tree import inside

# What is done with the parameters of a model that is trained, beside building its optimizer.
_TRAINING = ("clip_grad_norm_", "clip_grad_value_", "clip_gradients", "DistributedOptimizer")


def find_models(plan: Plan) -> None:
    """Fill in ``plan.models``, as far as can be seen: a face knows them when the program runs."""
    for source in plan.sources:
        for call in source.all(cst.Call):
            made = [one for one in plan.flow.values(call) if one.node is call]
            models = _trained_by(plan, call)
            if any(is_optimizer(one) for one in made):
                models.append(_model_of(plan, source, call))
            if any(one.name.endswith(WRAPPERS) for one in made):
                models.append(argument(call, 0, "module"))
            for model in models:
                if model is not None:
                    plan.flow.instantiate(model)
                    plan.models |= {one for one in plan.flow.values(model) if one.kind == "call"}


def _trained_by(plan: Plan, call: cst.Call) -> list[cst.BaseExpression | None]:
    """The models whose parameters a call is given because they are trained.

    Their optimizer may be built in a file that is not read.
    """
    func = call.func
    name = func.attr if isinstance(func, cst.Attribute) else func
    if not isinstance(name, cst.Name) or name.value not in _TRAINING:
        return []
    return [
        _whole(plan.flow, one.func.value)
        for each in call.args
        for one in _parameter_calls(each.value)
        if isinstance(one.func, cst.Attribute)
    ]


def is_optimizer(origin: Origin) -> bool:
    """Return whether a call builds an optimizer."""
    name = origin.name
    if origin.kind != "call" or not isinstance(origin.node, cst.Call):
        return False
    if name.startswith(("torch.optim.", "colossalai.nn.optimizer.")):
        last = name.rpartition(".")[2]
        return last[:1].isupper() and ".lr_scheduler." not in name and ".swa_utils" not in name
    func = origin.node.func
    if not name and isinstance(func, cst.Attribute):
        # A method of what is not read, such as a model's configure_optimizers().
        return "optimizer" in func.attr.value
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
    models = [
        _whole(plan.flow, one.func.value) for one in calls if isinstance(one.func, cst.Attribute)
    ]
    models += [_whole(plan.flow, one) for one in behind]
    return models[0] if len({source.code(one) for one in models}) == 1 else None


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
