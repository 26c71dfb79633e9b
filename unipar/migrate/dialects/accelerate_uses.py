"""What a script does with its ``Accelerator``."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.dialects.accelerate_places import answered, rewrite_places
from unipar.migrate.dialects.accelerate_prepare import PREPARING, rewrite_prepare
from unipar.migrate.dialects.accelerate_settings import ACCELERATOR
from unipar.migrate.divisions import warn_of_divisions
from unipar.migrate.expressions import Origin
from unipar.migrate.literals import argument, constant
from unipar.migrate.plan import Clip, Plan
from unipar.migrate.source import Source

_READ = ("device", "num_processes", "process_index", "local_process_index", "is_main_process",
         "is_local_main_process", "is_last_process", "sync_gradients", "mixed_precision",
         "gradient_accumulation_steps", "optimizer_step_was_skipped", "project_dir")  # fmt: skip
# Methods of the run, with the names of the arguments that it takes.
_KEPT: dict[str, tuple[str, ...]] = {
    "accumulate": (), "no_sync": (), "autocast": (), "gather": (), "wait_for_everyone": (),
    "gather_for_metrics": ("input_data", "use_gather_object"), "reduce": ("reduction",),
    "pad_across_processes": ("dim", "pad_index", "pad_first"),
    "print": ("sep", "end", "file", "flush"),
    "main_process_first": (), "local_main_process_first": (), "on_main_process": (),
    "on_local_main_process": (), "init_trackers": ("project_name", "config"),
    "log": ("step",), "end_training": (), "save": ("safe_serialization",),
    "save_state": ("output_dir",), "load_state": ("input_dir",), "get_state_dict": (),
    "save_model": ("save_directory", "safe_serialization"), "register_for_checkpointing": (),
    "skip_first_batches": ("num_batches",), "set_trigger": (), "check_trigger": (),
}  # fmt: skip
_BY_HAND = "Leave it out, or port it by hand (docs/how-to/own-loop.md)."


def rewrite_uses(plan: Plan) -> None:
    """Rewrite every use of every Accelerator, and refuse those that have no counterpart."""
    split = any(
        constant(argument(call, 1, "split_batches")) is True
        or constant(argument(call, None, "step_scheduler_with_optimizer")) is False
        for _, call in plan.calls(*ACCELERATOR, "accelerate.DataLoaderConfiguration",
                                  "accelerate.utils.DataLoaderConfiguration")
    )  # fmt: skip
    rewrite_places(plan)
    _check_prepared(plan)
    for source in plan.sources:
        for node in source.all(cst.Attribute):
            if is_accelerator(plan, node.value):
                _rewrite_attribute(plan, source, node, split)
        for kind in (cst.Name, cst.Attribute):
            for node in source.all(kind):
                _check_handed_on(plan, source, node)
        for with_ in source.all(cst.With):
            if any(_calls(plan, one.item, "accumulate") for one in with_.items):
                _check_accumulation(plan, source, with_)


def is_accelerator(plan: Plan, node: cst.BaseExpression) -> bool:
    """Return whether an expression may be an Accelerator."""
    return plan.made_by(plan.flow.values(node), *ACCELERATOR)


def _check_prepared(plan: Plan) -> None:
    """Refuse what trains without the Accelerator's knowing."""
    prepared: set[Origin] = set()
    for _, call, func in plan.methods(*PREPARING):
        if is_accelerator(plan, func.value):
            prepared.update(*(plan.flow.values(one.value) for one in call.args))
            if any(one.star for one in call.args):
                return  # It is refused for that.
    for origin, model in plan.optimizers.items():
        assert origin.node is not None
        if origin not in prepared:
            plan.refuse(
                origin.node, "this optimizer is not prepared: it steps, and is cleared, at every "
                "micro-batch of an accumulation.", "Give it to accelerator.prepare.",
            )  # fmt: skip
        elif not plan.flow.values(model) & prepared:
            plan.refuse(
                origin.node, "its model is not prepared, so its replicas drift apart.",
                "Give it to accelerator.prepare.",
            )  # fmt: skip


