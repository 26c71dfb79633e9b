"""``Fabric(...)``: its arguments go to ``unipar.yaml``, apart from how many processes there are."""

from __future__ import annotations

from typing import Any

import libcst as cst

from unipar.migrate.dialects.fsdp_options import Options
from unipar.migrate.edits import Span
from unipar.migrate.literals import argument, constant
from unipar.migrate.plan import Plan
from unipar.migrate.source import Source
from unipar.migrate.tracing import is_none, sweep, trace

_DEVICES = {"auto": None, "cpu": "cpu", "gpu": "cuda", "cuda": "cuda"}
_PRECISIONS = {"32-true": "fp32", "32": "fp32", 32: "fp32", "bf16-mixed": "bf16",
               "bf16": "bf16", "16-mixed": "fp16", "16": "fp16", 16: "fp16"}  # fmt: skip
_STRATEGIES: dict[str, str | dict[str, Any]] = {
    "auto": "auto", "ddp": "ddp", "ddp_spawn": "ddp", "ddp_fork": "ddp", "ddp_notebook": "ddp",
    "ddp_find_unused_parameters_true": {"name": "ddp", "find_unused_parameters": True},
    "ddp_find_unused_parameters_false": "ddp",
    "fsdp": "fsdp", "fsdp_cpu_offload": {"name": "fsdp", "cpu_offload": True},
    "deepspeed": "zero2", "deepspeed_stage_1": "zero1", "deepspeed_stage_2": "zero2",
    "deepspeed_stage_3": "zero3",
}  # fmt: skip
_DDP = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "bucket_cap_mb",
        "broadcast_buffers")  # fmt: skip
_CHOICE = "Use ddp, fsdp or deepspeed_stage_1 to 3."


