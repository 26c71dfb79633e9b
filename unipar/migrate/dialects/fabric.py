"""Lightning Fabric."""

from __future__ import annotations

from typing import ClassVar

import libcst as cst

from unipar.migrate.devices import rewrite_environment
from unipar.migrate.dialects.base import Dialect, Row
from unipar.migrate.dialects.fabric_imports import drop_imports, rewrite_annotation
from unipar.migrate.dialects.fabric_settings import Settings
from unipar.migrate.dialects.torch import LOOP_REFUSED, LOOP_ROWS, check_trains, rewrite_training
from unipar.migrate.expressions import FABRIC
from unipar.migrate.literals import argument
from unipar.migrate.loaders import rewrite_samplers
from unipar.migrate.models import find_optimizers, optimizers_of
from unipar.migrate.numerics import warn_of_ranks
from unipar.migrate.plan import Clip, Plan, Words
from unipar.migrate.source import Source
from unipar.migrate.tracing import leaves

_PACKAGES = ("lightning.fabric.", "lightning_fabric.")
_SETUP = ("setup", "setup_module", "setup_optimizers")
# What a fabricated.Run has under the same name.
_KEPT = {"launch", "device", "global_rank", "local_rank", "node_rank", "world_size",
         "is_global_zero", "print", "barrier", "rank_zero_first", "broadcast", "all_gather",
         "all_reduce", "to_device", "setup_dataloaders", "no_backward_sync", "autocast",
         "init_module", "init_tensor", "seed_everything", "save", "load", "load_raw", "log",
         "log_dict", "logger", "loggers"}  # fmt: skip
_ARGUMENTS = {"setup_dataloaders": ("use_distributed_sampler", "move_to_device"),
              "all_gather": ("data",), "all_reduce": ("data", "reduce_op"),
              "setup": ("move_to_device", "_reapply_compile"),
              "setup_module": ("module", "move_to_device", "_reapply_compile"),
              "setup_optimizers": (), "backward": ("tensor", "model")}  # fmt: skip
_SEEDS = tuple(f"{package}{module}seed_everything" for package in ("lightning.", *_PACKAGES)
               for module in ("", "utilities.seed."))  # fmt: skip
# Helpers that do not take part in training.
_HARMLESS = tuple(f"{package}{part}" for package in _PACKAGES
                  for part in ("loggers", "utilities.rank_zero"))  # fmt: skip
_BY_HAND = "Leave it out, or port this by hand (docs/how-to/own-loop.md)."


