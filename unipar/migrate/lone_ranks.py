"""What all ranks do together, in places that only some of them may come to.

Nothing of this keeps a script from being migrated: on one process all of it runs, and on several
the run that waits in vain ends with an error. So a note says beforehand where that may be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from unipar.migrate.dialects import Dialect
from unipar.migrate.models import optimizers_of
from unipar.migrate.plan import Plan
from unipar.migrate.rank_divergence import Divergence
from unipar.migrate.source import Source
from unipar.migrate.tree import inside

# Decorators of functions that only some ranks run.
_LONE = {"on_last_process", "on_local_main_process", "on_local_process", "on_main_process",
         "on_process", "rank_zero_only"}  # fmt: skip


def tell_of_lone_ranks(plan: Plan, dialect: Dialect) -> None:
    """Note where only some ranks may come to what all of them do together.

    Args:
        plan: the program; its models are known.
        dialect: says what that is, beside calls of models.
    """
    lone = _LoneRanks(plan, dialect)
    for source in plan.sources:
        for call in source.calls():
            lone.tell(source, call)


@dataclass
class _Reached:
    """What a call, or a function that it leads to, does.

    Attributes:
        saves: whether all ranks save together.
        computes: whether it needs a model's weights.
        weights: whether it takes a model's state dict.
        state: whether it takes an optimizer's.
    """

    saves: bool = False
    computes: bool = False
    weights: bool = False
    state: bool = False


class _LoneRanks:
    def __init__(self, plan: Plan, dialect: Dialect) -> None:
        self._plan, self._dialect = plan, dialect
        self._divergence = Divergence(plan)
        self._jumps: dict[cst.CSTNode, list[cst.CSTNode]] = {}
        self._calls: dict[cst.CSTNode, list[cst.Call]] = {}
        for source in plan.sources:
            for kind in (cst.Return, cst.Break, cst.Continue):
                for jump in source.all(kind):
                    self._jumps.setdefault(source.function(jump), []).append(jump)
            for call in source.calls():
                self._calls.setdefault(source.function(call), []).append(call)

    def tell(self, source: Source, call: cst.Call) -> None:
        """Note a call that leads to what all ranks do, where tests decide which come to it."""
        tests = list(dict.fromkeys(self._tests(source, call)))
        by_rank = next(filter(self._divergence.asks_rank, tests), None)
        if not tests or (by_rank is None and not self._dialect.together):
            return
        reached = self._reached(call)
        if by_rank is not None and reached.saves:
            self._plan.tell(
                call,
                f"all ranks save together, and `{self._shown(by_rank)}` decides which come to it. "
                "On several ranks they would wait for the others in vain.",
                "Let every rank come to it before running on several.",
            )
        elif by_rank is not None and reached.computes:
            self._plan.tell(
                call,
                f"`{self._shown(by_rank)}` decides which ranks come to it. Strategies that divide "
                "the model's weights (fsdp, zero3) need all ranks for it, and would wait for the "
                "others.",
                "Let every rank come to it before choosing one of those.",
            )
        elif by_rank is not None and reached.weights:
            self._plan.tell(
                call,
                f"`{self._shown(by_rank)}` decides which ranks come to it. Where the strategy "
                "divides the weights (fsdp, zero3), a state dict of one rank has only a part, and "
                "is refused.",
                f"Call {self._whole_of(call)} on all ranks before choosing one of those.",
            )
        elif by_rank is not None and reached.state:
            self._plan.tell(
                call,
                f"`{self._shown(by_rank)}` decides which ranks come to it. Where the strategy "
                "divides the optimizer's state (zero1, zero2, zero3, fsdp), a state dict of one "
                "rank has only a part, and is refused.",
                f"Call {self._whole_of(call, state=True)} on all ranks before choosing one of "
                "those.",
            )
        elif reached.saves:
            self._tell_by_data(call, tests)

    def _whole_of(self, call: cst.Call, *, state: bool = False) -> str:
        """What gives weights, or state, whole, by the names that the call would have given."""
        of, name = call.func, "optimizer" if state else "model"
        if isinstance(of, cst.Attribute) and of.attr.value == "state_dict":
            name = self._shown(of.value)
        dialect = self._dialect
        return (
            dialect.whole_state.format(optimizer=name)
            if state
            else dialect.whole.format(model=name)
        )

    def _tell_by_data(self, call: cst.Call, tests: list[cst.BaseExpression]) -> None:
        for test in tests:
            why = self._divergence.why(test)
            if why is not None:
                self._plan.tell(
                    call,
                    f"all ranks save together, and `{self._shown(test)}`, which decides if a rank "
                    f"comes to it, may differ between them: {why}. On several ranks some would "
                    "wait for the others in vain.",
                    "Decide by what is the same on all: the number of steps, or a figure over all "
                    "of the validation data.",
                )
                return

    def _shown(self, test: cst.BaseExpression) -> str:
        return " ".join(self._plan.flow.source(test).code(test).split())

    def _reached(self, call: cst.Call) -> _Reached:
        plan, dialect = self._plan, self._dialect
        found = _Reached()
        stack, seen = [call], set[cst.CSTNode]()
        while stack:
            one = stack.pop()
            values = plan.flow.values(one.func)
            found.computes |= bool(values & plan.models) or plan.made_by(values, *dialect.engines)
            func = one.func
            if isinstance(func, cst.Attribute) and (
                func.attr.value in (*dialect.together, *dialect.gathering)
                and plan.made_by(plan.flow.values(func.value), *dialect.main)
            ):
                found.saves |= func.attr.value in dialect.together
                found.computes |= func.attr.value in dialect.gathering
            if isinstance(func, cst.Attribute) and func.attr.value == "state_dict":
                if self._is_model(func.value):
                    found.weights = True
                    # Where all ranks are to call it, as FSDP's.
                    found.computes |= not dialect.whole
                elif dialect.whole_state and optimizers_of(plan.flow.values(func.value)):
                    found.state = True
            new = [f for f in plan.flow.functions(func) if f not in seen]
            seen.update(new)
            stack += [each for function in new for each in self._calls.get(function, ())]
        return found

    def _is_model(self, node: cst.BaseExpression) -> bool:
        """Whether it is a model, also taken out of what wraps it."""
        plan = self._plan
        while isinstance(node, cst.Attribute) and node.attr.value in ("module", "_orig_mod"):
            node = node.value
        if isinstance(node, cst.Call) and node.args and _unwraps(node):
            node = node.args[0].value
        values = plan.flow.values(node)
        return bool(values & plan.models) or plan.made_by(values, *self._dialect.engines)

    def _tests(self, source: Source, node: cst.CSTNode) -> Iterator[cst.BaseExpression]:
        """The tests that decide, within its function, if a node is come to."""
        function, loops = source.function(node), source.loops(node)
        yield from _around(source, node)
        for jump in self._jumps.get(function, ()):
            left = source.loops(jump)
            returns = isinstance(jump, cst.Return)
            skips = any(one in loops for one in (left if returns else left[:1]))
            if skips or (returns and source.span(jump)[0] < source.span(node)[0]):
                yield from _around(source, jump)
        if isinstance(function, cst.FunctionDef):
            for one in function.decorators:
                if _LONE & {part.value for part in inside(one) if isinstance(part, cst.Name)}:
                    yield one.decorator


def _unwraps(call: cst.Call) -> bool:
    return isinstance(call.func, cst.Attribute) and call.func.attr.value == "unwrap_model"


def _around(source: Source, node: cst.CSTNode) -> Iterator[cst.BaseExpression]:
    """The tests around a node in its function."""
    below = node
    for above in source.around(node):
        if isinstance(above, cst.FunctionDef):
            return
        if isinstance(above, (cst.If, cst.While, cst.IfExp)) and above.test is not below:
            yield above.test
        if isinstance(above, cst.BooleanOperation) and above.right is below:
            yield above.left
        below = above
