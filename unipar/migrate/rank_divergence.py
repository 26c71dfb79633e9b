"""Divergence of ranks: collective calls under conditions that differ between ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import libcst as cst

from unipar.migrate.loaders import LOADER
from unipar.migrate.models import optimizers_of
from unipar.migrate.plan import Plan
from unipar.migrate.processes import tells_rank
from unipar.migrate.source import Source
from unipar.migrate.tracing import bindings, given_to
from unipar.migrate.tree import children, inside

_CLOCKS = ("datetime.", "time.", "timeit.")
_FILES = {"glob.glob", "os.listdir", "os.path.exists", "os.path.getmtime", "os.path.getsize",
          "os.path.isdir", "os.path.isfile", "os.stat"}  # fmt: skip
_OF_PATHS = {"exists", "is_dir", "is_file"}
# What gives all ranks the same.
_EXCHANGES = {"all_gather", "all_gather_object", "all_reduce", "broadcast", "broadcast_object_list",
              "check_trigger", "gather", "gather_for_metrics", "gather_object",
              "reduce"}  # fmt: skip
# Decorators of functions that only some ranks run.
_LONE = {"on_last_process", "on_local_main_process", "on_main_process", "on_process",
         "rank_zero_only"}  # fmt: skip
# What is made by these asks no clock, whatever it is given.
_FRAMEWORKS = ("accelerate.", "colossalai.", "lightning.", "lightning_fabric.")
_TESTED = (cst.If, cst.While, cst.IfExp)


class Parting:
    """Finds what differs between ranks in the tests that decide if a place is come to.

    Args:
        plan: the program; its models are known.
        shared: the calls that build loaders of which each rank has a share.
        ranks: whether the program knows ranks, and may ask which one it is.
    """

    def __init__(self, plan: Plan, shared: Collection[cst.Call], *, ranks: bool) -> None:
        self._plan, self._shared, self._ranks = plan, set(shared), ranks

    def refuse(self, node: cst.CSTNode, what: str) -> None:
        """Refuse a place that some ranks may come to while others do not.

        Args:
            node: the place.
            what: what ranks do there together, for the message.
        """
        for test in self._tests(node, set()):
            why = self.differs(test)
            if why is not None:
                shown = " ".join(self._plan.flow.source(test).code(test).split())
                self._plan.refuse(
                    node,
                    f"{what}, and `{shown}` decides if a rank comes to it: {why}. Some would wait "
                    "for the others for ever.",
                    "Let all ranks come to it, or decide by what is the same on all: the number "
                    "of steps, or a figure over all of the validation data.",
                )
                return

    def differs(self, node: cst.BaseExpression) -> str | None:
        """Why a value may differ between ranks; ``None`` where nothing is seen to make it."""
        stack: list[tuple[cst.CSTNode, bool]] = [(node, True)]
        seen: set[cst.CSTNode] = set()
        while stack:
            one, direct = stack.pop()
            if one in seen:
                continue
            seen.add(one)
            why = self._reason(one, direct)
            if why is not None:
                return why
            stack += [(each, direct) for each in self._behind(one)]
            stack += [(each, False) for each in self._deciding(one)]
        return None

    # -- tests -----------------------------------------------------------------------------------

    def _tests(self, node: cst.CSTNode, seen: set[cst.CSTNode]) -> Iterator[cst.BaseExpression]:
        """The tests on the way to a node, in its function and in those that call it."""
        source = self._plan.flow.source(node)
        function, loops = source.function(node), source.loops(node)
        yield from _around(source, node)
        for kind in (cst.Return, cst.Break, cst.Continue):
            for jump in source.all(kind):
                if source.function(jump) is not function:
                    continue
                left = source.loops(jump)
                skips = any(one in loops for one in (left if kind is cst.Return else left[:1]))
                earlier = kind is cst.Return and source.span(jump)[0] < source.span(node)[0]
                if skips or earlier:
                    yield from _around(source, jump)
        if not isinstance(function, cst.FunctionDef) or function in seen:
            return
        for one in function.decorators:
            if _LONE & {name.value for name in inside(one) if isinstance(name, cst.Name)}:
                yield one.decorator
        for place in self._plan.sources:
            for call in place.calls():
                if self._plan.flow.runs(call, function):
                    yield from self._tests(call, seen | {function})

    # -- values ----------------------------------------------------------------------------------

    def _reason(self, node: cst.CSTNode, direct: bool) -> str | None:
        flow = self._plan.flow
        if isinstance(node, cst.Call):
            names = flow.names(node.func)
            method = node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
            if any(one.startswith(_CLOCKS) for one in names):
                return "ranks read their clocks at different times"
            if direct and (
                names & _FILES or (method in _OF_PATHS and not flow.functions(node.func))
            ):
                return "one rank may look for a file before, another after it is written"
            given = any(self._is_shared(one.value) for one in node.args)
            if given and not names & {"len", "print"} and not flow.functions(node.func):
                return "each rank has a share of the data"
        if isinstance(node, (cst.For, cst.CompFor)) and self._is_shared(node.iter):
            return "each rank has a share of the data"
        if self._ranks and self._asks_rank(node):
            return "it asks which rank this is"
        return None

    def _asks_rank(self, node: cst.CSTNode) -> bool:
        named = node.func if isinstance(node, cst.Call) else node
        name = named.attr if isinstance(named, cst.Attribute) else named
        if not isinstance(name, cst.Name):
            return False
        return name.value in _LONE or tells_rank(self._plan, name) or tells_rank(self._plan, node)

    def _is_shared(self, node: cst.BaseExpression) -> bool:
        return any(one.node in self._shared for one in self._plan.flow.values(node))

    def _behind(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Find what a value is made of."""
        flow = self._plan.flow
        if isinstance(node, cst.Call):
            functions, func = flow.functions(node.func), node.func
            method = func.attr.value if isinstance(func, cst.Attribute) else ""
            if method in _EXCHANGES or ("len" in flow.names(func) and self._of_loader(node)):
                return
            if functions:
                for one in functions:
                    yield from flow.source(one).returned(one)
            else:
                yield from (one.value for one in node.args)
            if isinstance(func, cst.Attribute):
                yield func.value
        elif isinstance(node, cst.Name):
            yield from self._named(node)
        elif isinstance(node, cst.Attribute):
            yield node.value
            for one in flow.functions(node):  # Of a property.
                yield from flow.source(one).returned(one)
            for source in self._plan.sources:
                for target, value in _writes(source):
                    if isinstance(target, cst.Attribute) and target.attr.value == node.attr.value:
                        yield value
        elif isinstance(node, (cst.For, cst.CompFor)):
            yield node.iter
        elif not isinstance(node, (cst.FunctionDef, cst.ClassDef, cst.Lambda)):
            yield from children(node)

    def _of_loader(self, call: cst.Call) -> bool:
        return any(self._is_shared(one.value) for one in call.args)

    def _named(self, node: cst.Name) -> Iterator[cst.CSTNode]:
        """Find what a name is bound to, and what is put into what it holds."""
        flow = self._plan.flow
        values = flow.values(node)
        made = any(one.kind == "call" and one.name.startswith(_FRAMEWORKS) for one in values)
        if made or values & self._plan.models or optimizers_of(values):
            return  # All ranks have the same.
        for binding in bindings(self._plan, node):
            if isinstance(binding.node, cst.Param):
                yield from given_to(self._plan, binding.node) or ()
            elif binding.node is not None and not binding.imported:
                yield from self._bound(flow.source(binding.node), binding.node)
        source = flow.source(node)
        for call in source.calls():
            func = call.func
            if not isinstance(func, cst.Attribute) or source.code(func.value) != node.value:
                continue
            near = source.function(call) is source.function(node)
            if near and not flow.functions(func):  # Those of the program are read themselves.
                yield from (one.value for one in call.args)
        for target, value in _writes(source):
            if isinstance(target, cst.Subscript) and source.code(target.value) == node.value:
                yield value

    def _bound(self, source: Source, name: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Find what a name is bound to by the statement that does so."""
        index: int | None = None
        for above in source.around(name):
            if isinstance(above, (cst.Tuple, cst.List)):
                index = next(i for i, one in enumerate(above.elements) if name in inside(one))
            elif isinstance(above, (cst.For, cst.CompFor)):
                if index != 0 or not _is_counted(source, above.iter):
                    yield above
                return
            elif isinstance(above, (cst.Assign, cst.AnnAssign, cst.AugAssign, cst.NamedExpr)):
                if above.value is not None:
                    yield from self._part(above.value, index)
                return
            elif isinstance(above, (cst.BaseSmallStatement, cst.BaseCompoundStatement)):
                return

    def _part(self, value: cst.BaseExpression, index: int | None) -> list[cst.BaseExpression]:
        """The element of a tuple, or of each tuple that a function gives back, if there is one."""
        flow = self._plan.flow
        every = [value]
        if isinstance(value, cst.Call) and index is not None:
            made = flow.functions(value.func)
            every = [one for each in made for one in flow.source(each).returned(each)]
        tuples = [one for one in every if isinstance(one, (cst.Tuple, cst.List))]
        if index is None or not tuples or len(tuples) < len(every):
            return [value]
        return [one.elements[index].value for one in tuples if index < len(one.elements)]

    def _deciding(self, node: cst.CSTNode) -> Iterator[cst.BaseExpression]:
        """The tests that decide which of its values a name or a call has."""
        if isinstance(node, cst.Call):
            for function in self._plan.flow.functions(node.func):
                source = self._plan.flow.source(function)
                for one in source.returned(function):
                    yield from _around(source, one)
        if not isinstance(node, cst.Name):
            return
        for one in (binding.node for binding in bindings(self._plan, node) if not binding.imported):
            if not isinstance(one, (cst.Param, cst.FunctionDef, cst.ClassDef, type(None))):
                yield from _around(self._plan.flow.source(one), one)


def _around(source: Source, node: cst.CSTNode) -> Iterator[cst.BaseExpression]:
    """The tests around a node in its function."""
    below = node
    for above in source.around(node):
        if isinstance(above, cst.FunctionDef):
            return
        if isinstance(above, _TESTED) and above.test is not below:
            yield above.test
        if isinstance(above, cst.BooleanOperation) and above.right is below:
            yield above.left
        below = above


def _writes(source: Source) -> Iterator[tuple[cst.BaseExpression, cst.BaseExpression]]:
    """Yield what is assigned to, each with what it is given."""
    for one in source.all(cst.Assign):
        yield from ((target.target, one.value) for target in one.targets)
    for one in (*source.all(cst.AugAssign), *source.all(cst.AnnAssign)):
        if one.value is not None:
            yield one.target, one.value


def _is_counted(source: Source, node: cst.BaseExpression) -> bool:
    """Return whether a loop over this counts: ``enumerate(loader)``, also in a progress bar."""
    return any(
        isinstance(one, cst.Call) and source.code(one.func) == "enumerate" for one in inside(node)
    )


def refuse_lone_saves(plan: Plan, names: Collection[str], *owners: str) -> None:
    """Refuse methods that write with all ranks now, where only some may come to them.

    Args:
        plan: the program.
        names: of the methods.
        owners: what makes the objects that they are of.
    """
    parting = Parting(plan, {call for _, call in plan.calls(*LOADER)}, ranks=True)
    for _, call, func in plan.methods(*names):
        if plan.made_by(plan.flow.values(func.value), *owners):
            parting.refuse(call, "all ranks write this together")