def check_backwards(plan: Plan) -> None:
    """Refuse backward passes around the Accelerator, where they are others than its own."""
    if _accumulation(plan) == 1 and plan.config.get("precision") != "fp16":
        return
    for _, call, func in plan.methods("backward"):
        if call not in plan.losses and not plan.flow.functions(func):
            plan.refuse(
                call, "accelerator.backward divides the loss by the micro-batches of a step, and "
                "scales it under fp16; this does neither.", "Call accelerator.backward(loss).",
            )  # fmt: skip


def _rewrite_attribute(plan: Plan, source: Source, node: cst.Attribute, split: bool) -> None:
    name, above = node.attr.value, source.parent(node)
    call = above if isinstance(above, cst.Call) and above.func is node else None
    if name in PREPARING and call is not None:
        plan.handled.add(call)
        rewrite_prepare(plan, call, source.code(node.value), PREPARING[name].strip(), split)
    elif name in _KEPT and call is not None:
        plan.handled.add(call)
        _check_arguments(plan, source, call, _KEPT[name])
        if name in ("save_state", "load_state"):
            plan.tell(call, "checkpoints are unipar's: those of before are not read.",
                      "unipar reads them under any strategy and number of processes.")  # fmt: skip
    elif name == "backward" and call is not None and call.args:
        plan.losses[call] = call.args[0].value
        if len(call.args) > 1 or call.args[0].keyword is not None:
            plan.refuse(call, "an engine's backward takes a loss and nothing else.",
                        "Leave the other arguments out.")  # fmt: skip
    elif name == "clip_grad_norm_" and call is not None:
        _rewrite_clip(plan, source, call)
    elif name == "unwrap_model" and call is not None and call.args:
        plan.handled.add(call)
        plan.replace(call, call.args[0].value)
    elif name in ("free_memory", "clear", "unscale_gradients") and call is not None:
        plan.handled.add(call)
        if source.statement(call) is None:
            plan.refuse(call, "what it gives back is used.", "Leave it out; use del.")
        plan.drop(call)
    elif name == "state":
        _rewrite_state(plan, source, node)
    elif name in ("save", "print") or name in ("on_main_process", "on_local_main_process"):
        return  # Handed on: save_function=accelerator.save, @accelerator.on_main_process.
    elif name == "distributed_type" and above is not None and answered(plan, above):
        return
    elif name not in _READ or _is_target(source, node):
        plan.refuse(node, f"`{name}` is Accelerate's own; unipar has no counterpart.", _BY_HAND)


def _check_arguments(plan: Plan, source: Source, call: cst.Call, names: tuple[str, ...]) -> None:
    for one in call.args:
        if one.keyword is not None and one.keyword.value not in names:
            plan.refuse(
                call, f"unipar has no counterpart of `{source.code(one)}`.",
                f"Leave {one.keyword.value} out.",
            )  # fmt: skip


def _rewrite_clip(plan: Plan, source: Source, call: cst.Call) -> None:
    given = argument(call, 0, "parameters")
    func = given.func if isinstance(given, cst.Call) else None
    of_all = isinstance(func, cst.Attribute) and func.attr.value == "parameters"
    plan.clips[call] = Clip(
        argument(call, 1, "max_norm"),
        argument(call, 2, "norm_type"),
        func.value if isinstance(func, cst.Attribute) and of_all else None,
    )
    guard = _guard(plan, source, call)
    accumulates = any(
        isinstance(one, cst.With) and any(_calls(plan, i.item, "accumulate") for i in one.items)
        for one in source.around(call)
    )
    if guard is not None:
        source.unwrap(guard)
        start, stop = source.line_start(guard), source.span(guard)[1]
        source.edits.replace((start, source.edits.data.find(b"\n", stop) + 1), "")
    elif accumulates and _accumulation(plan) != 1:
        plan.refuse(
            call,
            "under accumulate() it clips what is there after each micro-batch, so that the first "
            "ones of a step may be clipped several times.",
            "Put `if accelerator.sync_gradients:` in front of it, as Accelerate's own pages do.",
        )


