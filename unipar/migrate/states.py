"""State dicts, which only hold everything where a strategy leaves models whole."""

from __future__ import annotations

from unipar.migrate.literals import argument
from unipar.migrate.models import optimizers_of
from unipar.migrate.plan import Plan


def rewrite_states(plan: Plan) -> None:
    """Ask for the whole model or optimizer wherever a state dict is taken or loaded."""
    for _, call, func in plan.methods("state_dict", "load_state_dict"):
        if call in plan.handled:
            continue
        values = plan.flow.values(func.value)
        if values & plan.models or optimizers_of(values):
            plan.replace(func.value, "script.whole(", func.value, ")")
    for _, call, func in plan.methods("save_pretrained"):
        if plan.flow.values(func.value) & plan.models and not argument(call, None, "state_dict"):
            plan.replace(func.value, "script.whole(", func.value, ")")
