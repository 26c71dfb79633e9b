"""What an ``Accelerator`` is built with: arguments of the run, and settings of ``unipar.yaml``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import libcst as cst

from unipar.migrate.branches import exclusive
from unipar.migrate.defaults import UNSEEN, by_default
from unipar.migrate.literals import constant
from unipar.migrate.plan import Plan
from unipar.migrate.tracing import is_none, keywords

ACCELERATOR = ("accelerate.Accelerator", "accelerate.accelerator.Accelerator")
_POSITIONS = ("device_placement", "split_batches", "mixed_precision", "gradient_accumulation_steps",
              "cpu", "dataloader_config", "deepspeed_plugin", "fsdp_plugin")  # fmt: skip
_KEPT = ("device_placement", "split_batches", "gradient_accumulation_steps", "log_with",
         "project_dir", "step_scheduler_with_optimizer")  # fmt: skip
# Objects that hold settings: which of them the run takes, and which go to the strategy's options.
_HELD = {
    "ProjectConfiguration": ("project_dir", "logging_dir", "automatic_checkpoint_naming"),
    "GradientAccumulationPlugin": ("num_steps", "sync_with_dataloader", "adjust_scheduler"),
    "DataLoaderConfiguration": ("split_batches", "even_batches"),
}
_OPTIONS = {
    "DistributedDataParallelKwargs": ("find_unused_parameters", "static_graph", "bucket_cap_mb",
                                      "gradient_as_bucket_view", "broadcast_buffers"),
    "DeepSpeedPlugin": ("zero_stage",),
    "FullyShardedDataParallelPlugin": ("reshard_after_forward", "cpu_offload"),
}  # fmt: skip
_WITHOUT_EFFECT = {
    "GradientAccumulationPlugin": ("sync_each_batch",),
    "DataLoaderConfiguration": ("non_blocking",),
    "FullyShardedDataParallelPlugin": ("fsdp_version",),
}
HOLDERS = (*_HELD, *_OPTIONS, "InitProcessGroupKwargs")
_RENAMED = {"num_steps": "gradient_accumulation_steps", "zero_stage": "stage"}
PRECISIONS = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}
_PLUGINS = {"DeepSpeedPlugin": "deepspeed", "FullyShardedDataParallelPlugin": "fsdp"}


def rewrite_accelerators(plan: Plan) -> None:
    """Build the run in place of each ``Accelerator``, and fill in ``plan.config``."""
    found = plan.calls(*ACCELERATOR)
    for (first, one), (second, other) in itertools.combinations(found, 2):
        if first is not second or not exclusive(first, one, other):
            plan.refuse(
                other, "a second Accelerator, which shares the state of the first.",
                "Build one, and hand it on.",
            )  # fmt: skip
    options = _read_alike(plan, [call for _, call in found])
    for _, call in _built(plan, *HOLDERS):
        _drop_holder(plan, call)
    plan.config["strategy"] = {"name": "accelerate", **options} if options else "accelerate"


def _read_alike(plan: Plan, calls: list[cst.Call]) -> dict[str, Any]:
    """The strategy's options, which are one run's in whatever branch the run is built."""
    before, every = plan.config, []
    for call in calls:
        plan.config = {}
        options: dict[str, Any] = {}
        _rewrite_accelerator(plan, call, options)
        every.append((options, plan.config))
        if every[-1] != every[0]:
            plan.refuse(
                call, "it asks for other settings than the Accelerator of another branch.",
                "Build both alike but for trackers and directories; the rest is unipar.yaml's.",
            )  # fmt: skip
    plan.config = before
    for key, value in every[0][1].items():
        plan.set(calls[0], key, value)
    return every[0][0]


def _rewrite_accelerator(plan: Plan, call: cst.Call, options: dict[str, Any]) -> None:
    source = plan.flow.source(call)
    kept: list[list[str | cst.CSTNode]] = []
    for name, value in _arguments(plan, call):
        if name in _KEPT:
            kept.append([f"{name}=", value])
        elif name == "**":
            kept.append(["**", value])
        elif name == "mixed_precision":
            _set_precision(plan, call, value)
        elif name == "cpu":
            _set_device(plan, call, value)
        elif name in ("project_config", "gradient_accumulation_plugin", "dataloader_config",
                      "deepspeed_plugin", "fsdp_plugin", "kwargs_handlers"):  # fmt: skip
            for one in _held(plan, call, value):
                kept += _unpack(plan, one, options)
        elif not (isinstance(value, cst.Name) and value.value == "None"):
            plan.refuse(
                call, f"unipar has no counterpart of `{name}={source.code(value)}`.",
                f"Leave {name} out.",
            )  # fmt: skip
    parts: list[str | cst.CSTNode] = []
    for one in kept:
        parts += [", ", *one] if parts else one
    plan.replace(call, "accelerated.Run(", *parts, ")")


def _arguments(plan: Plan, call: cst.Call) -> Iterator[tuple[str, cst.BaseExpression]]:
    for index, one in enumerate(call.args):
        if one.star == "**" and _only_kept(plan, call):
            yield "**", one.value
            continue
        if one.star or (one.keyword is None and index >= len(_POSITIONS)):
            plan.refuse(call, "its arguments cannot be seen.", "Write them out, by their names.")
            return
        yield one.keyword.value if one.keyword is not None else _POSITIONS[index], one.value


def _only_kept(plan: Plan, call: cst.Call) -> bool:
    """Return whether what dictionaries give a call is the run's, under the same names."""
    written = {one.keyword.value for one in call.args if one.keyword is not None}
    found = keywords(plan, call)
    return found is not None and found.keys() - written <= {*_KEPT}


