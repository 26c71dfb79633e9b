"""FSDP's arguments, which become the strategy's options."""

from __future__ import annotations

from typing import Any

import libcst as cst

from unipar.migrate.literals import argument, constant
from unipar.migrate.plan import Plan
from unipar.migrate.tracing import is_none, keywords, trace

MESH = ("torch.distributed.init_device_mesh", "torch.distributed.device_mesh.init_device_mesh")
_POSITIONS = ("module", "process_group", "sharding_strategy", "cpu_offload", "auto_wrap_policy",
              "backward_prefetch", "mixed_precision", "ignored_modules", "param_init_fn",
              "device_id", "sync_module_states")  # fmt: skip
# What changes neither the result nor what can be said of it elsewhere.
_DROPPED = {"module", "device_id", "backward_prefetch", "forward_prefetch", "limit_all_gathers",
            "use_orig_params", "sync_module_states"}  # fmt: skip
_SHARDING = {"FULL_SHARD": "full", "SHARD_GRAD_OP": "grad_op", "HYBRID_SHARD": "hybrid",
             "NO_SHARD": "none"}  # fmt: skip
_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.half": "fp16",
           "torch.float32": "fp32", "torch.float": "fp32"}  # fmt: skip
_LEAVE_OUT = "Leave it out, or port this by hand (docs/how-to/own-loop.md)."


