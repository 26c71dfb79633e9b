"""FSDP's wrappers and ``fully_shard``, which are taken out."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.dialects.fsdp_options import Options
from unipar.migrate.edits import Span
from unipar.migrate.literals import argument, constant
from unipar.migrate.models import FSDP
from unipar.migrate.plan import Plan
from unipar.migrate.processes import is_conditional
from unipar.migrate.source import BLOCKS, Source
from unipar.migrate.tracing import keywords

PACKAGES = ("torch.distributed.fsdp.", "torch.distributed._composable.")
SHARD = ("torch.distributed.fsdp.fully_shard", "torch.distributed._composable.fsdp.fully_shard",
         "torch.distributed._composable.fsdp.fully_shard.fully_shard")  # fmt: skip


class Wrapping:
    """Reads and takes out what divides the models.

    Args:
        plan: the program; its optimizers are known.

    Attributes:
        gone: the pieces of the program that are taken out.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.flow = plan, plan.flow
        self.gone: list[tuple[Source, Span]] = []
        self._options, self._units = Options(plan), False

    def rewrite(self) -> None:
        """Take out the calls, and put their settings into the run's."""
        roots = 0
        for source, call in self.plan.calls(*FSDP, *SHARD):
            model = argument(call, 0, "module")
            if model is None:
                self.plan.refuse(call, "it cannot be seen what it divides.", "Name the model.")
                continue
            root = bool(self.flow.values(model) & self.plan.models)
            roots += root
            if root and is_conditional(source, call):
                self.plan.refuse(
                    call,
                    "whether the model is divided is decided while it runs.",
                    "Divide it always; unipar.yaml's strategy decides.",
                )
            if root:
                self._warn_of_order(source, call, model)
            self._options.read(call)
            self.plan.handled.add(call)
            if root:
                self._drop(source, call, model)
            else:
                self._units = True
                self._drop_unit(source, call, model)
        if not roots and self.plan.optimizers:
            node = next(iter(self.plan.optimizers)).node
            assert node is not None
            self.plan.refuse(
                node, "it cannot be seen where its model is given to FSDP.",
                "Give migrate the file that does it too.",
            )  # fmt: skip
        self.plan.config["strategy"] = self._options.settings(units=self._units)

    def _warn_of_order(self, source: Source, call: cst.Call, model: cst.BaseExpression) -> None:
        """Call out an optimizer that holds the weights from before they are divided."""
        kept = (keywords(self.plan, call) or {}).get("use_orig_params", [])
        if kept and constant(kept[0]) is not False:
            return  # FSDP 1 leaves the optimizer's parameters in their places then.
        for origin, owned in self.plan.optimizers.items():
            node = origin.node
            if node is None or self.flow.source(node) is not source:
                continue
            same = source.function(node) is source.function(call)
            mine = self.flow.values(owned) & self.flow.values(model) & self.plan.models
            if same and mine and source.span(node)[0] < source.span(call)[0]:
                self.plan.warn(
                    node,
                    "it was built before the model was divided, so it updated weights that "
                    "nothing computed with, and the model stayed as it was; now it trains.",
                    "This fixes it.",
                )

    def _drop(self, source: Source, call: cst.Call, model: cst.BaseExpression) -> None:
        """Leave the model in place of the call; nothing where that would only name it."""
        above = source.parent(call)
        same = isinstance(above, cst.Assign) and [
            source.code(one.target) for one in above.targets
        ] == [source.code(model)]
        if (isinstance(above, cst.Assign) and same) or isinstance(above, cst.Expr):
            self._remove(source, above)
        else:
            start, stop = source.span(call)
            inner = source.span(model)
            self.gone += [(source, (start, inner[0])), (source, (inner[1], stop))]
            self.plan.replace(call, model)

    def _drop_unit(self, source: Source, call: cst.Call, model: cst.BaseExpression) -> None:
        """Take out the dividing of a part, and the loop that does nothing else."""
        line = source.parent(call)
        if not isinstance(line, (cst.Expr, cst.Assign)):
            self._drop(source, call, model)
            return
        named = isinstance(line, cst.Assign) and not any(
            self._same_unit(source, one.target, model) for one in line.targets
        )
        if named:
            self._drop(source, call, model)
            return
        outer: cst.CSTNode = line
        for above in source.around(line):
            if isinstance(above, cst.SimpleStatementLine) and len(above.body) == 1:
                outer = above
            elif isinstance(above, BLOCKS) and len(above.body) == 1:
                continue
            elif (
                isinstance(above, cst.If) and above.orelse is None and self._is_test(above.test)
            ) or (isinstance(above, cst.For) and above.orelse is None):
                outer = above
            else:
                break
        if isinstance(outer, (cst.If, cst.For)):
            self._remove_lines(source, outer)
        else:
            self._remove(source, line)

    def _same_unit(
        self, source: Source, target: cst.BaseAssignTargetExpression, model: cst.BaseExpression
    ) -> bool:
        """Return whether an assignment only puts a part back to where it was."""
        if source.code(target) == source.code(model) or isinstance(target, cst.Subscript):
            return True
        return isinstance(target, cst.Attribute) and "." in source.code(model)

    def _is_test(self, test: cst.BaseExpression) -> bool:
        if isinstance(test, cst.Call) and "isinstance" in self.flow.names(test.func):
            classes = test.args[1].value if len(test.args) > 1 else None
            elements = [e.value for e in classes.elements] if isinstance(
                classes, cst.Tuple) else [classes]  # fmt: skip
            names = [self._options.class_name(one) for one in elements if one is not None]
            self._options.classes.update(names)
            return True
        return False

    def _remove(self, source: Source, statement: cst.BaseSmallStatement) -> None:
        self.gone.append((source, source.span(statement)))
        source.remove(statement)

    def _remove_lines(self, source: Source, node: cst.BaseCompoundStatement) -> None:
        start, stop = source.line_start(node), source.span(node)[1]
        end = source.edits.data.find(b"\n", stop)
        self.gone.append((source, (start, stop)))
        above = source.parent(node)
        if len(getattr(above, "body", ())) == 1:
            source.edits.replace(source.span(node), "pass")
        else:
            source.edits.replace((start, len(source.edits.data) if end < 0 else end + 1), "")
