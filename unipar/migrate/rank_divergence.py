"""Tests whose outcome depends on the rank, or may differ between ranks."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from unipar.migrate.models import optimizers_of
from unipar.migrate.plan import Plan
from unipar.migrate.source import Source
from unipar.migrate.tracing import bindings, given_to, trace
from unipar.migrate.tree import children, inside

_LOADERS = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
_CLOCKS = ("datetime.", "time.", "timeit.")
_FILES = {"glob.glob", "os.listdir", "os.path.exists", "os.path.isdir", "os.path.isfile"}
# What gives all ranks the same.
_EXCHANGES = {"all_gather", "all_gather_object", "all_reduce", "broadcast", "broadcast_object_list",
              "check_trigger", "gather", "gather_for_metrics", "gather_object",
              "reduce"}  # fmt: skip
# Names that tell ranks apart, beside those with a word such as "rank" in them.
_RANKS = {"is_global_zero", "is_last_process", "local_process_index", "on_last_process",
          "on_local_process", "on_process", "process_index"}  # fmt: skip
# What is made by these is the same on all ranks, whatever it is given.
_FRAMEWORKS = ("accelerate.", "colossalai.", "lightning.", "lightning_fabric.")
_DATA = "each rank has a share of the data"


class Divergence:
    """Finds what makes a test come out otherwise on other ranks.

    Args:
        plan: the program; its models are known.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._loaders = {call for _, call in plan.calls(*_LOADERS)}

    def asks_rank(self, test: cst.BaseExpression) -> bool:
        """Return whether a test, or the decorator of a function, is of the rank."""
        for one in _asked(test):
            if self._tells_rank(one):
                return True
            if isinstance(one, cst.Name):
                # As of `first = rank == 0`; what is merely made from the rank is no test of it.
                compared = (cst.Comparison, cst.BooleanOperation, cst.UnaryOperation)
                behind = [each for each in trace(self._plan, one) if isinstance(each, compared)]
                if any(self._tells_rank(part) for each in behind for part in _asked(each)):
                    return True
        return False

    def _tells_rank(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Name) and node.value != "__name__":
            words = node.value.lower().strip("_").split("_")
            if {"rank", "main", "master"} & set(words) or node.value in _RANKS:
                return True
        return self._plan.made_by(self._plan.flow.values(node), "torch.distributed.get_rank")

    def why(self, test: cst.BaseExpression) -> str | None:
        """Why a test may differ between ranks; ``None`` where nothing is seen to make it."""
        stack: list[cst.CSTNode] = [test]
        seen: set[cst.CSTNode] = set()
        own = {*inside(test)}
        while stack:
            one = stack.pop()
            if one not in seen:
                seen.add(one)
                why = self._reason(one, looked=one in own)
                if why is not None:
                    return why
                stack += self._behind(one)
        return None

    def _reason(self, node: cst.CSTNode, *, looked: bool) -> str | None:
        if isinstance(node, cst.Call):
            names = self._plan.flow.names(node.func)
            if any(one.startswith(_CLOCKS) for one in names):
                return "ranks read their clocks at different times"
            if looked and names & _FILES:
                return "one rank may look for a file before, another after it is written"
            given = any(self._is_shared(one.value) for one in node.args)
            if given and "len" not in names and not self._plan.flow.functions(node.func):
                return _DATA
        if isinstance(node, (cst.For, cst.CompFor)) and self._is_shared(node.iter):
            return _DATA
        return None

    def _is_shared(self, node: cst.BaseExpression) -> bool:
        return any(one.node in self._loaders for one in self._plan.flow.values(node))

    def _behind(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Find what a value is made of, as far as plain names hold it.

        What objects and dictionaries hold beside it is not told apart, so they end the search.
        """
        flow = self._plan.flow
        if isinstance(node, cst.Call):
            functions = flow.functions(node.func)
            for one in functions:
                yield from flow.source(one).returned(one)
            if not functions and not _is_exchange(node) and "len" not in flow.names(node.func):
                yield from (one.value for one in node.args)
                if isinstance(node.func, cst.Attribute):
                    yield node.func.value
        elif isinstance(node, cst.Name):
            yield from self._named(node)
        elif isinstance(node, cst.Attribute):
            yield node.value
        elif isinstance(node, (cst.For, cst.CompFor)):
            yield node.iter
        elif not isinstance(node, (cst.Dict, cst.FunctionDef, cst.ClassDef, cst.Lambda)):
            yield from children(node)

    def _named(self, node: cst.Name) -> Iterator[cst.CSTNode]:
        """Find what a name is bound to, and what is put into the list that it holds."""
        flow = self._plan.flow
        values = flow.values(node)
        made = any(one.kind == "call" and one.name.startswith(_FRAMEWORKS) for one in values)
        own = any(one.kind == "self" for one in values)
        if made or own or values & self._plan.models or optimizers_of(values):
            return
        for binding in bindings(self._plan, node):
            if isinstance(binding.node, cst.Param):
                yield from given_to(self._plan, binding.node) or ()
            elif binding.node is not None and not binding.imported:
                yield from self._bound(flow.source(binding.node), binding.node)
        source = flow.source(node)
        for call in source.calls():
            func = call.func
            if (
                isinstance(func, cst.Attribute)
                and func.attr.value in ("append", "extend")
                and source.code(func.value) == node.value
                and source.function(call) is source.function(node)
            ):
                yield from (one.value for one in call.args)

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


def _asked(test: cst.BaseExpression) -> Iterator[cst.CSTNode]:
    """What a test is made of, but what all ranks are given the same of."""
    stack: list[cst.CSTNode] = [test]
    while stack:
        one = stack.pop()
        if not _is_exchange(one):
            yield one
            stack += children(one)


def _is_exchange(node: cst.CSTNode) -> bool:
    func = node.func if isinstance(node, cst.Call) else None
    return isinstance(func, cst.Attribute) and func.attr.value in _EXCHANGES


def _is_counted(source: Source, node: cst.BaseExpression) -> bool:
    """Return whether a loop over this counts: ``enumerate(loader)``, also in a progress bar."""
    return any(
        isinstance(one, cst.Call) and source.code(one.func) == "enumerate" for one in inside(node)
    )