def _guard(plan: Plan, source: Source, call: cst.Call) -> cst.If | None:
    """The ``if accelerator.sync_gradients:`` around a line."""
    line = source.parent(source.parent(call) or call)
    body = source.parent(line or call)
    above = source.parent(body or call)
    if not isinstance(above, cst.If) or above.orelse is not None or above.body is not body:
        return None
    test = above.test
    asks = isinstance(test, cst.Attribute) and test.attr.value == "sync_gradients"
    return above if asks and len(above.body.body) == 1 else None


def warn_of_double_division(plan: Plan) -> None:
    """Call out losses that the script divides, and ``accelerator.backward`` divides too."""
    if _accumulation(plan) != 1:
        losses = [(plan.flow.source(call), call, loss) for call, loss in plan.losses.items()]
        warn_of_divisions(plan, losses, divided_by="accelerator.backward")


def _accumulation(plan: Plan) -> int | None:
    """The number of micro-batches of a step; ``None`` where it is not known."""
    found: set[int | None] = set()
    for _, call in plan.calls(*ACCELERATOR):
        given = argument(call, 3, "gradient_accumulation_steps")
        hidden = any(
            one.star or (one.keyword and one.keyword.value == "gradient_accumulation_plugin")
            for one in call.args
        )
        found.add(None if hidden else 1 if given is None else constant(given))
    return found.pop() if len(found) == 1 else None


def _check_accumulation(plan: Plan, source: Source, with_: cst.With) -> None:
    inside = [
        (call, call.func.attr.value) for call in source.calls()
        if isinstance(call.func, cst.Attribute) and with_ in source.around(call)
        and call.func.attr.value in ("backward", "zero_grad")
    ]  # fmt: skip
    names = [name for _, name in inside]
    if names and names[0] == "zero_grad" and "backward" in names and _accumulation(plan) != 1:
        plan.refuse(
            inside[0][0],
            "under accumulate() it clears gradients in a step's last micro-batch, before that "
            "one's backward pass: each step is on the last micro-batch alone, divided by their "
            "number, and the others are thrown away.",
            "Call zero_grad() after optimizer.step().",
        )


def _rewrite_state(plan: Plan, source: Source, node: cst.Attribute) -> None:
    above = source.parent(node)
    if isinstance(above, cst.Attribute) and above.attr.value in _READ:
        plan.replace(node, node.value)
    elif isinstance(above, cst.Arg):
        plan.replace(node, "script.world()")
    else:
        plan.refuse(node, "the state is Accelerate's own; unipar has no counterpart.", _BY_HAND)


def _check_handed_on(plan: Plan, source: Source, node: cst.BaseExpression) -> None:
    """Refuse an Accelerator that is given to code which is not seen."""
    above = source.parent(node)
    if not isinstance(above, cst.Arg) or above.value is not node:
        return
    if not is_accelerator(plan, node):
        return
    call = source.parent(above)
    if not isinstance(call, cst.Call):
        return
    called = plan.flow.values(call.func)
    if any(one.kind in ("function", "class") for one in called) or "print" in plan.flow.names(
        call.func
    ):
        return
    plan.refuse(call, "the Accelerator is given to code that is not seen.",
                "Give migrate the file of that code too.")  # fmt: skip


def _calls(plan: Plan, node: cst.BaseExpression, name: str) -> bool:
    return (
        isinstance(node, cst.Call)
        and isinstance(node.func, cst.Attribute)
        and node.func.attr.value == name
        and is_accelerator(plan, node.func.value)
    )


def _is_target(source: Source, node: cst.Attribute) -> bool:
    above = source.parent(node)
    return isinstance(above, cst.AssignTarget) or (
        isinstance(above, (cst.AnnAssign, cst.AugAssign)) and above.target is node
    )
