"""The training loop: backward passes and steps become an engine's."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import libcst as cst

from unipar.migrate.literals import argument, constant
from unipar.migrate.models import optimizers_of
from unipar.migrate.plan import Plan
from unipar.migrate.precision import SCALER
from unipar.migrate.source import Function, Source

# What the names of functions and classes that build schedulers begin with.


@dataclass(frozen=True)
class Step:
    """A call that updates weights.

    Attributes:
        source: its file.
        call: the call.
        optimizer: the expression for the optimizer.
        scaled: whether a GradScaler makes it.
    """

    source: Source
    call: cst.Call
    optimizer: cst.BaseExpression
    scaled: bool

    @property
    def text(self) -> str:
        return self.source.code(self.optimizer)


class TrainingLoop:
    """Finds the parts of the loop, and rewrites them together.

    Args:
        plan: the program; its optimizers are known.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.flow = plan, plan.flow
        self.steps = self._find_steps()
        self.backwards = self._find_backwards()

    # -- finding ---------------------------------------------------------------------------------

    def _find_steps(self) -> list[Step]:
        found: list[Step] = []
        for source, call, func in self.plan.methods("step"):
            values = self.flow.values(func.value)
            if self.plan.made_by(values, *SCALER):
                optimizer = argument(call, 0, "optimizer")
                if optimizer is not None and optimizers_of(self.flow.values(optimizer)):
                    found.append(Step(source, call, optimizer, True))
                else:
                    self.plan.refuse(
                        call,
                        "it cannot be seen which optimizer this steps.",
                        "Give migrate the file that builds it too.",
                    )
            elif optimizers_of(values):
                if call.args:
                    self.plan.refuse(
                        call,
                        "a closure runs the model several times in a step; an engine does once.",
                        "Use an optimizer without a closure.",
                    )
                found.append(Step(source, call, func.value, False))
            elif not self.flow.functions(func) and self._unknown_step(source, call, func):
                self.plan.refuse(
                    call,
                    "it cannot be seen what this steps, in a function that trains.",
                    "Give migrate the file that builds it too.",
                )
        return found

    def _unknown_step(self, source: Source, call: cst.Call, func: cst.Attribute) -> bool:
        values = [one for one in self.flow.values(func.value) if one.kind == "call"]
        if values and all(one.name for one in values):
            return False
        function = source.function(call)
        return any(
            source.function(other) is function
            for place, other, _ in self.plan.methods("backward")
            if place is source
        )

    def _find_backwards(self) -> list[tuple[Source, cst.Call, cst.BaseExpression]]:
        found: list[tuple[Source, cst.Call, cst.BaseExpression]] = []
        for source, call, func in self.plan.methods("backward"):
            if call in self.plan.losses or self.flow.functions(func):
                continue
            if "torch.autograd.backward" in self.flow.names(func):
                self.plan.refuse(
                    call, "gradients are computed around the loss.", "Call loss.backward()."
                )
                continue
            if any(not _is_false(one) for one in call.args) or source.statement(call) is None:
                self.plan.refuse(
                    call,
                    "an engine's backward takes a loss and nothing else.",
                    "Leave retain_graph, create_graph and gradient out.",
                )
            found.append((source, call, self._unscaled(func.value)))
        found += [(self.flow.source(call), call, loss) for call, loss in self.plan.losses.items()]
        return found

    def _unscaled(self, loss: cst.BaseExpression) -> cst.BaseExpression:
        """The loss itself, where a GradScaler has scaled it."""
        if isinstance(loss, cst.Call) and isinstance(loss.func, cst.Attribute):
            scaler = self.flow.values(loss.func.value)
            if loss.func.attr.value == "scale" and self.plan.made_by(scaler, *SCALER):
                return loss.args[0].value
        return loss

    # -- rewriting -------------------------------------------------------------------------------

    def rewrite(self) -> None:
        """Rewrite backward passes and steps."""
        if not self.steps:
            for origin in self.plan.optimizers:
                if origin.node is not None:
                    self.plan.refuse(
                        origin.node, "no step of this optimizer is seen.",
                        "Give migrate the file that trains too.",
                    )  # fmt: skip
        for source, call, loss in self.backwards:
            optimizer = self._stepped_after(source, call)
            tail = [")"] if optimizer is None else [", ", optimizer, ")"]
            self.plan.replace(call, f"{self.plan.words.backward}(", loss, *tail)
        for one in self.steps:
            if one.source.statement(one.call) is None:
                self.plan.refuse(
                    one.call, "what step() returns is used.", "An engine returns a StepResult."
                )
            if not is_plain(one.optimizer):
                self.plan.refuse(
                    one.call, "the optimizer is the result of a call.", "Give it a name."
                )
            before, after = self.plan.words.step
            self.plan.replace(one.call, before, one.optimizer, after)
        self._check_gradients()
        self._check_references()

    def events(self, source: Source, function: Function) -> list[tuple[int, Step | None]]:
        """Backward passes (``None``) and steps of a function, in the order of its lines."""
        events: list[tuple[int, Step | None]] = [
            (source.span(call)[0], None)
            for place, call, _ in self.backwards
            if place is source and source.function(call) is function
        ]
        events += [
            (source.span(one.call)[0], one)
            for one in self.steps
            if one.source is source and source.function(one.call) is function
        ]
        return sorted(events, key=lambda event: event[0])

    def _stepped_after(self, source: Source, call: cst.Call) -> str | None:
        """The expression for the optimizer whose step a backward pass is for."""
        events = self.events(source, source.function(call))
        steps = [step for _, step in events if step is not None]
        several = len({step.text for step in steps}) > 1
        for (_, one), (_, after) in itertools.pairwise(events):
            if one is not None and after is not None and one.text != after.text:
                self.plan.refuse(
                    after.call,
                    "several optimizers step on the gradients of one backward pass.",
                    "An engine steps on its own: call backward for each loss before its step.",
                )
        at = source.span(call)[0]
        later = [step for place, step in events if step is not None and place > at]
        if later or (steps and not several):
            step = (later or steps)[0]
            inner = [loop for loop in source.loops(step.call) if loop not in source.loops(call)]
            if not inner:
                return step.text
            self.plan.refuse(
                step.call, "a loop over optimizers steps them.", "Step each by its name."
            )
            return None
        if steps or len(self.plan.optimizers) != 1:
            self.plan.refuse(
                call,
                "it cannot be seen which optimizer this backward pass is for.",
                "Step the optimizer in the same function, after it.",
            )
        return None

    def _check_gradients(self) -> None:
        for source in self.plan.sources:
            for node in source.all(cst.Attribute):
                names = self.flow.names(node)
                if node.attr.value == "grad" and not names:
                    self.plan.refuse(
                        node,
                        "gradients are read or written; a strategy may scale or divide them.",
                        "Use max_grad_norm for clipping, and StepResult.grad_norm for the norm.",
                    )
                elif names & {"torch.autograd.grad"}:
                    self.plan.refuse(
                        node, "gradients are computed around the engine.",
                        "Port this by hand (docs/how-to/own-loop.md).",
                    )  # fmt: skip

    def _check_references(self) -> None:
        """Refuse methods that are handed around instead of being called."""
        for source in self.plan.sources:
            for node in source.all(cst.Attribute):
                parent = source.parent(node)
                if isinstance(parent, cst.Call) and parent.func is node:
                    continue
                values = self.flow.values(node.value)
                stepping = node.attr.value in ("step", "zero_grad") and optimizers_of(values)
                if stepping or (node.attr.value == "backward" and not self.flow.values(node)):
                    self.plan.refuse(
                        node, "the method is handed on, and it cannot be seen where it is called.",
                        "Call it here.",
                    )  # fmt: skip


def is_plain(node: cst.BaseExpression) -> bool:
    """Return whether an expression is a name, or an attribute of one."""
    while isinstance(node, cst.Attribute):
        node = node.value
    return isinstance(node, cst.Name)


def _is_false(one: cst.Arg) -> bool:
    return one.keyword is not None and constant(one.value) is False
