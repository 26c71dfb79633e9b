"""The call of ``fit`` that takes the place of a loop."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.dropping import warn_of_dropped
from unipar.migrate.fit.modes import warn_of_mode
from unipar.migrate.fit.simple import Fold, NotSimple, names
from unipar.migrate.literals import argument, constant
from unipar.migrate.plan import Plan
from unipar.migrate.source import Source
from unipar.migrate.tree import inside

_DROPOUT = ("torch.nn.Dropout", "torch.nn.functional.dropout")
Part = str | cst.CSTNode


def write(plan: Plan, fold: Fold) -> None:
    """Put ``fit`` in place of the loop, and what it is given out of the way."""
    source = fold.source
    for name in ("unipar", "folded"):
        if any(one.value == name for one in source.all(cst.Name)):
            raise NotSimple(fold.whole, f"something is named `{name}` already.")
    _check_loss(plan)
    start = source.line_start(fold.whole)
    indent = source.edits.data[start : source.span(fold.whole)[0]].decode()
    end = source.newline() + indent
    loss = _free(source.tree, "training_loss")
    blank = [source.newline()] * (1 if indent else 2)
    parts: list[Part] = [*_loss(plan, fold, loss, end), *blank, indent]
    parts += ["unipar.fit(", end, "    ", fold.model, ", ", fold.loader, f", loss={loss},", end]
    for line in _arguments(plan, fold):
        parts += ["    ", *line, ",", end]
    parts += ["    config=folded.config(),", end, ")"]
    plan.replace(fold.whole, *parts)
    source.remove(fold.optimizer[1])
    if fold.scheduler is not None:
        source.remove(fold.scheduler[1])
    plan.use(source, "import unipar")
    plan.use(source, "from unipar.migrated import folded")
    _rewrite_saves(plan, fold)
    plan.config["strategy"] = "auto"
    if not _picks_device(plan):
        plan.config["device"] = "cpu"
    if not fold.saves:
        plan.config["checkpoint"] = False
    _tell(plan, fold)


def _loss(plan: Plan, fold: Fold, name: str, end: str) -> list[Part]:
    """The function of the loss; moves to a device are fit's."""
    assert fold.loss is not None
    batch = fold.batch
    single = isinstance(batch, cst.Name)
    given = batch.value if isinstance(batch, cst.Name) else "batch"
    parts: list[Part] = [f"def {name}({fold.model.value}, {given}):", end]
    if not single:
        parts += ["    ", batch, f" = {given}", end]
    for one in (*fold.statements, fold.loss):
        text = fold.source.code(one)
        if "\n" in text and ('"""' in text or "'''" in text):
            raise NotSimple(one, "a text of several lines is part of the loss.")
        for call in inside(one):
            if isinstance(call, cst.Call) and _moves_batch(call, fold):
                assert isinstance(call.func, cst.Attribute)
                plan.replace(call, call.func.value)
    for one in fold.statements:
        parts += ["    ", one, end]
    return [*parts, "    return ", fold.loss, fold.source.newline()]


def _moves_batch(call: cst.Call, fold: Fold) -> bool:
    return (
        isinstance(call.func, cst.Attribute)
        and call.func.attr.value in ("to", "cuda")
        and names(call.func.value) <= names(fold.batch)
        and not any(one.keyword and one.keyword.value == "dtype" for one in call.args)
        and not any("torch." in name for one in call.args for name in _dotted(one.value))
    )


def _dotted(node: cst.BaseExpression) -> list[str]:
    found = isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name)
    return [f"{node.value.value}."] if found else []  # pyright: ignore[reportAttributeAccessIssue]


