"""The training loop: backward, step, zero_grad and clipping become calls of an engine."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import libcst as cst

from unipar.migrate.flow import Origin, argument, constant
from unipar.migrate.models import optimizers_of
from unipar.migrate.plan import Plan
from unipar.migrate.precision import SCALER
from unipar.migrate.source import Function, Source

_CLIP = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_")
_CLIP_VALUE = ("torch.nn.utils.clip_grad_value_", "torch.nn.utils.clip_grad.clip_grad_value_")
_OTHER_STEPS = ("torch.optim.lr_scheduler.", "torch.profiler.", "torch.optim.swa_utils.")


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
            if self.flow.functions(func):
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
        return found

    def _unscaled(self, loss: cst.BaseExpression) -> cst.BaseExpression:
        """The loss itself, where a GradScaler has scaled it."""
        if isinstance(loss, cst.Call) and isinstance(loss.func, cst.Attribute):
            scaler = self.flow.values(loss.func.value)
            if loss.func.attr.value == "scale" and self.plan.made_by(scaler, *SCALER):
                return loss.args[0].value
        return loss

    # -- rewriting -------------------------------------------------------------------------------

    def rewrite(self) -> dict[Origin, cst.BaseExpression]:
        """Rewrite all of it.

        Returns:
            For each optimizer whose gradients are clipped, the norm that they are clipped to.
        """
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
            self.plan.replace(call, "script.backward(", loss, *tail)
        for one in self.steps:
            if one.source.statement(one.call) is None:
                self.plan.refuse(
                    one.call, "what step() returns is used.", "An engine returns a StepResult."
                )
            if not _is_plain(one.optimizer):
                self.plan.refuse(
                    one.call, "the optimizer is the result of a call.", "Give it a name."
                )
            self.plan.replace(one.call, "script.engine(", one.optimizer, ").step()")
        self._drop_zero_grads()
        self._check_gradients()
        self._check_references()
        return self._clipping()

    def _events(self, source: Source, function: Function) -> list[tuple[int, Step | None]]:
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
        events = self._events(source, source.function(call))
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

    # -- zero_grad -------------------------------------------------------------------------------

    def _drop_zero_grads(self) -> None:
        zeroed: list[tuple[Source, cst.Call, set[Origin]]] = []
        for source, call, func in self.plan.methods("zero_grad"):
            values = self.flow.values(func.value)
            if not (optimizers_of(values) or values & self.plan.models):
                continue
            if source.statement(call) is None:
                self.plan.refuse(call, "zero_grad is not a statement here.", "Make it one.")
            cleared = optimizers_of(values) | {
                origin for origin, model in self.plan.optimizers.items()
                if self.flow.values(model) & values & self.plan.models
            }  # fmt: skip
            zeroed.append((source, call, cleared))
            if not self._clears_nothing(source, call):
                self.plan.refuse(
                    call,
                    "gradients of an accumulation that is not full may be thrown away here; an "
                    "engine steps on all that was added.",
                    "Step on the rest too: `if (i + 1) % n == 0 or i + 1 == len(loader)`, or call "
                    "zero_grad() only after the step.",
                )
            self.plan.drop(call)
        for step in self.steps:
            function = step.source.function(step.call)
            mine = optimizers_of(self.flow.values(step.optimizer))
            every = [
                call for source, call, cleared in zeroed
                if source is step.source and source.function(call) is function and cleared & mine
            ]  # fmt: skip
            if every and not self._cleared_between(step, every):
                self.plan.refuse(
                    step.call,
                    "gradients from another model's loss may be among those of this step; an "
                    "engine steps on those of its own losses alone.",
                    "Call zero_grad() between the other optimizer's step and this one's backward.",
                )
            if not every:
                self.plan.refuse(
                    step.call,
                    "gradients are never cleared in this function, so each step would be on the "
                    "sum of all so far; an engine clears them after each step.",
                    "Call zero_grad() in it, if the sum is not meant.",
                )

    def _cleared_between(self, step: Step, zeroed: list[cst.Call]) -> bool:
        """Whether another optimizer's losses leave no gradients in those of a step."""
        events = self._events(step.source, step.source.function(step.call))
        steps = [one for _, one in events if one is not None]
        if len({one.text for one in steps}) < 2:
            return True
        at = step.source.span(step.call)[0]
        before = [place for place, one in events if one is not None and place < at]
        start = before[-1] if before else 0
        first = min((place for place, one in events if one is None and start < place < at),
                    default=at)  # fmt: skip
        return any(start <= step.source.span(one)[0] < first for one in zeroed)

    def _clears_nothing(self, source: Source, call: cst.Call) -> bool:
        """Whether no gradients can be waiting for a step at a ``zero_grad()``."""
        function = source.function(call)
        steps = [
            one.call for one in self.steps
            if one.source is source and source.function(one.call) is function
        ]  # fmt: skip
        backwards = [
            one for place, one, _ in self.backwards
            if place is source and source.function(one) is function
        ]  # fmt: skip
        block = source.block(call)
        if any(source.block(step) is block for step in steps):
            return self._after_step(source, call)
        if not backwards:
            return False
        if all(
            any(
                source.block(step) is source.block(one)
                and source.span(step)[0] > source.span(one)[0]
                for step in steps
            )
            for one in backwards
        ):
            return self._after_step(source, call)
        loops = set(source.loops(call))
        if any(loops >= set(source.loops(one)) for one in backwards):
            return False
        if self._flushed(source, steps):
            return True
        depth = min(len(source.loops(one)) for one in backwards)
        whole = isinstance(function, cst.Module) or depth > 1
        first = min(source.span(one)[0] for one in backwards)
        return whole and not loops and source.span(call)[0] < first

    def _after_step(self, source: Source, call: cst.Call) -> bool:
        """Whether what comes before a ``zero_grad()``, the loop's end included, is a step."""
        events = self._events(source, source.function(call))
        before = [event for event in events if event[0] < source.span(call)[0]]
        inside = bool(source.loops(call)) or not before
        previous = before[-1:] or (events[-1:] if inside else [])
        return all(step is not None for _, step in previous)

    def _flushed(self, source: Source, steps: list[cst.Call]) -> bool:
        """Whether steps are taken at the end of the data too: ``or i + 1 == len(loader)``."""
        for step in steps:
            test = next((a.test for a in source.around(step) if isinstance(a, cst.If)), None)
            if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.Or):
                last = (test.left, test.right)
                if any(isinstance(one, cst.Comparison) and "len(" in source.code(one)
                       and "==" in source.code(one) for one in last):  # fmt: skip
                    return True
        return False

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

    # -- clipping --------------------------------------------------------------------------------

    def _clipping(self) -> dict[Origin, cst.BaseExpression]:
        found: dict[Origin, cst.BaseExpression] = {}
        for _, call in self.plan.calls(*_CLIP_VALUE):
            self.plan.refuse(
                call, "gradients are clipped by value; strategies clip by norm.",
                "Use clip_grad_norm_.",
            )  # fmt: skip
        for source, call in self.plan.calls(*_CLIP):
            step = next(
                (
                    one for one in self.steps
                    if one.source is source and source.block(one.call) is source.block(call)
                    and source.span(one.call)[0] > source.span(call)[0]
                ),
                None,
            )  # fmt: skip
            norm = argument(call, 1, "max_norm")
            kind = argument(call, 2, "norm_type")
            if step is None or norm is None or source.statement(call) is None:
                self.plan.refuse(
                    call,
                    "it does not stand alone in front of the step, in the same block.",
                    "Put it there; the norm is StepResult.grad_norm.",
                )
                continue
            if kind is not None and constant(kind) != 2:
                self.plan.refuse(call, "strategies clip by the 2-norm.", "Use norm_type=2.")
            if step.scaled and not self._unscaled_before(source, call):
                self.plan.refuse(
                    call,
                    "clips before scaler.unscale_(), so gradients are clipped while they are "
                    "multiplied by the loss scale (65536 at first): to max_norm / 65536, which "
                    "all but stops training.",
                    "Call scaler.unscale_(optimizer) before it.",
                )
            for origin in optimizers_of(self.flow.values(step.optimizer)):
                self._check_covered(origin, call)
                if not self._known_at(origin, norm):
                    self.plan.refuse(
                        call,
                        f"the norm `{source.code(norm)}` is not known where the optimizer is "
                        "built, as clipping belongs to the strategy.",
                        "Use a number, or a name that is bound there.",
                    )
                found[origin] = norm
            self.plan.drop(call)
        return found

    def _check_covered(self, origin: Origin, call: cst.Call) -> None:
        given = argument(call, 0, "parameters")
        model = self.plan.optimizers.get(origin)
        if (
            not isinstance(given, cst.Call)
            or not isinstance(given.func, cst.Attribute)
            or given.func.attr.value != "parameters"
            or model is None
            or not self.flow.values(given.func.value) & self.flow.values(model) & self.plan.models
        ):
            self.plan.refuse(
                call, "strategies clip all gradients of a model together.",
                "Clip model.parameters().",
            )  # fmt: skip

    def _known_at(self, origin: Origin, norm: cst.BaseExpression) -> bool:
        if constant(norm) is not None:
            return True
        if not _is_plain(norm) or origin.node is None:
            return False
        root = norm
        while isinstance(root, cst.Attribute):
            root = root.value
        here, there = self.flow.source(norm), self.flow.source(origin.node)
        if here is not there or not isinstance(root, cst.Name):
            return False
        function = there.function(origin.node)
        own = here.scope(root)
        scopes = [one.scope for one in own[root.value] if hasattr(one, "scope")] if own else []
        top = here.scope(here.tree)
        inside = here.function(norm) is function
        bound = min((here.span(one.node)[0] for one in own[root.value] if hasattr(one, "node")),
                    default=0) if own else 0  # fmt: skip
        late = inside and bound > there.span(origin.node)[0]
        return bool(scopes) and not late and all(scope is top or inside for scope in scopes)

    def _unscaled_before(self, source: Source, call: cst.Call) -> bool:
        return any(
            place is source
            and source.block(one) is source.block(call)
            and source.span(one)[0] < source.span(call)[0]
            for place, one, _ in self.plan.methods("unscale_")
        )


def _is_plain(node: cst.BaseExpression) -> bool:
    """Whether an expression is a name, or an attribute of one."""
    while isinstance(node, cst.Attribute):
        node = node.value
    return isinstance(node, cst.Name)


def _is_false(one: cst.Arg) -> bool:
    return one.keyword is not None and constant(one.value) is False
