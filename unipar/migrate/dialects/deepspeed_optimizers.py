"""DeepSpeed's own Adam, whose arithmetic torch's AdamW has too."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.leftovers import Leftovers
from unipar.migrate.literals import argument
from unipar.migrate.plan import Plan
from unipar.migrate.source import Source

_ADAM = (
    "deepspeed.ops.adam.FusedAdam",
    "deepspeed.ops.adam.fused_adam.FusedAdam",
    "deepspeed.ops.adam.DeepSpeedCPUAdam",
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam",
)
_SAME = ("params", "lr", "betas", "eps", "weight_decay")


def rewrite_own_optimizers(plan: Plan, left: Leftovers) -> None:
    """Put torch's AdamW in place of DeepSpeed's, whose weight decay is 0 unless it is given."""
    for source, call in plan.calls(*_ADAM):
        for index, one in enumerate(call.args):
            word = one.keyword.value if one.keyword is not None else _SAME[min(index, 2)]
            if word not in _SAME or (one.keyword is None and index > 1):
                plan.refuse(
                    call, f"torch's AdamW does not take `{source.code(one)}`.",
                    "Leave it out; instead of adam_w_mode=False use torch.optim.Adam.",
                )  # fmt: skip
        if argument(call, None, "weight_decay") is None and call.args:
            last = call.args[-1].value
            plan.replace(last, last, ", weight_decay=0.0")
    for source in plan.sources:
        for node in (*source.all(cst.Name), *source.all(cst.Attribute)):
            bound = isinstance(source.parent(node), (cst.ImportAlias, cst.AsName, cst.AssignTarget))
            if bound or not plan.flow.names(node) & {*_ADAM}:
                continue
            left.settle(node)
            if _is_imported(source, node):
                plan.replace(node, "torch.optim.AdamW")
                plan.use(source, "import torch")


def _is_imported(source: Source, node: cst.Name | cst.Attribute) -> bool:
    """Return whether a name is the framework's own, and not one that the script has given."""
    scope = source.scope(node)
    return isinstance(node, cst.Attribute) or (
        scope is not None and all(one.imported for one in scope[node.value])
    )
