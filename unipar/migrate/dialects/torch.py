"""A loop by PyTorch's own calls, rewritten for the frameworks that have no face yet."""

from __future__ import annotations

from unipar.migrate.averages import warn_of_means
from unipar.migrate.clipping import drop_clipping
from unipar.migrate.devices import rewrite_devices
from unipar.migrate.dialects.base import Row
from unipar.migrate.divisions import warn_of_divisions
from unipar.migrate.dropping import warn_of_dropped
from unipar.migrate.loop import TrainingLoop
from unipar.migrate.models import rewrite_calls, rewrite_optimizers
from unipar.migrate.plan import Plan
from unipar.migrate.precision import rewrite_precision
from unipar.migrate.refusals import REFUSED, refuse_around
from unipar.migrate.states import rewrite_states
from unipar.migrate.zeroing import drop_zero_grads

LOOP_ROWS = (
    Row("optim.SGD(model.parameters(), lr=0.1)",
        "script.prepare(model, optimizer=lambda named: optim.SGD([p for _, p in named], lr=0.1))"
        ".optimizer"),
    Row("model(x)", "script.engine(model)(x)"),
    Row("loss.backward()", "script.backward(loss, optimizer)"),
    Row("optimizer.step()", "script.engine(optimizer).step()"),
    Row("optimizer.zero_grad()", "removed: an engine clears gradients after each step"),
    Row("clip_grad_norm_(model.parameters(), 1.0)", "max_grad_norm=1.0 in script.prepare"),
    Row("if args.clip: clip_grad_norm_(model.parameters(), args.clip)",
        "max_grad_norm=args.clip if args.clip else None in script.prepare"),
    Row("torch.autocast(\"cuda\", torch.bfloat16)",
        "script.autocast(), and precision: bf16 in unipar.yaml"),
    Row("autocast(enabled=args.amp)",
        "script.autocast(enabled=args.amp), which wants precision in unipar.yaml to say the same"),
    Row("GradScaler, scale, unscale_, update", "removed: the engine scales under precision: fp16"),
    Row("torch.device(\"cuda\"), .cuda(), .to(\"cuda\")", "script.device()"),
    Row("model.state_dict(), optimizer.load_state_dict(s)",
        "script.whole(model).state_dict(), script.whole(optimizer).load_state_dict(s)"),
    Row("scheduler.step(), model.train(), optimizer.param_groups", "unchanged"),
)  # fmt: skip

NORM_ROW = Row(
    "norm = clip_grad_norm_(...)", "norm = script.grad_norm(script.engine(optimizer).step())"
)

LOOP_REFUSED = (
    Row("loss.backward(retain_graph=True)", "An engine's backward takes a loss and nothing else."),
    Row("optimizer.step(closure)", "A closure runs the model several times in a step."),
    Row("SGD([*a.parameters(), *b.parameters()])",
        "One optimizer over several models. Put them into one nn.Module."),
    Row("loss.backward(); opt1.step(); opt2.step()",
        "Several optimizers step on the gradients of one backward pass."),
    Row("model.loss(x), helper(model, x)",
        "In the training loop it may go around the engine's forward. Call model(...)."),
    Row("p.grad", "Gradients are read or written; a strategy may scale or divide them."),
    Row("clipping in one loop and not in another, or to another norm",
        "A strategy clips every step of an optimizer alike. Clip before each step, to one norm."),
    Row("clip_grad_value_", "Strategies clip by the 2-norm. Use clip_grad_norm_."),
    Row("zero_grad() at the start of an epoch, step by modulo",
        "The end of a ragged epoch is thrown away. Step on the rest too: "
        "(i + 1) % n == 0 or i + 1 == len(loader)."),
    Row("if args.amp: with autocast(): model(x) else: model(x)",
        "An engine computes all forward passes that may be trained on in one precision. Write "
        "autocast(enabled=args.amp) around one."),
    Row("ctx = autocast() if args.amp else nullcontext()",
        "Decided while it runs. Write autocast(enabled=args.amp)."),
    Row("autocast(enabled=False)", "A region in fp32 within half precision. Leave it out."),
    Row("clip before scaler.unscale_()", "It clips to max_norm / 65536. Unscale first."),
    *(Row(name, f"{why[0].upper()}{why[1:]} {todo}") for name, (why, todo) in REFUSED.items()),
)  # fmt: skip


def rewrite_training(plan: Plan, *, wrapped: bool) -> None:
    """Rewrite what scripts on one device and on several have in common.

    Args:
        plan: the program; its optimizers are known.
        wrapped: whether the models are DDP wrappers.
    """
    refuse_around(plan)
    mixed = rewrite_precision(plan)
    loop = TrainingLoop(plan)
    warn_of_divisions(plan, loop.backwards, averages_ranks=True)
    warn_of_means(plan)
    warn_of_dropped(plan)
    loop.rewrite()
    drop_zero_grads(loop)
    clipped = drop_clipping(loop)
    rewrite_calls(plan, wrapped=wrapped, in_autocast=mixed)
    rewrite_optimizers(plan, clipped)
    rewrite_devices(plan)
    rewrite_states(plan)


def check_trains(plan: Plan) -> bool:
    """Return whether there is a backward pass and an optimizer to step; one alone is refused."""
    backwards = [
        call for _, call, func in plan.methods("backward") if not plan.flow.functions(func)
    ]
    refused = any(note.kind == "refused" for note in plan.notes)
    if backwards and not plan.optimizers and not refused:
        plan.refuse(
            backwards[0],
            "no optimizer is seen that steps on these gradients.",
            "Give migrate the file that builds it too, and build it as torch.optim.SGD(...).",
        )
    return bool(backwards and plan.optimizers)
