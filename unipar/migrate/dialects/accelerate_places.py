"""Asking an Accelerator whether it runs on devices that unipar has no strategies for."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.plan import Plan

_ELSEWHERE = frozenset({
    "HPU", "MEGATRON_LM", "MLU", "MULTI_HPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_NEURON",
    "MULTI_NPU", "MULTI_SDAA", "MULTI_XPU", "MUSA", "NPU", "SDAA", "TPU", "XLA", "XPU",
})  # fmt: skip
_ANSWERS: dict[type[cst.BaseCompOp], str] = {
    cst.Equal: "False", cst.In: "False", cst.Is: "False",
    cst.NotEqual: "True", cst.NotIn: "True", cst.IsNot: "True",
}  # fmt: skip


def rewrite_places(plan: Plan) -> None:
    """Answer the questions whose answer is known."""
    for source in plan.sources:
        for node in source.all(cst.Comparison):
            answer = answered(plan, node)
            if answer is not None:
                plan.replace(node, answer)
                plan.tell(node, f"this is {answer}: unipar trains on CPUs and NVIDIA's GPUs.")


def answered(plan: Plan, node: cst.CSTNode) -> str | None:
    """``"True"`` or ``"False"``, if an expression asks for such a device and nothing else."""
    if not isinstance(node, cst.Comparison) or len(node.comparisons) != 1:
        return None
    (target,) = node.comparisons
    asked = node.left
    if not isinstance(asked, cst.Attribute) or asked.attr.value != "distributed_type":
        return None
    right = target.comparator
    several = isinstance(right, (cst.List, cst.Tuple, cst.Set))
    places = [one.value for one in right.elements] if several else [right]
    if not places or not all(_is_elsewhere(plan, one) for one in places):
        return None
    return _ANSWERS.get(type(target.operator))


def _is_elsewhere(plan: Plan, node: cst.BaseExpression) -> bool:
    return any(
        name.startswith("accelerate.")
        and name.split(".")[-2:-1] == ["DistributedType"]
        and name.split(".")[-1] in _ELSEWHERE
        for name in plan.flow.names(node)
    )
