"""Boosters and their plugins, as settings of ``unipar.yaml``."""

from __future__ import annotations

from typing import Any

import libcst as cst

from unipar.migrate.leftovers import Leftovers
from unipar.migrate.literals import argument, constant
from unipar.migrate.plan import Plan
from unipar.migrate.source import Source
from unipar.migrate.tracing import is_none

BOOSTER = ("colossalai.booster.Booster", "colossalai.booster.booster.Booster")
_PACKAGE = "colossalai.booster.plugin."
# The plugins: what each is called in the options, and what its arguments are called there.
_PLUGINS: dict[str, tuple[str, dict[str, str]]] = {
    "TorchDDPPlugin": ("ddp", {name: name for name in (
        "broadcast_buffers", "bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view",
        "static_graph")}),
    "LowLevelZeroPlugin": ("zero1", {"reduce_bucket_size_in_m": "reduce_bucket_size_m"}),
    "GeminiPlugin": ("gemini", {
        "placement_policy": "placement", "min_chunk_size_m": "chunk_size_m",
        "shard_param_frac": "shard_param_frac", "offload_optim_frac": "offload_optim_frac",
        "offload_param_frac": "offload_param_frac"}),
    "TorchFSDPPlugin": ("fsdp", {}),
    "HybridParallelPlugin": ("hybrid", {"tp_size": "tp_size"}),
}  # fmt: skip
_ORDER = {"LowLevelZeroPlugin": ("stage", "precision"),
          "HybridParallelPlugin": ("tp_size", "pp_size", "precision", "zero_stage")}  # fmt: skip
# Arguments that say how, and change no number.
_HOW = ("verbose", "overlap_communication", "overlap_allgather", "cast_inputs", "search_range_m",
        "hidden_dim", "pin_memory", "enable_gradient_accumulation", "enable_async_reduce",
        "check_reduction", "enable_flash_attention", "enable_fused_normalization",
        "enable_all_optimization", "enable_jit_fused", "parallel_output",
        "ddp_bucket_cap_mb", "sync_module_states")  # fmt: skip
_DEFAULT_PRECISION = {"LowLevelZeroPlugin": "fp16", "GeminiPlugin": "fp16",
                      "HybridParallelPlugin": "fp16"}  # fmt: skip
# Of fp16's loss scale, which begins at 65536 under unipar.
_SCALE = ("initial_scale", "min_scale", "max_scale", "growth_factor", "backoff_factor",
          "growth_interval", "hysteresis")  # fmt: skip
_SHARDING = {"FULL_SHARD": "full", "SHARD_GRAD_OP": "grad_op"}


def plugin_names() -> list[str]:
    """Every name that a plugin's class goes by."""
    return [
        name for kind, module in _MODULES.items()
        for name in (f"{_PACKAGE}{kind}", f"{_PACKAGE}{module}.{kind}")
    ]  # fmt: skip


_MODULES = {"TorchDDPPlugin": "torch_ddp_plugin", "LowLevelZeroPlugin": "low_level_zero_plugin",
            "GeminiPlugin": "gemini_plugin", "TorchFSDPPlugin": "torch_fsdp_plugin",
            "HybridParallelPlugin": "hybrid_parallel_plugin"}  # fmt: skip


def rewrite_boosters(plan: Plan, left: Leftovers) -> None:
    """Take boosters and plugins out, and fill in ``plan.config`` and ``plan.norms``."""
    boosters, plugins = plan.calls(*BOOSTER), plan.calls(*plugin_names())
    if len(plugins) != 1 or len(boosters) != 1:
        plan.refuse(
            (plugins or boosters)[-1][1],
            "a run has one Booster with one plugin, and it cannot be seen which this is.",
            "Build one of each, unconditionally; unipar.yaml's strategy is where to choose.",
        )  # fmt: skip
        for _, call in (*boosters, *plugins):
            left.settle(call.func)
        return
    (_, booster), (_, plugin) = boosters[0], plugins[0]
    kind = next(iter(plan.flow.names(plugin.func))).rpartition(".")[2]
    options: dict[str, Any] = {"plugin": _PLUGINS[kind][0]}
    _read_plugin(plan, plugin, kind, options)
    _read_booster(plan, booster, kind)
    plan.config["strategy"] = {"name": "colossalai", **options}
    plan.tell(
        booster,
        "unipar runs Colossal-AI on CPUs only.",
        "On GPUs choose another strategy in unipar.yaml: ddp, zero2, fsdp, …",
    )
    for call in (booster, plugin):
        _take_out(plan, call, used=_is_handed_on(plan, call, (booster, plugin)))
        left.settle(call)


