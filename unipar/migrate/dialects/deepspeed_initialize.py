"""``deepspeed.initialize`` and its configuration."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.dialects.deepspeed_config import (
    Config,
    default_of,
    expressions,
    find_config,
    is_table,
    same_words,
)
from unipar.migrate.dialects.deepspeed_settings import optimizer_text, scheduler_text, translate
from unipar.migrate.groups import defer
from unipar.migrate.leftovers import Leftovers
from unipar.migrate.literals import argument
from unipar.migrate.models import optimizers_of
from unipar.migrate.plan import Plan
from unipar.migrate.source import Source
from unipar.migrate.tree import inside

_ORDER = ("args", "model", "optimizer", "model_parameters", "training_data", "lr_scheduler",
          "distributed_port", "mpu", "dist_init_required", "collate_fn", "config", "mesh_param",
          "config_params")  # fmt: skip
_DROPPED = ("args", "distributed_port", "dist_init_required", "config", "config_params")
_KEPT = ("training_data", "collate_fn", "lr_scheduler")


def rewrite_initialize(plan: Plan, left: Leftovers) -> None:
    """Rewrite the call, and put its configuration where it belongs.

    Args:
        plan: the program; its optimizers are known.
        left: notes what is dealt with.
    """
    found = plan.calls("deepspeed.initialize")
    if len(found) > 1:
        plan.refuse(
            found[1][1], "there are two engines, and the strategy deepspeed has one in a run.",
            "Port this by hand (docs/how-to/own-loop.md).",
        )  # fmt: skip
    config = None
    for source, call in found[:1]:
        config = find_config(plan, call)
        if config is not None:
            _rewrite(plan, source, call, config)
        left.settle(call.func)
    for _, call in plan.calls("deepspeed.add_config_arguments"):
        file = config.file if config is not None and default_of(plan, "deepspeed_config") is None \
            else ""  # fmt: skip
        given = argument(call, 0, "parser")
        if given is not None:
            tail = f', "{file}")' if file else ")"
            plan.replace(call, "stepped.add_config_arguments(", given, tail)
            plan.tell(call, "its options are accepted and mean nothing: unipar.yaml decides.")
        left.settle(call.func)


def take_factories(plan: Plan) -> None:
    """Leave the optimizers alone that a function makes of the parameters it is called with."""
    for _, call in plan.calls("deepspeed.initialize"):
        own = argument(call, 2, "optimizer")
        for factory in _factories(plan, own) if own is not None else ():
            plan.handled |= {one for one in inside(factory) if isinstance(one, cst.Call)}


def _factories(plan: Plan, own: cst.BaseExpression) -> list[cst.Lambda | cst.FunctionDef]:
    """The functions of parameters that an optimizer's argument may be."""
    if isinstance(own, cst.Lambda):
        return [own]
    found: list[cst.Lambda | cst.FunctionDef] = [*plan.flow.functions(own)]
    if isinstance(own, cst.Call):
        for function in plan.flow.functions(own.func):
            returned = [one.value for one in inside(function.body) if isinstance(one, cst.Return)]
            found += [one for one in returned if isinstance(one, cst.Lambda)]
    return found


def _rewrite(plan: Plan, source: Source, call: cst.Call, config: Config) -> None:
    given = {
        one.keyword.value if one.keyword is not None else _ORDER[index]: one.value
        for index, one in enumerate(call.args)
        if not one.star
    }
    model = given.get("model")
    if model is None or any(one.star for one in call.args):
        plan.refuse(call, "not all of its arguments are seen.", "Write them out.")
        return
    arguments = translate(plan, call, config)
    _check_visible(plan, source, call, config)
    parts: list[str | cst.CSTNode] = ["stepped.initialize(", model]
    parts += _optimizer(plan, source, call, config, given, arguments)
    if config.section("scheduler"):
        text = scheduler_text(plan, call, config)
        parts.append(f", lr_scheduler={text}")
    for name in _KEPT:
        if name in given and source.code(given[name]) != "None":
            if name == "lr_scheduler" and config.section("scheduler"):
                plan.refuse(call, "there are two schedulers.", "Keep one.")
            parts += [f", {name}=", given[name]]
    for name, value in given.items():
        taken = (*_DROPPED, *_KEPT, "model", "optimizer", "model_parameters")
        if name not in taken and source.code(value) != "None":
            plan.refuse(
                call, f"`{name}` is for other divisions than data parallelism's.", "Leave it out."
            )
    parts += [f", {name}={text}" for name, text in arguments.items()]
    plan.replace(call, *parts, ")")
    wanted = given.get("config") or given.get("config_params")
    written = wanted is not None and is_table(plan, wanted)
    if written or (isinstance(wanted, cst.Name) and _remove(plan, source, wanted)):
        return
    plan.tell(
        call,
        f"{config.file or 'the configuration'} is no longer looked at.",
        "Its settings are in unipar.yaml and in this call.",
    )