def _set_precision(plan: Plan, call: cst.Call, value: cst.BaseExpression) -> None:
    found = by_default(plan, value)
    given = None if found is UNSEEN else found
    if constant(value) is None and not is_none(value):
        plan.warn(
            call,
            "unipar.yaml's `precision` decides now, not the command line: "
            f"{PRECISIONS.get(str(given), 'fp32')} as it stands.",
            "Change it there, or by UNIPAR_PRECISION.",
        )
    if given not in (None, *PRECISIONS):
        plan.refuse(call, f"precision {given} is not taken over.", "Use no, bf16 or fp16.")
    elif given is not None:
        plan.set(call, "precision", PRECISIONS[given])


def _set_device(plan: Plan, call: cst.Call, value: cst.BaseExpression) -> None:
    if constant(value) is True:
        plan.set(call, "device", "cpu")
    elif constant(value) is not False:
        plan.tell(call, "unipar.yaml's `device` decides now, not the command line.")


def _held(plan: Plan, call: cst.Call, value: cst.BaseExpression) -> list[cst.Call]:
    """The calls that build what holds settings."""
    listed = value.elements if isinstance(value, (cst.List, cst.Tuple)) else None
    found: list[cst.Call] = []
    for one in [each.value for each in listed] if listed is not None else [value]:
        if isinstance(one, cst.Name) and one.value == "None":
            continue
        made = {o for o in plan.flow.values(one) if isinstance(o.node, cst.Call)}
        known = [o.node for o in made if _last(o.name) in HOLDERS and isinstance(o.node, cst.Call)]
        if len(known) != 1 or len(made) != 1:
            plan.refuse(
                call,
                f"unipar.yaml cannot say `{plan.flow.source(one).code(one)}`.",
                f"Leave it out, or build one of {', '.join(HOLDERS)} in one place.",
            )
        found += known[:1]
    return found


def _unpack(plan: Plan, holder: cst.Call, options: dict[str, Any]) -> list[list[str | cst.CSTNode]]:
    """The run's arguments among what is held; the strategy's options go to ``options``."""
    source = plan.flow.source(holder)
    kind = _last(next(iter(plan.flow.names(holder.func))))
    kept: list[list[str | cst.CSTNode]] = []
    if kind in _PLUGINS:
        options["plugin"] = _PLUGINS[kind]
    for one in holder.args:
        name = one.keyword.value if one.keyword is not None else ""
        if not name and one is holder.args[0] and kind in ("ProjectConfiguration",):
            name = "project_dir"
        value = constant(one.value)
        if name in _HELD.get(kind, ()):
            kept.append([f"{_RENAMED.get(name, name)}={source.code(one.value)}"])
        elif name in _OPTIONS.get(kind, ()) and value is not None:
            options[_RENAMED.get(name, name)] = value
        elif name == "timeout" and _seconds(plan, one.value):
            plan.set(holder, "timeout", _seconds(plan, one.value))
        elif name not in _WITHOUT_EFFECT.get(kind, ()) and value is not False:
            plan.refuse(
                holder, f"unipar.yaml cannot say `{source.code(one)}`.",
                "Leave it out, or give a literal.",
            )  # fmt: skip
    return kept


def _seconds(plan: Plan, value: cst.BaseExpression) -> float | None:
    """The length of a ``timedelta`` of literals."""
    if not isinstance(value, cst.Call) or "datetime.timedelta" not in plan.flow.names(value.func):
        return None
    units = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0}
    total = 0.0
    for one in value.args:
        unit = units.get(one.keyword.value) if one.keyword is not None else None
        amount = constant(one.value)
        if unit is None or not isinstance(amount, (int, float)):
            return None
        total += unit * amount
    return total


def _drop_holder(plan: Plan, call: cst.Call) -> None:
    """Take out what is read, with the name that it was given."""
    source = plan.flow.source(call)
    above = source.parent(call)
    if isinstance(above, (cst.Assign, cst.AnnAssign)):
        source.remove(above)
    elif not any(
        isinstance(one, cst.Call) and set(ACCELERATOR) & plan.flow.names(one.func)
        for one in source.around(call)
    ):
        plan.refuse(call, "it cannot be seen where this goes.", "Give it to the Accelerator.")


def _built(plan: Plan, *kinds: str) -> list[tuple[Any, cst.Call]]:
    return [
        (source, call)
        for source in plan.sources
        for call in source.all(cst.Call)
        if any(one.startswith("accelerate.") and _last(one) in kinds
               for one in plan.flow.names(call.func))
    ]  # fmt: skip


def _last(name: str) -> str:
    return name.rpartition(".")[2]