class Settings:
    """The settings that the Fabric of a program is made with.

    Args:
        plan: the program.

    Attributes:
        taken: the calls of Fabric.
        gone: the pieces of the program that are taken out.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.flow = plan, plan.flow
        self.taken: list[cst.Call] = []
        self.gone: list[tuple[Source, Span]] = []
        self._objects: list[cst.Call] = []
        self._device: str | None = None
        self._strategy: str | dict[str, Any] = "auto"
        self._several = False

    def read(self, source: Source, call: cst.Call) -> None:
        """Read a call of ``Fabric``, and put a run in its place."""
        if self.taken:
            self.plan.refuse(call, "a second Fabric; a process has one run.", "Use the first.")
        self.taken.append(call)
        self.gone.append((source, source.span(call.func)))
        kept: list[str | cst.CSTNode] = []
        for one in call.args:
            name = one.keyword.value if one.keyword is not None else ""
            read = getattr(self, f"_read_{name}", None)
            default = all(map(is_none, trace(self.plan, one.value))) or (
                name == "num_nodes" and constant(one.value) == 1
            )
            if name not in ("devices", "loggers"):
                self.gone.append((source, source.span(one)))
            if name in ("devices", "loggers"):
                kept += [", " if kept else "", f"{name}=", one.value]
                count = self._literal(one.value) if name == "devices" else None
                self._several |= isinstance(count, int) and count > 1
            elif default:
                continue
            elif name and read is not None:
                read(call, one.value)
            else:
                self.plan.refuse(
                    call, f"a fabricated.Run takes no `{source.code(one)}`.",
                    "Leave it out, or port this by hand (docs/how-to/own-loop.md).",
                )  # fmt: skip
        if not call.args:
            self.plan.tell(
                call, "what `fabric run` was given for it on the command line, it is no longer.",
                "Write strategy and device into unipar.yaml, and start several processes with "
                "torchrun.",
            )  # fmt: skip
        self.plan.replace(call, "fabricated.Run(", *kept, ")")
        self.plan.launcher = "python"

    def write(self) -> None:
        """Put into the run's settings what was read, and take out what said it."""
        for made in sweep(self.plan, self._objects, self.gone):
            source = self.flow.source(made)
            self.gone.append((source, source.span(made)))
            self.plan.tell(
                made, "unipar.yaml says this now; what is left here has no effect.", "Take it out."
            )
        self.plan.config.pop("device", None)
        # Fabric takes DDP for several devices.
        several = self._several and self._strategy == "auto"
        self.plan.config = {
            "strategy": "ddp" if several else self._strategy,
            **{k: v for k, v in self.plan.config.items() if k != "strategy"},
            **({"device": self._device} if self._device is not None else {}),
        }

    def _literal(self, value: cst.BaseExpression) -> Any:
        """What is written, also where it has a name; ``None`` if that is decided in the run."""
        behind = trace(self.plan, value)
        found = {constant(one) for one in behind}
        return found.pop() if len(found) == 1 else None

    def _read_accelerator(self, call: cst.Call, value: cst.BaseExpression) -> None:
        given = self._literal(value)
        if given in _DEVICES:
            self._device = _DEVICES[given]
        elif given is None:
            self.plan.tell(call, "unipar.yaml's `device` decides now, not the accelerator.")
        else:
            self.plan.refuse(call, f"there is no accelerator {given!r}.", "Use cpu or cuda.")

    def _read_precision(self, call: cst.Call, value: cst.BaseExpression) -> None:
        given = self._literal(value)
        if given in _PRECISIONS:
            self.plan.set(call, "precision", _PRECISIONS[given])
            if _PRECISIONS[given] == "fp32":
                del self.plan.config["precision"]
        elif given is None:
            self.plan.refuse(
                call, "which precision it computes in is decided while it runs.",
                "Write it; unipar.yaml holds it, and can be changed there.",
            )  # fmt: skip
        else:
            self.plan.refuse(
                call, f"unipar keeps weights in float32, and knows no precision {given!r}.",
                "Use bf16-mixed, 16-mixed or 32-true.",
            )  # fmt: skip

    def _read_strategy(self, call: cst.Call, value: cst.BaseExpression) -> None:
        behind = trace(self.plan, value)
        made = behind[0] if len(behind) == 1 else None
        if isinstance(made, cst.Call):
            self._read_object(call, made)
            return
        given = self._literal(value)
        if given in _STRATEGIES:
            self._strategy = _STRATEGIES[given]
        elif given is None:
            self.plan.tell(call, "unipar.yaml's `strategy` decides now, not the command line.")
        else:
            self.plan.refuse(call, f"there is no strategy like {given!r}.", _CHOICE)

    def _read_object(self, call: cst.Call, made: cst.Call) -> None:
        names = {name.rpartition(".")[2] for name in self.flow.names(made.func)}
        self._objects.append(made)
        if "DDPStrategy" in names:
            self._read_ddp(call, made)
        elif "FSDPStrategy" in names:
            self._read_fsdp(made)
        else:
            shown = self.flow.source(made).code(made.func)
            self.plan.refuse(
                call, f"what {shown} does cannot be read.",
                f"{_CHOICE} Their options go to unipar.yaml (docs/strategies.md).",
            )  # fmt: skip

    def _read_ddp(self, call: cst.Call, made: cst.Call) -> None:
        options: dict[str, Any] = {}
        for one in made.args:
            name = one.keyword.value if one.keyword is not None else ""
            value = constant(one.value)
            if name in _DDP and value is not None:
                options[name] = value
            elif name not in ("start_method", "process_group_backend", "timeout"):
                self.plan.refuse(
                    call, f"unipar.yaml cannot say `{self.flow.source(one).code(one)}`.",
                    f"Leave it out, or give a literal to one of {', '.join(_DDP)}.",
                )  # fmt: skip
        self._strategy = {"name": "ddp", **options} if options else "ddp"

    def _read_fsdp(self, made: cst.Call) -> None:
        options = Options(self.plan)
        options.read(made)
        self._strategy = options.settings(units=argument(made, None, "auto_wrap_policy") is None)
