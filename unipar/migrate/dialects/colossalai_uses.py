"""What a script does with its Booster, its plugin, and Colossal-AI's functions."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.dialects.colossalai_plugins import BOOSTER, plugin_names
from unipar.migrate.leftovers import Leftovers
from unipar.migrate.literals import argument, constant
from unipar.migrate.models import optimizers_of
from unipar.migrate.plan import Clip, Plan
from unipar.migrate.source import Source

_BOOST = ("model", "optimizer", "criterion", "dataloader", "lr_scheduler")
SAVES = ("save_model", "save_optimizer", "save_lr_scheduler")
_SAVED = (*SAVES, "load_model", "load_optimizer", "load_lr_scheduler")
_LAUNCHES = ("launch_from_torch", "launch_from_slurm", "launch_from_openmpi")
_ADAM = ("HybridAdam", "CPUAdam", "FusedAdam")
_NAMED = {
    "colossalai.cluster.DistCoordinator": "boosted.Coordinator",
    "colossalai.cluster.dist_coordinator.DistCoordinator": "boosted.Coordinator",
    "colossalai.logging.get_dist_logger": "boosted.get_dist_logger",
    "colossalai.logging.logger.get_dist_logger": "boosted.get_dist_logger",
}
_DEVICES = ("colossalai.utils.get_current_device", "colossalai.utils.device.get_current_device")
_ACCELERATOR = ("colossalai.accelerator.get_accelerator",
                "colossalai.accelerator.api.get_accelerator")  # fmt: skip
# Of get_accelerator(), what torch.cuda has too, and answers without a GPU.
_MEMORY = ("empty_cache", "max_memory_allocated", "max_memory_reserved", "memory_allocated",
           "memory_reserved")  # fmt: skip
_SILENCING = ("colossalai.logging.disable_existing_loggers",
              "colossalai.logging.logger.disable_existing_loggers")  # fmt: skip
_BY_HAND = "Port it by hand (docs/how-to/own-loop.md)."


def rewrite_uses(plan: Plan, left: Leftovers) -> None:
    """Rewrite every use of the booster, of the plugin, and of what they have wrapped."""
    for source in plan.sources:
        for node in source.all(cst.Attribute):
            above = source.parent(node)
            call = above if isinstance(above, cst.Call) and above.func is node else None
            values = plan.flow.values(node.value)
            if plan.made_by(values, *BOOSTER):
                _rewrite_booster(plan, source, node, call)
            elif plan.made_by(values, *plugin_names()) or _is_boosters_plugin(plan, node.value):
                _rewrite_plugin(plan, node, call)
            elif optimizers_of(values) and call is not None:
                _rewrite_wrapper(plan, node, call)
            elif values & plan.models and node.attr.value == "unwrap" and call is not None:
                plan.handled.add(call)
                plan.replace(call, node.value)


def _is_boosters_plugin(plan: Plan, node: cst.BaseExpression) -> bool:
    return (
        isinstance(node, cst.Attribute)
        and node.attr.value == "plugin"
        and plan.made_by(plan.flow.values(node.value), *BOOSTER)
    )


def _rewrite_booster(
    plan: Plan, source: Source, node: cst.Attribute, call: cst.Call | None
) -> None:
    name = node.attr.value
    if call is not None:
        plan.handled.add(call)
    if name == "boost" and call is not None:
        _rewrite_boost(plan, source, call)
    elif name == "backward" and call is not None and len(call.args) == 2:
        plan.losses[call] = call.args[0].value
    elif name == "no_sync" and call is not None:
        plan.replace(call, "script.no_sync()")
    elif name in _SAVED and call is not None and len(call.args) >= 2:
        _rewrite_file(plan, call, name)
    elif name == "execute_pipeline":
        plan.refuse(
            node, "a pipeline's schedule takes whole steps, forward and backward passes of all "
            "micro-batches.", "Port it to engine.train_step(batch, loss_fn) by hand.",
        )  # fmt: skip
    elif name == "plugin" and isinstance(source.parent(node), cst.Attribute):
        return  # What is asked of it is rewritten as of any plugin.
    else:
        plan.refuse(node, f"`{name}` of a Booster has no counterpart.", _BY_HAND)


def _rewrite_boost(plan: Plan, source: Source, call: cst.Call) -> None:
    above = source.parent(call)
    target = above.targets[0].target if isinstance(above, cst.Assign) else None
    if not isinstance(target, (cst.Tuple, cst.List)) or len(target.elements) != len(_BOOST):
        plan.refuse(
            call, "what it gives back is not taken apart here.",
            "Write model, optimizer, criterion, dataloader, lr_scheduler = booster.boost(...).",
        )  # fmt: skip
        return
    kept: list[tuple[cst.BaseExpression, cst.BaseExpression | None]] = []
    for index, name in enumerate(_BOOST):
        given = argument(call, index, name)
        bound = target.elements[index].value
        plain = source.code(bound)
        trained = given is not None and plan.flow.values(given) & plan.models
        if name == "model" and not trained and source.code(bound) != "_":
            plan.refuse(
                call, "it boosts a model that no optimizer updates.",
                "Move it to the device instead: model.to(device).",
            )  # fmt: skip
        if plain != "_" and (given is None or plain != source.code(given)):
            kept.append((bound, given))
    assert isinstance(above, cst.Assign)
    if not kept:
        source.remove(above)
        return
    parts: list[str | cst.CSTNode] = []
    for index, (bound, _) in enumerate(kept):
        parts += [", ", bound] if index else [bound]
    parts.append(" = ")
    for index, (_, given) in enumerate(kept):
        parts += [", "] if index else []
        parts.append("None" if given is None else given)
    plan.replace(above, *parts)


def _rewrite_file(plan: Plan, call: cst.Call, name: str) -> None:
    plan.replace(call, f"boosted.{name}(", call.args[0].value, ", ", call.args[1].value, ")")
    if constant(argument(call, 2, "shard")) is True:
        plan.tell(
            call, "it was a directory of shards; now it is one file, of whole tensors.",
            "boosted.load_model, and torch.load, read it.",
        )  # fmt: skip
    elif name == "save_optimizer":
        plan.tell(call, "the state is by the names of parameters now, not by their numbers.")
    elif name == "load_optimizer":
        plan.tell(call, "files of before, by the numbers of parameters, are not read.")


def _rewrite_plugin(plan: Plan, node: cst.Attribute, call: cst.Call | None) -> None:
    if node.attr.value == "prepare_dataloader" and call is not None:
        plan.handled.add(call)
        if argument(call, None, "distributed_sampler_cls") is not None:
            plan.refuse(call, "it has a sampler of its own.", "Leave distributed_sampler_cls out.")
        plan.replace(node, "boosted.loader")
    else:
        plan.refuse(node, f"`{node.attr.value}` of a plugin has no counterpart.", _BY_HAND)


def _rewrite_wrapper(plan: Plan, node: cst.Attribute, call: cst.Call) -> None:
    """Methods that a boosted optimizer has beside torch's."""
    name = node.attr.value
    if name == "backward" and call.args:
        plan.losses[call] = call.args[0].value
    elif name in ("clip_grad_by_norm", "clip_grad_by_value"):
        norm = argument(call, 0, "max_norm") if name == "clip_grad_by_norm" else None
        held = (plan.optimizers.get(one) for one in plan.flow.values(node.value))
        model = next((one for one in held if one is not None), None)
        plan.clips[call] = Clip(norm, argument(call, 1, "norm_type"), model)
    elif name in ("backward_by_grad", "unscale_and_clip_grads", "get_grad_norm"):
        plan.refuse(node, f"`{name}` is Colossal-AI's own.", _BY_HAND)


