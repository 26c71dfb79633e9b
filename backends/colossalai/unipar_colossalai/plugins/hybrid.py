"""``hybrid``: the layers of a model of transformers divided, or the row of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from unipar.engine import ByTensor, Division, Flat, Sliced
from unipar.layout import Layout
from unipar.strategy import Capabilities, EngineSpec
from unipar.world import Placement, World
from unipar_colossalai.hybrid_models import check_model, make_layout
from unipar_colossalai.plugins.base import ALL, DEVICES, PRECISION, SHARDED, Plugin

if TYPE_CHECKING:
    from unipar_colossalai.engine import BoosterEngine, Start
    from unipar_colossalai.options import ColossalAIOptions


class Hybrid(Plugin):
    """Its modules hold parts of the user's."""

    booster = "HybridParallelPlugin"
    rewrites_module = True
    tunes = ("tp_size", "pp_size", "zero_stage")
    owned: ClassVar[Mapping[str, str]] = {
        "tp_size": "the option 'tp_size'",
        "pp_size": "the option 'pp_size'",
        "zero_stage": "the option 'zero_stage'",
        "num_microbatches": "the run's micro_batch_size",
        "microbatch_size": "the run's micro_batch_size",
        "gradient_checkpoint_config": "the run's activation_checkpointing",
        **PRECISION,
    }
    free = ("make_vocab_size_divisible_by", "ddp_bucket_cap_mb", "gradient_as_bucket_view")

    @classmethod
    def check_options(cls, options: ColossalAIOptions) -> None:
        if options.zero_stage and options.pp_size > 1:
            raise ValueError(
                f"zero_stage={options.zero_stage} with pp_size={options.pp_size} is not built. "
                "Leave one of them out"
            )

    def capabilities(self) -> Capabilities:
        pipeline = self.options.pp_size > 1
        return Capabilities(
            ALL,
            DEVICES,
            sharded=frozenset(SHARDED),
            custom_loop=not pipeline,
            several_engines=False,
            compile=False,
            pipeline=pipeline,
            splits_tensors=self.options.tp_size > 1,
            sparse_gradients=False,
        )

    def check(self, spec: EngineSpec, placement: Placement) -> None:
        self.layout(placement)
        # A session asks before there is a model, with one that does nothing in its place.
        if isinstance(spec.model, nn.Module) and not isinstance(spec.model, nn.Identity):
            check_model(spec.model, self.options.tp_size, self.options.pp_size)

    def layout(self, placement: Placement) -> Layout:
        options = self.options
        return make_layout(options.tp_size, options.pp_size, placement, options.zero_stage)

    def divisions(self, world: World) -> tuple[Division, ...]:
        by_tensor = (Sliced(0), Sliced(-1)) if self.options.tp_size > 1 else ()
        by_stage = (ByTensor(),) if self.options.pp_size > 1 else ()
        flat = (Flat(),) if self.options.zero_stage else ()
        return (*by_tensor, *by_stage, *flat)

    def change(self, module: nn.Module, spec: EngineSpec) -> list[Callable[[], None]]:
        # The engine does, later: Colossal-AI replaces the methods of the modules that it divides.
        return []

    def arguments(self, module: nn.Module, spec: EngineSpec, world: World) -> dict[str, Any]:
        return {
            "tp_size": self.options.tp_size,
            "pp_size": self.options.pp_size,
            "zero_stage": self.options.zero_stage,
            # Half precision is autocast's, here too.
            "precision": "fp32",
            # Whole logits, which a loss of the user's own can be computed from.
            "parallel_output": False,
            # The schedule is told by each step.
            "num_microbatches": 1,
        }

    def prepare(self, start: Start) -> BoosterEngine:
        if self.options.zero_stage:
            from unipar_colossalai.hybrid_zero import prepare
        else:
            from unipar_colossalai.hybrid import prepare

        return prepare(start)