def _remove(plan: Plan, source: Source, wanted: cst.Name) -> bool:
    """Take out a dict of settings that nothing else uses."""
    uses = [
        one for one in source.all(cst.Name)
        if one.value == wanted.value and not isinstance(source.parent(one), cst.Attribute)
        and getattr(source.parent(one), "keyword", None) is not one
    ]  # fmt: skip
    for one in uses:
        target = source.parent(one)
        assign = source.parent(target) if isinstance(target, cst.AssignTarget) else None
        if not isinstance(assign, cst.Assign) or len(assign.targets) > 1 or len(uses) > 2:
            continue
        if is_table(plan, assign.value):
            source.remove(assign)
            return True
    return False


def _optimizer(
    plan: Plan, source: Source, call: cst.Call, config: Config,
    given: dict[str, cst.BaseExpression], arguments: dict[str, str],
) -> list[str | cst.CSTNode]:  # fmt: skip
    """The optimizer's argument; one that the script has built is prepared where it is built."""
    own = given.get("optimizer")
    if own is not None and source.code(own) != "None":
        built = optimizers_of(plan.flow.values(own)) & plan.optimizers.keys()
        if built:
            norm = arguments.pop("max_grad_norm", None)
            if norm is not None:
                plan.norms |= dict.fromkeys(built, norm)
            return [", optimizer=", own]
        if _factories(plan, own):
            return [", optimizer=lambda named: (", own, ")([p for _, p in named])"]
        plan.refuse(
            call, "it cannot be seen which optimizer this is.",
            "Give migrate the file that builds it too.",
        )  # fmt: skip
        return []
    if not config.section("optimizer"):
        plan.refuse(call, "there is no optimizer.", "Hand one in, or name one in its settings.")
        return []
    wanted = given.get("model_parameters")
    model = source.code(given["model"])
    plain = wanted is None or source.code(wanted) in (f"{model}.parameters()",
                                                      f"list({model}.parameters())")  # fmt: skip
    if plain or wanted is None:
        text = optimizer_text(plan, call, config, "[p for _, p in named]")
        return [f", optimizer=lambda named: {text}"]
    if not any(
        isinstance(one, cst.Attribute) and one.attr.value in ("parameters", "named_parameters")
        for one in inside(wanted)
    ):
        defer(plan, source, wanted)
    before, _, after = (optimizer_text(plan, call, config, "\0") or "\0").partition("\0")
    return [f", optimizer=lambda _: {before}", wanted, after]


def _check_visible(plan: Plan, source: Source, call: cst.Call, config: Config) -> None:
    """Refuse values of the configuration whose names mean nothing where the engine is made."""
    for value in expressions(config.values):
        home = plan.flow.source(value)
        for one in inside(value):
            if not isinstance(one, cst.Name):
                continue
            parent = home.parent(one)
            if isinstance(parent, cst.Attribute) and parent.attr is one:
                continue
            scope = home.scope(one)
            top = home.scope(home.tree)
            mine = home is source and home.function(one) is source.function(call)
            bound = scope[one.value] if scope is not None else []
            everywhere = home is source and all(b.scope in (top, None) for b in bound)
            given = argument(call, 10, "config") or argument(call, 12, "config_params")
            if not (mine or everywhere or same_words(plan, given, one)):
                plan.refuse(
                    value, "this name means nothing where deepspeed.initialize is called.",
                    "Write the configuration in the same function.",
                )  # fmt: skip
