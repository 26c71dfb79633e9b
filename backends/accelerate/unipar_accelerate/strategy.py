"""Hugging Face Accelerate: its Accelerator prepares the model, and reduces, scales and clips."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

from unipar.engine import (
    broadcast_tensors,
    checkpoint_activations,
    compile_modules,
    offload_activations,
    refuse_shared_memory,
)
from unipar.errors import ConfigError
from unipar.layout import Layout
from unipar.strategy import (
    Availability,
    Capabilities,
    Engine,
    EngineSpec,
    Precision,
    Strategy,
    seeded_model,
)
from unipar.world import Placement, World, join
from unipar_accelerate import framework, installed, zero
from unipar_accelerate.options import AccelerateOptions, check_native

if TYPE_CHECKING:
    from unipar.install import Recipe


class AccelerateStrategy(Strategy):
    """Accelerate with its DDP, its FSDP2 or its DeepSpeed plugin."""

    name = "accelerate"
    options_type = AccelerateOptions
    options: AccelerateOptions
    rewrites_module = True

    @classmethod
    def availability(cls) -> Availability:
        return installed.availability()

    @classmethod
    def recipe(cls) -> Recipe:
        return installed.recipe()

    @functools.cached_property
    def _deepspeed(self) -> Strategy:
        return zero.make_strategy(self.options)

    def capabilities(self) -> Capabilities:
        if self.options.plugin == "deepspeed":
            return self._deepspeed.capabilities()
        precisions: frozenset[Precision] = frozenset({"fp32", "bf16", "fp16"})
        if self.options.plugin == "ddp":
            return Capabilities(
                precisions,
                frozenset({"cpu", "cuda"}),
                offload=frozenset({"activations"}),
                selective_checkpointing=True,
                sample_dropout=True,
            )
        return Capabilities(
            precisions,
            frozenset({"cuda"}),
            sharded=frozenset({"parameters", "gradients", "optimizer"}),
            offload=frozenset({"parameters", "optimizer"}),
            splits_tensors=True,
            sparse_gradients=False,
            # The plugin, with the classes that it wraps, is one for all Accelerators of a process.
            several_engines=False,
        )

    def check(self, spec: EngineSpec, placement: Placement) -> None:
        options, device = self.options, placement.device_type
        check_native(options)
        framework.check_environment(options.plugin, spec.precision, device, os.environ)
        if options.plugin == "deepspeed":
            zero.check(options, spec, os.environ)
            self._deepspeed.check(spec, placement)
        if options.plugin == "fsdp" and device == "cpu":
            raise ConfigError(
                "accelerate: plugin='fsdp' needs a GPU: on the CPU Accelerate would make plain "
                "DDP of it. Use plugin='ddp', or strategy='fsdp', which is real there too."
            )
        if options.compression == "bf16" and device == "cpu":
            raise ConfigError(
                "accelerate: compression='bf16' needs a GPU (torch's hook wants NCCL). "
                "Use 'fp16', or 'none'."
            )

    def layout(self, placement: Placement) -> Layout:
        if self.options.plugin == "deepspeed":
            return self._deepspeed.layout(placement)
        if self.options.plugin == "fsdp":
            return Layout(dp_shard=placement.size)
        return super().layout(placement)

    def setup(self, placement: Placement) -> World:
        own = self.options.plugin != "deepspeed"
        layout = self.layout(placement)
        world = join(placement, layout) if own else self._deepspeed.setup(placement)
        self._framework = framework.Framework(world, self.options.plugin)
        return world

    def prepare(self, spec: EngineSpec, world: World) -> Engine:
        if self.options.plugin == "deepspeed":
            return self._prepare_deepspeed(spec, world)
        from unipar_accelerate.accelerator import make_accelerator
        from unipar_accelerate.engine import prepare_replica, prepare_shards

        module = seeded_model(spec).to(world.device)
        undo = [checkpoint_activations(module, spec.activation_checkpointing)]
        undo.append(offload_activations(module, spec.activation_offload, world.device))
        undo.append(compile_modules([module], spec.compile))
        accelerator = make_accelerator(self._framework, self.options, spec, module, world)
        if self.options.plugin == "ddp":
            return prepare_replica(spec, world, module, accelerator, self.options, undo)
        refuse_shared_memory(module, self.name)
        # As DDP does, and FSDP2 does not.
        broadcast_tensors([*module.parameters(), *module.buffers()], world)
        return prepare_shards(spec, world, module, accelerator, self.options, undo)

    def _prepare_deepspeed(self, spec: EngineSpec, world: World) -> Engine:
        prepared = zero.Prepared(self._framework, self.options)
        # The one thing that is asked of that strategy beyond the interface of all.
        self._deepspeed.initialize = prepared  # pyright: ignore[reportAttributeAccessIssue]
        engine = self._deepspeed.prepare(spec, world)
        engine.accelerator = prepared.accelerator  # pyright: ignore[reportAttributeAccessIssue]
        return engine

    def explain(self, error: BaseException) -> str:
        if self.options.plugin != "fsdp":
            return ""
        from unipar.engine.sharded import explain_sharded

        return explain_sharded(error, self.name)

    def teardown(self) -> None:
        self._framework.stop()
        if self.options.plugin == "deepspeed":
            self._deepspeed.teardown()