class Fabric(Dialect):
    """A script that has its loop itself, and a Fabric do the rest."""

    name: ClassVar[str] = "fabric"
    title: ClassVar[str] = "Lightning Fabric"
    marks: ClassVar[tuple[str, ...]] = (*_PACKAGES, *FABRIC)
    rows: ClassVar[tuple[Row, ...]] = (
        Row("Fabric(accelerator=\"cpu\", devices=2, strategy=\"ddp\", precision=\"bf16-mixed\")",
            "fabricated.Run(devices=2), and device, strategy and precision in unipar.yaml"),
        Row("DDPStrategy(static_graph=True), FSDPStrategy(auto_wrap_policy={Block})",
            "options of the strategy in unipar.yaml"),
        Row("model, optimizer = fabric.setup(model, optimizer)",
            "removed: script.prepare has done it"),
        Row("setup_module, setup_optimizers", "likewise"),
        Row("fabric.setup(model) of one that is not trained", "fabric.to_device(model)"),
        Row("fabric.backward(loss)", "script.backward(loss, optimizer)"),
        Row("fabric.clip_gradients(model, optimizer, max_norm=1.0)",
            "max_grad_norm=1.0 in script.prepare"),
        Row("model(x)", "fabricated.engine(model)(x)"),
        Row("seed_everything(1)", "fabricated.seed_everything(1)"),
        Row("launch, setup_dataloaders, no_backward_sync, autocast, init_module, save, load",
            "unchanged: a fabricated.Run has them"),
        Row("device, global_rank, world_size, is_global_zero, print, barrier, rank_zero_first",
            "likewise"),
        Row("all_gather, all_reduce, broadcast, to_device, log, log_dict", "likewise"),
        *(row for row in LOOP_ROWS if row.before not in ("model(x)", "loss.backward()")),
    )  # fmt: skip

    refused: ClassVar[tuple[Row, ...]] = (
        Row("precision=\"bf16-true\", \"64-true\", \"transformer-engine\"",
            "unipar keeps weights in float32. Use bf16-mixed, 16-mixed or 32-true."),
        Row("precision=args.precision", "It changes training. Write it, and change unipar.yaml."),
        Row("strategy=\"dp\", \"xla\", ModelParallelStrategy(...)",
            "Use ddp, fsdp or deepspeed_stage_1 to 3."),
        Row("callbacks, plugins, num_nodes, fabric.call, sharded_model",
            "A fabricated.Run has none. Call functions; start other nodes with torchrun."),
        Row("class Trainer(Fabric)", "It is Fabric itself. Hold one, and call it."),
        Row("a model that is not set up", "Its replicas drift apart. Give it to fabric.setup."),
        Row("model.mark_forward_method, is_wrapped", "Only model(...) leads to the engine."),
        Row("clip_gradients(clip_val=1.0)", "Strategies clip by the 2-norm. Use max_norm."),
        *LOOP_REFUSED,
    )  # fmt: skip

    def rewrite(self, plan: Plan) -> None:
        plan.understood = (*_PACKAGES, "lightning.Fabric", "lightning.seed_everything")
        lone = all(name in ("", "lightning") for name in self._of_lightning(plan))
        if lone:
            plan.understood += ("lightning",)
        if not plan.calls(*FABRIC) and not plan.methods("backward"):
            return
        find_optimizers(plan)
        check_trains(plan)
        plan.words = Words(engine="fabricated.engine")
        settings = Settings(plan)
        for source, call in plan.calls(*FABRIC):
            settings.read(source, call)
        self._check_set_up(plan)
        self._rewrite_methods(plan)
        for _, call in plan.calls(*_SEEDS):
            plan.replace(call.func, "fabricated.seed_everything")
            self._warn_of_seed(plan, call)
        rewrite_training(plan, wrapped=False)
        rewrite_environment(plan)
        rewrite_samplers(plan)
        settings.write()
        warn_of_ranks(plan)
        self._refuse_others(plan, settings)

    def _of_lightning(self, plan: Plan) -> set[str]:
        """The parts of the package ``lightning`` that are used and are none of Fabric's."""
        known = (*_PACKAGES, *FABRIC, *_SEEDS)
        return {
            name.partition(".")[2].partition(".")[0]
            for source in plan.sources
            for node in source.all(cst.Attribute)
            for name in plan.flow.names(node)
            if name.startswith("lightning.") and not name.startswith(known)
            and name != "lightning.fabric"
        }  # fmt: skip

    # -- methods ---------------------------------------------------------------------------------

    def _rewrite_methods(self, plan: Plan) -> None:
        for source in plan.sources:
            for node in source.all(cst.Attribute):
                values = plan.flow.values(node.value)
                if any(one.name in FABRIC and one.kind == "call" for one in values):
                    self._rewrite_method(plan, source, node)
                elif values & plan.models and node.attr.value == "module":
                    plan.replace(node, node.value)
                elif values & plan.models and node.attr.value == "mark_forward_method":
                    plan.refuse(node, "only model(...) leads to the engine.", "Leave it out.")

    def _check_set_up(self, plan: Plan) -> None:
        """Refuse models that Fabric does not know of."""
        given = [
            one for _, call, func in plan.methods("setup", "setup_module") for one in call.args
            if plan.made_by(plan.flow.values(func.value), *FABRIC)
        ]  # fmt: skip
        known = {origin for one in given for origin in plan.flow.values(one.value)}
        for origin, model in plan.optimizers.items():
            if origin.node is not None and not plan.flow.values(model) & known and not any(
                one.star for one in given
            ):  # fmt: skip
                plan.refuse(
                    origin.node, "its model is not set up, so its replicas drift apart.",
                    "Give it to fabric.setup.",
                )  # fmt: skip

    def _rewrite_method(self, plan: Plan, source: Source, node: cst.Attribute) -> None:
        name, call = node.attr.value, source.parent(node)
        if not isinstance(call, cst.Call) or call.func is not node:
            if name not in _KEPT:
                plan.refuse(node, "a fabricated.Run has nothing like it.", _BY_HAND)
            return
        plan.handled.add(call)
        self._check_arguments(plan, call, name)
        if name in _SETUP:
            self._drop_setup(plan, source, call)
        elif name == "backward":
            loss = argument(call, 0, "tensor")
            if loss is None or source.statement(call) is None:
                plan.refuse(call, "it cannot be seen what this is on.", "Write backward(loss).")
            else:
                plan.losses[call] = loss
        elif name == "clip_gradients":
            if argument(call, 2, "clip_val") is not None:
                plan.refuse(call, "strategies clip by the 2-norm.", "Use max_norm.")
            norm, kind = argument(call, 3, "max_norm"), argument(call, 4, "norm_type")
            plan.clips[call] = Clip(norm, kind, argument(call, 0, "module"))
        elif name == "seed_everything":
            self._warn_of_seed(plan, call)
        elif name not in _KEPT:
            plan.refuse(call, "a fabricated.Run has nothing like it.", _BY_HAND)

    def _check_arguments(self, plan: Plan, call: cst.Call, name: str) -> None:
        for one in call.args:
            known = _ARGUMENTS.get(name)
            if known is not None and one.keyword is not None and one.keyword.value not in known:
                plan.refuse(
                    call, f"`{one.keyword.value}` is not known to a fabricated.Run.",
                    "Leave it out.",
                )  # fmt: skip
            elif one.star and name in _SETUP:
                plan.refuse(call, "it cannot be seen what is set up.", "Name each.")

    def _drop_setup(self, plan: Plan, source: Source, call: cst.Call) -> None:
        given = [
            one.value for one in call.args
            if one.keyword is None or one.keyword.value == "module"
        ]  # fmt: skip
        for one in given:
            values = plan.flow.values(one)
            if not values & plan.models and not optimizers_of(values):
                func = call.func
                assert isinstance(func, cst.Attribute)
                if len(given) == 1:  # A model that is only looked at.
                    plan.replace(call, func.value, ".to_device(", one, ")")
                else:
                    plan.refuse(
                        call, f"it cannot be seen what `{source.code(one)}` is.",
                        "Give migrate the file that builds it too.",
                    )  # fmt: skip
                return
        above = source.parent(call)
        names = [source.code(one) for one in given]
        if isinstance(above, cst.Expr):
            plan.drop(call)
        elif isinstance(above, cst.Assign) and len(above.targets) == 1 and (
            self._targets(source, above.targets[0].target) == names
        ):  # fmt: skip
            source.remove(above)
        else:
            parts: list[str | cst.CSTNode] = []
            for one in given:
                parts += [", ", one] if parts else [one]
            bare = len(given) == 1 or isinstance(above, (cst.Assign, cst.Return))
            plan.replace(call, *(parts if bare else ["(", *parts, ")"]))

    def _targets(self, source: Source, target: cst.CSTNode) -> list[str]:
        if isinstance(target, (cst.Tuple, cst.List)):
            return [source.code(one.value) for one in target.elements]
        return [source.code(target)]

    # -- the rest --------------------------------------------------------------------------------

    def _warn_of_seed(self, plan: Plan, call: cst.Call) -> None:
        text = plan.flow.source(call).code(call)
        if "rank" in text.lower():
            plan.warn(
                call,
                "each rank has a seed of its own: dropout and shuffling differ between ranks, "
                "and ranks' shares of shuffled data overlap.",
                "Kept as it is; weights still begin equal, as rank 0's are taken.",
            )

    def _refuse_others(self, plan: Plan, settings: Settings) -> None:
        for source in plan.sources:
            for class_ in source.all(cst.ClassDef):
                if any(plan.flow.names(base.value) & set(FABRIC) for base in class_.bases):
                    plan.refuse(
                        class_.name, "it is a Fabric itself.", "Hold one, and call its methods."
                    )
        gone = list(settings.gone)
        gone += [(source, source.span(call.func)) for source, call in plan.calls(*_SEEDS)]
        left: list[cst.CSTNode] = []
        for node in leaves(plan, gone, *_PACKAGES, "lightning."):
            source = plan.flow.source(node)
            names = plan.flow.names(node)
            kept = all(name.startswith(_HARMLESS) or name in _PREFIXES for name in names)
            typed = isinstance(source.parent(node), (cst.Annotation, cst.Param)) or self._is_type(
                source, node
            )
            if not kept and not typed:
                plan.refuse(node, "this is Fabric's own; a run has nothing like it.", _BY_HAND)
            elif not (typed and rewrite_annotation(plan, node)):
                left.append(node)
        drop_imports(plan, _PREFIXES, left)

    def _is_type(self, source: Source, node: cst.CSTNode) -> bool:
        annotated = any(isinstance(one, cst.Annotation) for one in source.around(node))
        base = isinstance(source.parent(source.parent(node) or node), cst.ClassDef)
        return annotated or base


_PREFIXES = {"lightning", "lightning.fabric", "lightning_fabric"}