def rewrite_names(plan: Plan, left: Leftovers) -> None:
    """Rewrite functions and classes that are called by their names."""
    for source in plan.sources:
        for call in source.all(cst.Call):
            names = plan.flow.names(call.func)
            last = {one.rpartition(".")[2] for one in names if one.startswith("colossalai.")}
            known = next((_NAMED[one] for one in names if one in _NAMED), None)
            if known is not None:
                plan.replace(call.func, known)
                plan.handled.add(call)
                left.settle(call.func)
            elif last & {*_LAUNCHES}:
                _rewrite_launch(plan, source, call)
                left.settle(call.func)
            elif last & set(_ADAM):
                _rewrite_adam(plan, source, call)
                left.settle(call.func)
            elif names & set(_DEVICES) or _asked(plan, call) == "get_current_device":
                plan.replace(call, "script.device()")
                left.settle(call)
            elif _asked(plan, call) in _MEMORY:
                plan.replace(call.func, f"torch.cuda.{_asked(plan, call)}")
                plan.use(source, "import torch")
                left.settle(call.func)
            elif names & set(_SILENCING):
                plan.drop(call)
                left.settle(call)
        for node in (*source.all(cst.Name), *source.all(cst.Attribute)):
            if any(isinstance(one, cst.Annotation) for one in source.around(node)):
                _rewrite_annotation(plan, left, node)


def _rewrite_annotation(plan: Plan, left: Leftovers, node: cst.Name | cst.Attribute) -> None:
    """Let an annotation say what takes a type's place: ``None`` for boosters and plugins."""
    names = plan.flow.names(node)
    known = next((_NAMED[one] for one in names if one in _NAMED), None)
    if known is None and any(
        one.startswith("colossalai.booster.") and one.rpartition(".")[2][:1].isupper()
        for one in names
    ):
        known = "None"
    if known is not None:
        plan.replace(node, known)
        left.settle(node)


def _asked(plan: Plan, call: cst.Call) -> str:
    """The method of ``get_accelerator()`` that is called; nothing if it is none."""
    func = call.func
    if not isinstance(func, cst.Attribute):
        return ""
    owner = plan.made_by(plan.flow.values(func.value), *_ACCELERATOR)
    return func.attr.value if owner else ""


def _rewrite_launch(plan: Plan, source: Source, call: cst.Call) -> None:
    index = 1 if "launch_from_torch" in source.code(call.func) else 3
    seed = argument(call, index, "seed")
    plan.handled.add(call)
    if seed is None:
        plan.replace(call, "boosted.launch()")
    else:
        plan.replace(call, "boosted.launch(seed=", seed, ")")


def _rewrite_adam(plan: Plan, source: Source, call: cst.Call) -> None:
    plain = ("lr", "betas", "eps", "weight_decay")
    adam = constant(argument(call, None, "adamw_mode")) is False
    for index, one in enumerate(call.args):
        name = one.keyword.value if one.keyword is not None else ("params", "lr", "")[min(index, 2)]
        if name == "adamw_mode" and constant(one.value) is not None and index:
            before = source.span(call.args[index - 1].value)[1]
            source.edits.replace((before, source.span(one.value)[1]), "")
        elif name not in ("params", *plain):
            plan.refuse(
                call, f"torch.optim.AdamW has no counterpart of `{source.code(one)}`.",
                "Leave it out, and give the others by their names.",
            )  # fmt: skip
    plan.replace(call.func, f"torch.optim.{'Adam' if adam else 'AdamW'}")
    plan.use(source, "import torch")
    if argument(call, None, "weight_decay") is None and call.args:
        end = source.span(call.args[-1].value)[1]
        source.edits.insert(end, ", weight_decay=0.0")
