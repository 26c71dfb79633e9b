"""State dicts of FSDP scripts: they become whole ones, which any strategy gives and takes."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.clipping import CLIP
from unipar.migrate.edits import Span
from unipar.migrate.literals import argument, constant
from unipar.migrate.models import FSDP, optimizers_of
from unipar.migrate.plan import Plan
from unipar.migrate.processes import on_some_ranks
from unipar.migrate.source import Source
from unipar.migrate.tracing import is_none, trace
from unipar.migrate.unwrapping import unwrap

CHECKPOINT = "torch.distributed.checkpoint.state_dict."
_OPTIONS = ("full_state_dict", "cpu_offload", "broadcast_from_rank0", "strict")
_BY_SESSION = "Save with script.session().save(directory), and load with its load(directory)."


class States:
    """Rewrites what takes and loads state dicts.

    Args:
        plan: the program; its optimizers are known.
        gone: the pieces of the program that are taken out; grows.
    """

    def __init__(self, plan: Plan, gone: list[tuple[Source, Span]]) -> None:
        self.plan, self.flow, self.gone = plan, plan.flow, gone
        self._rank0: dict[cst.With | None, bool] = {}
        self._loadable: set[cst.Call] = set()

    def rewrite(self) -> None:
        """Rewrite contexts, functions and methods."""
        self._rewrite_contexts()
        self._rewrite_wrappers()
        self._rewrite_functions()
        for source, call, func in self.plan.methods("state_dict", "load_state_dict"):
            values = self.flow.values(func.value)
            if call in self.plan.handled:
                continue
            if values & self.plan.models:
                self._check_everywhere(source, call)
                self._gather(source, call, func.value)
            elif optimizers_of(values):
                self._rewrite_optimizer(source, call, func)
        self._rewrite_full_tensors()

    # -- FSDP 1 ----------------------------------------------------------------------------------

    def _rewrite_contexts(self) -> None:
        for source, call in self._of_fsdp("state_dict_type", "set_state_dict_type"):
            self.plan.handled.add(call)
            self.gone.append((source, source.span(call)))
            self._check_type(call)
            rank0 = self._asks_rank0(argument(call, 2, "state_dict_config"))
            item = source.parent(call)
            with_ = source.parent(item) if isinstance(item, cst.WithItem) else None
            if isinstance(with_, cst.With) and len(with_.items) == 1:
                self._rank0[with_] = rank0
                if not unwrap(source, with_):
                    self.plan.replace(call, "contextlib.nullcontext()")
                    self.plan.use(source, "import contextlib")
            elif source.statement(call) is not None:
                self._rank0[None] = rank0
                self.plan.drop(call)
            else:
                self.plan.refuse(call, "what it gives back is used.", "Use it in a `with`.")

    def _check_type(self, call: cst.Call) -> None:
        kind = argument(call, 1, "state_dict_type")
        names = {n.rpartition(".")[2] for n in self.flow.names(kind)} if kind is not None else set()
        if names == {"SHARDED_STATE_DICT"}:
            self._tell_whole(call)
        elif names != {"FULL_STATE_DICT"}:
            self.plan.refuse(
                call, "which state dicts it asks for is not seen, or they are of one rank's part.",
                f"Use StateDictType.FULL_STATE_DICT. {_BY_SESSION}",
            )  # fmt: skip

    def _tell_whole(self, call: cst.Call) -> None:
        self.plan.tell(
            call, "each rank now has whole tensors here, not its part: memory for the model on "
            "the host.", f"For models that do not fit: {_BY_SESSION}",
        )  # fmt: skip

    def _asks_rank0(self, config: cst.BaseExpression | None) -> bool:
        behind = trace(self.plan, config) if config is not None else []
        return any(
            constant(argument(one, 1, "rank0_only")) is True
            for one in behind
            if isinstance(one, cst.Call)
        )

    def _rewrite_wrappers(self) -> None:
        for source, call in self._of_fsdp("optim_state_dict", "full_optim_state_dict"):
            optimizer = argument(call, 1, "optim")
            full = "full_optim_state_dict" in source.code(call.func)
            given = constant(argument(call, 3, "rank0_only")) if full else None
            if optimizer is not None:
                rank0 = given is not False if full else self._around(source, call)
                self._check_everywhere(source, call)
                self._replace(call, ".state_dict()", optimizer, rank0)
        for _, call in self._of_fsdp("optim_state_dict_to_load"):
            self._pass_on(call, argument(call, 2, "optim_state_dict"))
        for _, call in self._of_fsdp(
            "scatter_full_optim_state_dict", "shard_full_optim_state_dict"
        ):
            self._pass_on(call, argument(call, 0, "full_optim_state_dict"))

    def _pass_on(self, call: cst.Call, state: cst.BaseExpression | None) -> None:
        if state is None:
            self.plan.refuse(call, "its state dict is not seen.", "Name it.")
            return
        self._loadable.add(call)
        self.plan.handled.add(call)
        self._note_gone(call, state)
        self.plan.replace(call, state)

    def _rewrite_optimizer(self, source: Source, call: cst.Call, func: cst.Attribute) -> None:
        given = call.args[0].value if call.args else None
        behind = trace(self.plan, given) if given is not None else []
        if behind and all(self._is_by_name(one) for one in behind):
            self._gather(source, call, func.value)
            return
        self.plan.refuse(
            call,
            "under FSDP this is one rank's part of the optimizer's state.",
            "Take FSDP.optim_state_dict(model, optimizer) or get_optimizer_state_dict, and load "
            "it with its counterpart.",
        )

    def _is_by_name(self, node: cst.BaseExpression) -> bool:
        return isinstance(node, cst.Call) and node in self._loadable

    # -- torch.distributed.checkpoint.state_dict ------------------------------------------------

    def _rewrite_functions(self) -> None:
        for source in self.plan.sources:
            for call in source.all(cst.Call):
                for name in self.flow.names(call.func):
                    if name.startswith(CHECKPOINT):
                        self._rewrite_function(source, call, name.removeprefix(CHECKPOINT))

    def _rewrite_function(self, source: Source, call: cst.Call, name: str) -> None:
        if name == "StateDictOptions":
            return
        model = argument(call, 0, "model")
        one = argument(call, 1, "optimizers")
        if argument(call, None, "submodules") is not None or model is None:
            self.plan.refuse(call, "it is of a part of the model.", "Take the whole model's.")
            return
        rank0 = self._read_options(call, taking=name.startswith("get"))
        if name.startswith("get"):
            self._check_everywhere(source, call)
        optimizer = self._single(one)
        weights = argument(call, 1 if name == "set_model_state_dict" else None, "model_state_dict")
        state = argument(call, 2 if "optimizer" in name else None, "optim_state_dict")
        if name == "get_model_state_dict":
            self._replace(call, ".state_dict()", model, rank0)
        elif name == "get_optimizer_state_dict" and optimizer is not None:
            self._replace(call, ".state_dict()", optimizer, rank0)
        elif name == "get_state_dict" and optimizer is not None:
            more = ", rank0_only=True" if rank0 else ""
            self.plan.handled.add(call)
            self._note_gone(call, model, optimizer)
            plain = isinstance(source.parent(call), (cst.Assign, cst.Return))
            self.plan.replace(
                call, "" if plain else "(", "script.gathered(", model,
                f"{more}).state_dict(), script.gathered(", optimizer, f"{more}).state_dict()",
                "" if plain else ")",
            )  # fmt: skip
        elif name == "set_model_state_dict" and weights is not None:
            self._load(call, (model, weights))
        elif name == "set_optimizer_state_dict" and optimizer is not None and state is not None:
            self._load(call, (optimizer, state))
        elif (
            name == "set_state_dict"
            and optimizer is not None and weights is not None and state is not None
        ):  # fmt: skip
            self._load(call, (model, weights), (optimizer, state))
        else:
            self.plan.refuse(call, "it cannot be seen what this is given.", "Name each argument.")

    def _single(self, node: cst.BaseExpression | None) -> cst.BaseExpression | None:
        elements = node.elements if isinstance(node, (cst.List, cst.Tuple)) else ()
        return elements[0].value if len(elements) == 1 else None if elements else node

    def _load(self, call: cst.Call, *pairs: tuple[cst.BaseExpression, cst.BaseExpression]) -> None:
        source = self.flow.source(call)
        if source.statement(call) is None:
            self.plan.refuse(call, "what it gives back is used.", "Make it a statement.")
        parts: list[str | cst.CSTNode] = []
        margin = source.edits.data[source.line_start(call) : source.span(call)[0]].decode()
        between = f"{source.newline()}{margin}" if not margin.strip() else "; "
        for of, state in pairs:
            parts += [f"{between}script.gathered(" if parts else "script.gathered(", of]
            parts += [").load_state_dict(", state, ")"]
        self.plan.handled.add(call)
        self._note_gone(call, *(one for pair in pairs for one in pair))
        self.plan.replace(call, *parts)

    def _read_options(self, call: cst.Call, *, taking: bool) -> bool:
        """Return whether other ranks than the first get nothing."""
        options = argument(call, None, "options")
        behind = [one for one in trace(self.plan, options) if not is_none(one)] if options else []
        asked: dict[str, object] = {}
        for one in behind:
            for argument_ in one.args if isinstance(one, cst.Call) else ():
                name = argument_.keyword.value if argument_.keyword is not None else ""
                asked[name] = constant(argument_.value)
        strange = [name for name in asked if name not in _OPTIONS]
        if strange or asked.get("strict") is False or len(behind) > 1:
            self.plan.refuse(
                call, "its options ask for other than whole state dicts.",
                f"Leave out all but {', '.join(_OPTIONS[:3])}.",
            )  # fmt: skip
        full = asked.get("full_state_dict") is True
        if taking and not full:
            self._tell_whole(call)
        return full and asked.get("cpu_offload") is True

    # -- both ------------------------------------------------------------------------------------

    def _of_fsdp(self, *methods: str) -> list[tuple[Source, cst.Call]]:
        found = self.plan.calls(*(f"{name}.{method}" for name in FSDP for method in methods))
        for _, call, func in self.plan.methods(*methods):
            if self.flow.values(func.value) & self.plan.models:
                self.plan.refuse(call, "it is called on a model.", "Call it on the class FSDP.")
        return found

    def _around(self, source: Source, node: cst.CSTNode) -> bool:
        """Return whether the state dict context around a place is for rank 0 only."""
        for above in source.around(node):
            if isinstance(above, cst.With) and above in self._rank0:
                return self._rank0[above]
        return self._rank0.get(None, False)

    def _gather(self, source: Source, call: cst.Call, of: cst.BaseExpression) -> None:
        taking = isinstance(call.func, cst.Attribute) and call.func.attr.value == "state_dict"
        more = ", rank0_only=True" if taking and self._around(source, call) else ""
        self.plan.handled.add(call)
        self.plan.replace(of, "script.gathered(", of, f"{more})")

    def _replace(self, call: cst.Call, tail: str, of: cst.BaseExpression, rank0: bool) -> None:
        more = ", rank0_only=True" if rank0 else ""
        self.plan.handled.add(call)
        self._note_gone(call, of)
        self.plan.replace(call, "script.gathered(", of, f"{more}){tail}")

    def _note_gone(self, call: cst.Call, *kept: cst.BaseExpression) -> None:
        """All of a call goes but what it quotes."""
        source = self.flow.source(call)
        at, stop = source.span(call)
        for start, end in sorted(source.span(one) for one in kept):
            self.gone.append((source, (at, start)))
            at = end
        self.gone.append((source, (at, stop)))

    def _check_everywhere(self, source: Source, call: cst.Call) -> None:
        if on_some_ranks(self.plan, source, call):
            self.plan.refuse(
                call, "a whole state dict is put together by all ranks, and only some come here.",
                "Take it on all ranks, and save it on rank 0.",
            )  # fmt: skip

    def _rewrite_full_tensors(self) -> None:
        """What is whole already needs no gathering."""
        for source, call, func in self.plan.methods("full_tensor"):
            norms = trace(self.plan, func.value)
            if self._of_state_dict(source, func.value) or (
                norms and all(map(self._is_norm, norms))
            ):
                self._note_gone(call, func.value)
                self.plan.replace(call, func.value)
            else:
                self.plan.refuse(
                    call, "it cannot be seen that this is of a state dict, or a norm.",
                    "Use get_model_state_dict with StateDictOptions(full_state_dict=True).",
                )  # fmt: skip

    def _is_norm(self, node: cst.BaseExpression) -> bool:
        return isinstance(node, cst.Call) and bool(self.flow.names(node.func) & {*CLIP})

    def _of_state_dict(self, source: Source, node: cst.BaseExpression) -> bool:
        for above in source.around(node):
            loops = [above] if isinstance(above, (cst.For, cst.CompFor)) else []
            if isinstance(above, (cst.DictComp, cst.ListComp)):
                loops = [above.for_in]
            for loop in loops:
                over = loop.iter
                if isinstance(over, cst.Call) and isinstance(over.func, cst.Attribute):
                    behind = trace(self.plan, over.func.value)
                    if all(
                        isinstance(one, cst.Call) and one in self.plan.handled for one in behind
                    ):
                        return True
        return False