def _read_plugin(plan: Plan, call: cst.Call, kind: str, options: dict[str, Any]) -> None:
    source, known = plan.flow.source(call), _PLUGINS[kind][1]
    precision: Any = _DEFAULT_PRECISION.get(kind)
    scales = False
    for index, one in enumerate(call.args):
        order = _ORDER.get(kind, ())
        name = one.keyword.value if one.keyword else order[index] if index < len(order) else ""
        value = constant(one.value)
        if name == "precision":
            precision = "unseen" if value is None else value
        elif name == "stage" and value in (1, 2):
            options["plugin"] = f"zero{value}"
        elif name == "max_norm":
            _set_norm(plan, source, one)
        elif name in _SCALE:
            scales = True
        elif name == "sharding_strategy" and _sharding(plan, one.value) is not None:
            options["sharding"] = _sharding(plan, one.value)
        elif name in known and value is not None:
            options[known[name]] = value
        elif name not in _HOW and not is_none(one.value) and not _says_nothing(name, value):
            plan.refuse(
                call, f"unipar.yaml cannot say `{source.code(one)}`.",
                "Leave it out, or give a literal.",
            )  # fmt: skip
    if precision not in (None, "fp32", "bf16", "fp16"):
        plan.refuse(call, "its precision cannot be seen.", "Write fp32, bf16 or fp16.")
    elif precision not in (None, "fp32"):
        plan.set(call, "precision", precision)
        if scales and precision == "fp16":
            plan.warn(
                call,
                "the loss scale begins at 65536 and adapts by rules of torch.amp.GradScaler, so "
                "that other first steps may be skipped.",
                "Nothing: the scale itself changes no gradient that is finite.",
            )
        if kind != "GeminiPlugin":
            plan.warn(
                call,
                f"weights and gradients were rounded to {precision}, also where ranks are summed; "
                f"now the model computes in {precision} by autocast, and they stay fp32. Losses "
                "differ by the rounding.",
                "Nothing: the optimizer's own copy of the weights was fp32 already.",
            )


def _says_nothing(name: str, value: Any) -> bool:
    defaults = {"zero_stage": 0, "cpu_offload": False, "pp_size": 1, "sp_size": 1,
                "enable_sequence_parallelism": False, "master_weights": True, "norm_type": 2,
                "use_fp8": False, "fp8_communication": False}  # fmt: skip
    return name in defaults and value is not None and value == defaults[name]


def _sharding(plan: Plan, value: cst.BaseExpression) -> str | None:
    names = {one.rpartition(".")[2] for one in plan.flow.names(value)}
    return next((_SHARDING[one] for one in names if one in _SHARDING), None)


def _set_norm(plan: Plan, source: Source, one: cst.Arg) -> None:
    if constant(one.value) == 0:
        return
    if constant(one.value) is None:
        plan.refuse(
            one.value, "the norm is to be known where the optimizer is built.", "Write a number."
        )
    for origin in plan.optimizers:
        plan.norms[origin] = source.code(one.value)


def _read_booster(plan: Plan, call: cst.Call, kind: str) -> None:
    source = plan.flow.source(call)
    for index, one in enumerate(call.args):
        order = ("device", "mixed_precision", "plugin")
        name = one.keyword.value if one.keyword else order[min(index, 2)]
        value = constant(one.value)
        if name == "mixed_precision" and kind in ("TorchDDPPlugin", "TorchFSDPPlugin"):
            if value in ("fp16", "bf16"):
                plan.set(call, "precision", value)
            elif not is_none(one.value):
                plan.refuse(call, f"unipar.yaml cannot say `{source.code(one)}`.",
                            "Write fp16, or leave it out.")  # fmt: skip
        elif name == "device" and not is_none(one.value):
            plan.tell(call, "unipar.yaml's `device` decides now.")
    if argument(call, 2, "plugin") is None:
        plan.refuse(call, "a Booster without a plugin trains each rank by itself.",
                    "Give it a TorchDDPPlugin().")  # fmt: skip


def _is_handed_on(plan: Plan, made: cst.Call, gone: tuple[cst.Call, ...]) -> bool:
    """Return whether a booster or a plugin is given to anything but calls that go."""
    for source in plan.sources:
        for node in (*source.all(cst.Name), *source.all(cst.Attribute)):
            above = source.parent(node)
            if not any(one.node is made for one in plan.flow.values(node)):
                continue
            if isinstance(above, (cst.AssignTarget, cst.Attribute, cst.Param)):
                continue
            if not any(one in gone for one in source.around(node)):
                return True
    return False


def _take_out(plan: Plan, call: cst.Call, *, used: bool) -> None:
    """Take out what builds a booster or a plugin, with the name that it was given."""
    source = plan.flow.source(call)
    above = source.parent(call)
    if any(isinstance(one, (cst.If, cst.IfExp)) and "__name__" not in source.code(one.test)
           for one in source.around(call)):  # fmt: skip
        plan.refuse(call, "which plugin there is, is decided while it runs.",
                    "Build one, unconditionally.")  # fmt: skip
    if isinstance(above, (cst.Assign, cst.AnnAssign)) and used:
        plan.replace(call, "None")
    elif isinstance(above, (cst.Assign, cst.AnnAssign)):
        source.remove(above)
    elif not isinstance(above, (cst.Arg, cst.Return)):
        plan.refuse(call, "it cannot be seen where this goes.", "Give it a name of its own.")
    else:
        plan.replace(call, "None")