class Options:
    """The options that the calls of a program ask for, together.

    Args:
        plan: the program.

    Attributes:
        classes: names of those whose instances are gathered as units.
        policy: whether a policy says which those are.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.flow = plan, plan.flow
        self.classes: set[str] = set()
        self.policy = False
        self._options: dict[str, Any] = {}

    def settings(self, *, units: bool) -> str | dict[str, Any]:
        """The strategy with its options.

        Args:
            units: whether parts of the model are divided by themselves.
        """
        options = dict(self._options)
        sharding = options.pop("sharding", "full")
        if sharding == "none":
            return "ddp"
        if self.classes:
            options["wrap"] = sorted(self.classes)
        elif not units and not self.policy:
            options["wrap"] = "none"
        if sharding != "full":
            options["sharding"] = sharding
        return {"name": "fsdp", **options} if options else "fsdp"

    def class_name(self, node: cst.BaseExpression) -> str:
        """The name of a class, without its module."""
        return self.flow.source(node).code(node).rpartition(".")[2]

    def read(self, call: cst.Call) -> None:
        """Read the arguments of a wrapper, or of ``fully_shard``."""
        given = keywords(self.plan, call)
        if given is None:
            self.plan.refuse(call, "its options cannot be seen.", "Write them out as keywords.")
            return
        for index, one in enumerate(call.args):
            if one.keyword is None and not one.star and index < len(_POSITIONS):
                given[_POSITIONS[index]] = trace(self.plan, one.value)
        for name, values in given.items():
            if name in _DROPPED:
                continue
            if len({self._text(one) for one in values}) > 1:
                self.plan.refuse(
                    call, f"what {name} is, is decided while it runs.",
                    "Write one; unipar.yaml's strategy holds it, and can be changed there.",
                )  # fmt: skip
            elif not is_none(values[0]):
                read = getattr(self, f"_read_{name}", None)
                if read is None:
                    self.plan.refuse(call, f"unipar.yaml cannot say {name}.", _LEAVE_OUT)
                else:
                    read(call, values[0])

    def _text(self, node: cst.BaseExpression) -> str:
        return "None" if is_none(node) else self.flow.source(node).code(node)

    def _set(self, node: cst.Call, key: str, value: Any) -> None:
        if self._options.setdefault(key, value) != value:
            self.plan.refuse(
                node, f"asks for {key}={value}, elsewhere {self._options[key]} is asked for.",
                "A run has one; use the same everywhere.",
            )  # fmt: skip

    def _read_sharding_strategy(self, call: cst.Call, value: cst.BaseExpression) -> None:
        names = {name.rpartition(".")[2] for name in self.flow.names(value)}
        names |= {str(constant(value))}
        found = names & set(_SHARDING)
        if len(found) != 1:
            self.plan.refuse(
                call, f"unipar.yaml cannot say the sharding strategy `{self._text(value)}`.",
                f"Use one of {', '.join(_SHARDING)}.",
            )  # fmt: skip
            return
        self._set(call, "sharding", _SHARDING[found.pop()])

    def _read_reshard_after_forward(self, call: cst.Call, value: cst.BaseExpression) -> None:
        keep = constant(value)
        if not isinstance(keep, bool):
            # Often `i < len(layers) - 1`, which spares the last block a gathering.
            self.plan.tell(
                call, "reshard_after_forward differs between blocks; all are freed after use now.",
                "For speed, set `sharding: grad_op`.",
            )  # fmt: skip
        elif keep is False:
            self._set(call, "sharding", "grad_op")

    def _read_cpu_offload(self, call: cst.Call, value: cst.BaseExpression) -> None:
        asked = argument(value, 0, "offload_params") if isinstance(value, cst.Call) else None
        if constant(asked) is True or constant(value) is True:
            self._options["cpu_offload"] = True
        elif asked is not None and constant(asked) is not False:
            self.plan.refuse(call, "whether it offloads is decided while it runs.", "Write True.")

    def _read_offload_policy(self, call: cst.Call, value: cst.BaseExpression) -> None:
        made = {name.rpartition(".")[2] for name in self._made(value)}
        if "CPUOffloadPolicy" in made:
            self._options["cpu_offload"] = True
        elif "OffloadPolicy" not in made:
            self.plan.refuse(call, f"it cannot be seen what `{self._text(value)}` is.", _LEAVE_OUT)

    def _read_auto_wrap_policy(self, call: cst.Call, value: cst.BaseExpression) -> None:
        self.policy = True
        if isinstance(value, cst.Set):
            self.classes |= {self.class_name(one.value) for one in value.elements}
            return
        policy = value.func if isinstance(value, cst.Call) else value
        if isinstance(value, cst.Call) and "functools.partial" in self.flow.names(policy):
            policy = value.args[0].value
        name = next((name.rpartition(".")[2] for name in self.flow.names(policy)), "")
        given = None
        if name == "ModuleWrapPolicy" and isinstance(value, cst.Call):
            given = argument(value, 0, "module_classes")
        elif name == "transformer_auto_wrap_policy" and isinstance(value, cst.Call):
            given = argument(value, None, "transformer_layer_cls")
        behind = trace(self.plan, given) if given is not None else []
        sets = [one for one in behind if isinstance(one, (cst.Set, cst.Tuple, cst.List))]
        if len(behind) == 1 and sets:
            self.classes |= {self.class_name(one.value) for one in sets[0].elements}
            return
        if name == "size_based_auto_wrap_policy":
            partial = value if isinstance(value, cst.Call) else None
            least = argument(partial, None, "min_num_params") if partial is not None else None
            number = self._number(least) if least is not None else 100_000_000
            if number is not None:
                self._set(call, "wrap_min_params", number)
                return
        elif name == "always_wrap_policy":
            self.plan.tell(call, "each submodule was a unit; now the repeated blocks are.")
            return
        self.plan.refuse(
            call, f"unipar.yaml cannot say the wrap policy `{self._text(value)}`.",
            "Use ModuleWrapPolicy({Block}) or size_based_auto_wrap_policy.",
        )  # fmt: skip

    def _read_mesh(self, call: cst.Call, value: cst.BaseExpression) -> None:
        if not (isinstance(value, cst.Call) and self._made(value) & set(MESH)):
            self.plan.refuse(call, "it cannot be seen what mesh this is.", _LEAVE_OUT)
            return
        shape = argument(value, 1, "mesh_shape")
        sizes = shape.elements if isinstance(shape, (cst.Tuple, cst.List)) else ()
        if len(sizes) == 1:
            return
        inner = constant(sizes[1].value) if len(sizes) == 2 else None
        if isinstance(inner, int):
            self._set(call, "sharding", "hybrid")
            self._set(call, "shard_size", inner)
        else:
            self.plan.refuse(
                call, "the mesh has other dimensions than replicas and shards, or sizes that are "
                "computed.", "Write (replicas, 8), with the number of ranks in a shard.",
            )  # fmt: skip

    _read_device_mesh = _read_mesh

    def _read_mixed_precision(self, call: cst.Call, value: cst.BaseExpression) -> None:
        if not isinstance(value, cst.Call):
            self.plan.refuse(call, f"it cannot be seen what `{self._text(value)}` is.", _LEAVE_OUT)
            return
        param = self._dtype(call, argument(value, 0, "param_dtype")) or "fp32"
        reduce = self._dtype(call, argument(value, 1, "reduce_dtype")) or param
        if param == "fp32":
            if reduce != "fp32":
                self.plan.refuse(
                    call, f"gradients are summed in {reduce}, and computed in float32.",
                    "Leave reduce_dtype out, or set param_dtype too.",
                )  # fmt: skip
            return
        self.plan.set(call, "precision", param)
        if reduce == "bf16":
            self._set(call, "reduce_dtype", "bf16")
        elif reduce == "fp16":
            self.plan.warn(
                call, "gradients were summed in float16, which overflows above 65504; they are "
                "in float32 now.", "Nothing is to be done.",
            )  # fmt: skip
        if value not in self.plan.handled:
            self.plan.handled.add(value)
            width = "bfloat16" if param == "bf16" else "float16"
            self.plan.warn(
                call,
                f"FSDP computed all in {width}, what the model gives included; unipar's fsdp gives "
                "that in float32: losses differ by up to "
                f"{'2^-8' if param == 'bf16' else '2^-11'} of themselves, towards float32's.",
                "Nothing is to be done unless you rely on the rounding.",
            )

    _read_mp_policy = _read_mixed_precision

    def _dtype(self, call: cst.Call, node: cst.BaseExpression | None) -> str | None:
        if node is None:
            return None
        behind = trace(self.plan, node)
        if all(is_none(one) for one in behind):
            return None
        found = {_DTYPES.get(name) for one in behind for name in self.flow.names(one)} or {None}
        if len(found) != 1 or None in found or len(behind) > 1:
            self.plan.refuse(
                call, "the dtype that it computes in cannot be seen.",
                "Write param_dtype=torch.bfloat16.",
            )  # fmt: skip
            return None
        return found.pop()

    def _made(self, value: cst.BaseExpression) -> set[str]:
        return {one.name for one in self.flow.values(value) if one.kind == "call"}

    def _number(self, node: cst.BaseExpression) -> int | None:
        """A number, or ``int(1e5)``."""
        made = isinstance(node, cst.Call) and "int" in self.flow.names(node.func)
        value = constant(node.args[0].value if made and isinstance(node, cst.Call) else node)
        return int(value) if isinstance(value, (int, float)) else None
