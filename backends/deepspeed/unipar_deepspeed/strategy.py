"""DeepSpeed: replicas whose state ZeRO divides among ranks."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from unipar.engine import (
    Flat,
    PrecisionPolicy,
    SeenAsModule,
    StepEngine,
    Undo,
    broadcast_tensors,
    build_optimizer,
    checkpoint_activations,
    compile_modules,
    group_names,
    keep_weights_in_place,
    offload_activations,
    refuse_changed_weights,
    refuse_inner_gradients,
    refuse_other_weights,
    refuse_shared_memory,
    with_divisible_optimizer,
)
from unipar.errors import ConfigError
from unipar.layout import Layout
from unipar.state import EngineState
from unipar.strategy import (
    Availability,
    Capabilities,
    EngineSpec,
    Strategy,
    seeded_model,
)
from unipar.utils.logs import quiet_framework
from unipar.world import Placement, World, join
from unipar_deepspeed import framework, ops, swapped, tensor_parallel
from unipar_deepspeed.config import check_native, deepspeed_config
from unipar_deepspeed.divided import KeptWhole, SeenDivided, empty_outside, losses_of_output
from unipar_deepspeed.engine import (
    Initialize,
    Initialized,
    ReplicaReducer,
    autocast_forward,
    initialize,
)
from unipar_deepspeed.options import (
    AnyOptions,
    DeepSpeedOptions,
    ZeRO1Options,
    ZeRO2Options,
    ZeRO3Options,
)
from unipar_deepspeed.state import ZeROState
from unipar_deepspeed.zero import ZeROReducer, ZeROStepper, step_own_optimizer, take_over_weights

if TYPE_CHECKING:
    from unipar.install import Recipe

_SHARDED = ("optimizer", "gradients", "parameters")
_IN_FP32 = {torch.float32, torch.bfloat16, torch.float16}
"""What has no more digits than the fp32 weights that ZeRO updates."""


class DeepSpeedStrategy(Strategy):
    """DeepSpeed's ZeRO, at the stage that the options say."""

    name = "deepspeed"
    options_type = DeepSpeedOptions
    rewrites_module: ClassVar[bool] = True
    options: AnyOptions
    initialize: Initialize | None = None
    """Who calls ``deepspeed.initialize``, where it is another framework that is over DeepSpeed."""

    @classmethod
    def availability(cls) -> Availability:
        return framework.availability()

    @classmethod
    def recipe(cls) -> Recipe:
        from unipar_deepspeed.installed import recipe

        return recipe()

    @classmethod
    def read_checkpoint(cls, path: Path) -> EngineState:
        from unipar_deepspeed import saved

        return saved.read(path)

    @classmethod
    def keep_beside(cls, path: Path, converted: Path) -> None:
        from unipar_deepspeed import saved

        saved.keep_beside(path, converted)

    def capabilities(self) -> Capabilities:
        stage = self.options.stage
        if self.options.tp > 1:
            return tensor_parallel.CAPABILITIES
        return Capabilities(
            precisions=frozenset({"fp32", "bf16", "fp16"}),
            device_types=frozenset({"cpu", "cuda"}),
            sharded=frozenset(_SHARDED[:stage]),
            offload=frozenset({"optimizer"} if stage > 0 else ())
            | frozenset({"parameters"} if stage == 3 else {"activations"}),
            # Stage 3 gathers weights inside of what is recomputed, in another order each time, and
            # its linear layers add their bias in place (DeepSpeed 0.19.8, runtime/zero/linear.py),
            # to what would be kept.
            selective_checkpointing=False,
            several_engines=False,
            compile=stage < 3,
            splits_tensors=stage > 0,
            sparse_gradients=False,
            sample_dropout=True,
        )

    def check(self, spec: EngineSpec, placement: Placement) -> None:
        check_native(self.options)
        self.layout(placement)
        if self.options.overlap_comm and placement.device_type == "cpu":
            raise ConfigError(
                f"{self.name}: overlap_comm=true needs a GPU, whose streams it overlaps. "
                "Leave it off."
            )
        if self.options.stage > 0 and spec.on_nan == "ignore":
            raise ConfigError(
                f"{self.name}: ZeRO drops a step whose gradients are not finite, so "
                "on_nan='ignore' cannot be had. Use on_nan='skip', which says so, or 'raise'."
            )
        if self.options.nvme_path is not None:
            ops.check("async_io", f"{self.name}: nvme_path", "nvme")
            swapped.check_directory(self.options.nvme_path, self.name)
        if isinstance(spec.model, nn.Module):
            self._check_parameters(spec.model)
            # A session asks before there is a model, with one that does nothing in its place.
            if self.options.tp > 1 and not isinstance(spec.model, nn.Identity):
                tensor_parallel.check_model(spec.model, self.options.tp, self.name)

    def layout(self, placement: Placement) -> Layout:
        if self.options.stage == 0:
            return super().layout(placement)
        return tensor_parallel.make_layout(self.options.tp, placement, self.name)

    def setup(self, placement: Placement) -> World:
        world = join(placement, self.layout(placement))
        self._environment = framework.start(world)
        return world

    def prepare(self, spec: EngineSpec, world: World) -> StepEngine:
        options = self.options
        module = seeded_model(spec).to(world.device)
        self._check_parameters(module)
        if options.stage > 0:
            refuse_shared_memory(module, self.name)
        parts = None
        if options.tp > 1:
            tensor_parallel.check_model(module, options.tp, self.name)
            # DeepSpeed cuts what each rank has, equal or not.
            broadcast_tensors([*module.parameters(), *module.buffers()], world)
            parts = tensor_parallel.LayerParts.of(module, world)
        undo = [
            checkpoint_activations(module, spec.activation_checkpointing),
            offload_activations(module, spec.activation_offload, world.device),
            compile_modules([module], spec.compile),
        ]
        if options.stage > 0:
            # On one rank, too, a flat partition is made of several tensors.
            flat = Flat(device=torch.device("cpu") if options.offload_optimizer else None)
            spec = with_divisible_optimizer(spec, self.name, world, flat)
        optimizer = build_optimizer(spec, module)
        if optimizer is None:
            # DeepSpeed has nothing to divide.
            return StepEngine(spec, world, module, undo=undo)
        # ZeRO puts its flat partitions in their place.
        groups = group_names(module, optimizer)
        deepspeed = self._initialize(spec, world, module, optimizer, undo)
        check_loss = None
        if parts is not None:
            parts.check(module, deepspeed.engine)
            tensor_parallel.keep_inputs_contiguous(module)
            check_loss = parts.whole_losses(module, self.name)
            undo.append(check_loss.close)
        # DeepSpeed passes attributes on, but for those that it has itself, such as ``config``.
        seen = SeenAsModule(module, deepspeed.engine)
        precision = PrecisionPolicy(spec.precision, world.device)
        undo.append(autocast_forward(module, precision))
        undo.append(refuse_inner_gradients(module, "deepspeed"))
        if options.stage == 0:
            return StepEngine(
                spec,
                world,
                module,
                optimizer,
                model=seen,
                loop_model=deepspeed.engine,
                reducer=ReplicaReducer(module, world, deepspeed, options.reduce_bucket_size),
                precision=precision,
                undo=undo,
            )
        # They are parts of ZeRO's flat partitions now.
        undo.append(keep_weights_in_place(module))
        step_own_optimizer(deepspeed.zero, optimizer)
        swapped.align_gradients(deepspeed.zero)
        take_over = functools.partial(take_over_weights, deepspeed.zero)
        if options.stage == 3:
            take_over = KeptWhole(deepspeed.zero).take_over
            seen = SeenDivided(module, deepspeed.engine, self.name, parts.shapes if parts else {})
            if check_loss is None:
                check_loss = losses_of_output(module, self.name)
                undo.append(check_loss.close)
            gathered = [m for m in module.modules() if [*m.parameters(recurse=False)]]
            # It lets go of weights and gathers them again during a pass.
            undo.append(
                refuse_changed_weights(module, "zero3", gathered, between_passes=True, stays=False)
            )
            undo.append(refuse_other_weights(module, self.name))
            undo.append(empty_outside(module, self.name))
        swapping = swapped.Swapping(deepspeed)
        refuse = options.unused_parameters == "refuse"
        return StepEngine(
            spec,
            world,
            module,
            optimizer,
            model=seen,
            loop_model=deepspeed.engine,
            reducer=ZeROReducer(module, world, deepspeed, swapping, refuse_unused=refuse),
            precision=precision,
            stepper=ZeROStepper(deepspeed, precision, take_over),
            state=ZeROState(module, deepspeed, swapping, groups, world, parts, take_over),
            check_loss=check_loss,
            undo=undo,
        )

    def _initialize(
        self,
        spec: EngineSpec,
        world: World,
        module: nn.Module,
        optimizer: Optimizer,
        undo: list[Undo],
    ) -> Initialized:
        """Let DeepSpeed divide what there is; add to ``undo`` what takes that back."""
        size = sum(p.numel() for p in module.parameters())
        files, initializing = None, contextlib.nullcontext()
        if self.options.nvme_path is not None:
            ops.load("async_io")
            files, remove = swapped.own_files(self.options.nvme_path, module, world.size)
            undo.append(remove)
            initializing = swapped.parameters_as_they_are()
        config = deepspeed_config(self.options, spec, world.size, size, files)
        if self.options.tp > 1:
            config |= tensor_parallel.configuration(self.options.tp)
            # DeepSpeed 0.19.8 counts ranks before it knows of them, and stage 3 after that.
            del config["train_batch_size"]
        with initializing, quiet_framework(*framework.LOGGERS):
            engine, release = (self.initialize or initialize)(module, optimizer, config)
        deepspeed = Initialized(engine, world)
        undo.append(release)
        # Last of all, for it lets go of what the others look at.
        undo.insert(0, deepspeed.close)
        return deepspeed

    def _check_parameters(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            if parameter.ndim == 0:
                raise ConfigError(
                    f"{self.name}: parameter '{name}' has no dimension, and DeepSpeed cannot "
                    "flatten such. Give it the shape (1,): nn.Parameter(torch.ones(1))."
                )
            if self.options.stage > 0 and parameter.dtype not in _IN_FP32:
                raise ConfigError(
                    f"{self.name}: parameter '{name}' is {parameter.dtype}, and ZeRO updates "
                    "weights in float32. Use strategy='ddp', or a model in float32."
                )

    def teardown(self) -> None:
        if self.options.tp > 1:
            tensor_parallel.stop()
        framework.stop(self._environment)


class ZeRO1Strategy(DeepSpeedStrategy):
    """ZeRO stage 1, by a name of its own."""

    name = "zero1"
    options_type = ZeRO1Options


class ZeRO2Strategy(DeepSpeedStrategy):
    """ZeRO stage 2, by a name of its own."""

    name = "zero2"
    options_type = ZeRO2Options


class ZeRO3Strategy(DeepSpeedStrategy):
    """ZeRO stage 3, by a name of its own."""

    name = "zero3"
    options_type = ZeRO3Options