def _arguments(plan: Plan, fold: Fold) -> list[list[Part]]:
    call, statement = fold.optimizer
    given = "named" if "named" not in names(call) else "named_parameters_"
    plan.replace(call.args[0].value, f"[p for _, p in {given}]")
    lines: list[list[Part]] = [[f"optimizer=lambda {given}: ", call]]
    if fold.scheduler is not None:
        (name,) = names(statement.targets[0].target)
        lines.append([f"lr_scheduler=lambda {name}: ", fold.scheduler[0]])
    if fold.evaluated is not None:
        lines.append(["eval_data=", fold.evaluated])
    lines.append(["epochs=", fold.epochs or "1"])
    if fold.accumulated is not None:
        loader = fold.loader
        lines.append(["global_batch_size=", loader, ".batch_size * ", fold.accumulated])
        lines.append(["micro_batch_size=", loader, ".batch_size"])
    if fold.clip is not None:
        lines.append(["max_grad_norm=", fold.clip])
    return lines


def _check_loss(plan: Plan) -> None:
    for source in plan.sources:
        for call in source.calls():
            kind = argument(call, None, "reduction")
            if kind is not None and constant(kind) != "mean":
                raise NotSimple(
                    call, "a loss that is no mean over samples; fit takes means, or a LossSum."
                )
    for _, call in plan.calls("torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast"):
        raise NotSimple(call, "mixed precision is not folded.")


def _free(tree: cst.Module, name: str) -> str:
    taken = names(tree)
    while name in taken:
        name += "_"
    return name


def _rewrite_saves(plan: Plan, fold: Fold) -> None:
    for _, call in plan.calls("torch.save"):
        if call not in fold.saves:
            _check_saved_after(fold, plan.flow.source(call), call)
            plan.replace(call.func, "folded.save")
    for source, call, func in plan.methods("save_pretrained"):
        if plan.flow.values(func.value) & plan.models:
            _check_saved_after(fold, source, call)
            given: list[Part] = [part for one in call.args for part in (", ", one)]
            plan.replace(call, "folded.save_pretrained(", func.value, *given, ")")


def _check_saved_after(fold: Fold, source: Source, call: cst.Call) -> None:
    if source is not fold.source or source.span(call)[0] < fold.source.span(fold.whole)[1]:
        raise NotSimple(call, "it cannot be seen whether this is saved after training.")


def _picks_device(plan: Plan) -> bool:
    found = [*plan.calls("torch.device"), *plan.methods("cuda")]
    return bool(found) or any(
        argument(call, 0, "device") is not None for _, call, _ in plan.methods("to")
    )


def _tell(plan: Plan, fold: Fold) -> None:
    warn_of_dropped(plan)
    warn_of_mode(plan, fold)
    origins = plan.flow.values(fold.loader)
    shuffled = any(
        isinstance(one.node, cst.Call)
        and constant(argument(one.node, 2, "shuffle")) is not False
        and argument(one.node, 2, "shuffle") is not None
        for one in origins
    )
    if shuffled:
        plan.warn(
            fold.whole,
            "fit shuffles by its own seed and the epoch, the same on any number of processes: an "
            "epoch has the same samples as before, in another order.",
            "To compare with the script step by step, set shuffle: false in both.",
        )
    if fold.accumulated is not None:
        plan.warn(
            fold.whole,
            "at an epoch's end fit takes a step on the mean over the rest; here the rest was "
            + ("divided as if it were a whole step: k of n batches gave k/n of their mean."
               if fold.flushes else "carried on into the next step, or dropped."),
            "Nothing changes where the batches of an epoch make up whole steps.",
        )  # fmt: skip
    for name in _DROPOUT:
        for _, call in plan.calls(name):
            plan.tell(call, "fit seeds the generators when it starts: dropout draws otherwise.")
    plan.tell(
        fold.whole,
        "what the loop printed and added up is fit's to report: loss, rate and time are in "
        "metrics.jsonl of the run's directory.",
    )
    for call in fold.saves:
        plan.tell(
            call, "fit saves checkpoints of its own, in the run's directory.",
            "Resume with resume: auto and an output_dir in unipar.yaml.",
        )  # fmt: skip
    if fold.evaluated is not None:
        plan.tell(fold.evaluated, "fit evaluates the mean loss over its samples after each epoch.")
