"""Plain PyTorch on one device."""

from __future__ import annotations

from typing import ClassVar

from unipar.migrate.devices import rewrite_devices
from unipar.migrate.dialects.base import Dialect, Row
from unipar.migrate.loaders import split_loaders
from unipar.migrate.loop import TrainingLoop
from unipar.migrate.models import find_optimizers, rewrite_calls, rewrite_optimizers
from unipar.migrate.plan import Plan
from unipar.migrate.precision import rewrite_precision
from unipar.migrate.refusals import refuse_around
from unipar.migrate.states import rewrite_saves, rewrite_states

LOOP_ROWS = (
    Row("optim.SGD(model.parameters(), lr=0.1)",
        "script.prepare(model, optimizer=lambda named: optim.SGD([p for _, p in named], lr=0.1))"
        ".optimizer"),
    Row("model(x)", "script.engine(model)(x)"),
    Row("loss.backward()", "script.backward(loss, optimizer)"),
    Row("optimizer.step()", "script.engine(optimizer).step()"),
    Row("optimizer.zero_grad()", "removed: an engine clears gradients after each step"),
    Row("clip_grad_norm_(model.parameters(), 1.0)", "max_grad_norm=1.0 in script.prepare"),
    Row("torch.autocast(\"cuda\", torch.bfloat16)",
        "script.autocast(), and precision: bf16 in unipar.yaml"),
    Row("GradScaler, scale, unscale_, update", "removed: the engine scales under precision: fp16"),
    Row("torch.device(\"cuda\"), .cuda(), .to(\"cuda\")", "script.device()"),
    Row("model.state_dict(), optimizer.load_state_dict(s)",
        "script.whole(model).state_dict(), script.whole(optimizer).load_state_dict(s)"),
    Row("scheduler.step(), model.train(), optimizer.param_groups", "unchanged"),
)  # fmt: skip


class Torch(Dialect):
    """A script that trains on one device."""

    name: ClassVar[str] = "torch"
    title: ClassVar[str] = "plain PyTorch"
    marks: ClassVar[tuple[str, ...]] = ("torch.",)
    rows: ClassVar[tuple[Row, ...]] = (
        *LOOP_ROWS,
        Row("DataLoader(...) that is trained on", "script.split(DataLoader(...))"),
        Row("torch.save(state, path)", "script.save(state, path), which rank 0 does"),
    )

    def rewrite(self, plan: Plan) -> None:
        find_optimizers(plan)
        if not plan.optimizers or not plan.methods("backward"):
            return
        plan.config["strategy"] = "auto"
        rewrite_training(plan, wrapped=False)
        split_loaders(plan)
        rewrite_saves(plan)


def rewrite_training(plan: Plan, *, wrapped: bool) -> None:
    """Rewrite what scripts on one device and on several have in common.

    Args:
        plan: the program; its optimizers are known.
        wrapped: whether the models are DDP wrappers.
    """
    refuse_around(plan)
    mixed = rewrite_precision(plan)
    clipped = TrainingLoop(plan).rewrite()
    rewrite_calls(plan, wrapped=wrapped, in_autocast=mixed)
    rewrite_optimizers(plan, clipped)
    rewrite_devices(plan)
    rewrite_states(plan)
