"""DistributedDataParallel: a whole replica on each device, gradients summed while they form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unipar.combined import CombinedOptimizer
from unipar.engine import (
    ByTensor,
    DDPReducer,
    SeenReplica,
    StepEngine,
    build_optimizer,
    checkpoint_activations,
    compile_modules,
    compute_in_float8,
    constructor_arguments,
    offload_activations,
    share_hooks,
    sparse_parameters,
    with_divisible_optimizer,
)
from unipar.errors import ConfigError
from unipar.strategy import (
    Capabilities,
    EngineSpec,
    Strategy,
    StrategyOptions,
    seeded_model,
)
from unipar.world import Placement, World
from unipar_torch.single import DEVICE_TYPES, PRECISIONS

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from unipar.sizing import Needs

_WIRE_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class DDPOptions(StrategyOptions):
    """Options of DistributedDataParallel."""

    strategy: ClassVar[str] = "ddp"

    bucket_cap_mb: float = Field(
        default=25.0, gt=0, description="Size of a gradient bucket, in MiB."
    )
    static_graph: bool = Field(
        default=False,
        description="The graph is the same in every step; finds unused parameters once.",
    )
    find_unused_parameters: bool = Field(
        default=False,
        description="Some parameters get no gradient in some steps; costs a graph walk.",
    )
    gradient_as_bucket_view: bool = Field(
        default=True,
        description="Gradients live in the communication buckets, which saves one copy.",
    )
    broadcast_buffers: bool = Field(
        default=True,
        description="Every step starts from rank 0's buffers (BatchNorm statistics).",
    )
    sync_batchnorm: bool = Field(
        default=False, description="BatchNorm over the global micro-batch; GPU only."
    )
    compression: Literal["none", "fp16", "bf16", "powersgd"] = Field(
        default="none",
        description="Compression of gradients in the all-reduce; all but 'none' lose precision.",
    )
    powersgd_rank: int = Field(default=4, ge=1, description="Rank of PowerSGD's approximation.")
    powersgd_start: int = Field(
        default=1000, ge=2, description="Steps of plain all-reduce before PowerSGD begins."
    )
    shard_optimizer: bool = Field(
        default=False,
        description="ZeRO stage 1: each rank keeps the optimizer state of its share of parameters.",
    )


class DDPStrategy(Strategy):
    """PyTorch's DistributedDataParallel."""

    name = "ddp"
    options_type = DDPOptions
    options: DDPOptions
    engine_options = frozenset(
        {
            "bucket_cap_mb",
            "compression",
            "find_unused_parameters",
            "gradient_as_bucket_view",
            "static_graph",
        }
    )

    @classmethod
    def bid(cls, needs: Needs) -> float:
        return 2.0 if needs.devices > 1 and needs.fits else 1.0

    def capabilities(self) -> Capabilities:
        sharded = frozenset({"optimizer"}) if self.options.shard_optimizer else frozenset()
        return Capabilities(
            PRECISIONS,
            DEVICE_TYPES,
            sharded=sharded,
            offload=frozenset({"activations"}),
            selective_checkpointing=True,
            sample_dropout=True,
        )

    def check(self, spec: EngineSpec, placement: Placement) -> None:
        if self.options.sync_batchnorm and placement.device_type == "cpu":
            raise ConfigError(
                "ddp: sync_batchnorm=true needs a GPU (torch.nn.SyncBatchNorm has no CPU kernel). "
                "Leave it off, or use GroupNorm or LayerNorm, which do not depend on the batch."
            )

    def prepare(self, spec: EngineSpec, world: World) -> StepEngine:
        options = self.options
        module = seeded_model(spec).to(world.device)
        undo = [
            compute_in_float8(module, spec.precision),
            checkpoint_activations(module, spec.activation_checkpointing),
            offload_activations(module, spec.activation_offload, world.device),
        ]
        if options.sync_batchnorm:
            module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
        undo.append(compile_modules([module], spec.compile))
        model = ReplicatedModule(
            module,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            bucket_cap_mb=options.bucket_cap_mb,
            static_graph=options.static_graph,
            find_unused_parameters=options.find_unused_parameters,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
        )
        # The argument has had two names (torch 2.13, nn/parallel/distributed.py: it was called
        # broadcast_buffers, and then also decided whether buffers start equal); this has had one.
        model.broadcast_buffers = options.broadcast_buffers
        if options.compression == "powersgd":
            _compress(model, options)
        if options.shard_optimizer:
            spec = with_divisible_optimizer(spec, self.name, world, ByTensor(rebuilt=True))
        optimizer = build_optimizer(spec, module, may_fuse=True)
        if optimizer is not None and options.shard_optimizer:
            optimizer = shard_optimizer(optimizer)
        reducer = DDPReducer(
            model,
            world,
            allow_unused="ddp:find_unused_parameters=true",
            wire_dtype=_WIRE_DTYPES.get(options.compression),
            only_overlapped="ddp:compression=powersgd" * (options.compression == "powersgd"),
            averages=options.compression == "powersgd",
        )
        return StepEngine(
            spec,
            world,
            module,
            optimizer,
            model=SeenReplica(module, model),
            loop_model=model.compute,
            reducer=reducer,
            undo=undo,
        )


class ReplicatedModule(DistributedDataParallel):
    """DDP whose buffers are part of several graphs."""

    def _sync_buffers(self) -> None:
        # As torch 2.13 does it itself (nn/parallel/distributed.py). In 2.11, a second forward pass
        # in one loss made the first one's graph invalid, where buffers are part of it.
        unchanged: Any = torch.autograd._unsafe_preserve_version_counter  # pyright: ignore[reportPrivateImportUsage]
        with unchanged(tuple(self.module.buffers())):
            super()._sync_buffers()

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """A forward pass that arms no reducer. Its graphs, if it is compiled, end where buckets do,
        so that gradients are summed while others form, as in a pass of the wrapper's own.
        """
        with self._inside_ddp_forward():
            return self.module(*args, **kwargs)


def shard_optimizer(
    optimizer: torch.optim.Optimizer,
) -> ZeroRedundancyOptimizer | CombinedOptimizer:
    """The same optimizer with its state divided among ranks, parameter by parameter."""
    if isinstance(optimizer, CombinedOptimizer):
        parts = optimizer.optimizers.items()
        return CombinedOptimizer({name: shard_optimizer(one) for name, one in parts})
    # Compiles optimizers when it is imported, which takes as long as torch itself.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    arguments = constructor_arguments(optimizer)
    sharded = ZeroRedundancyOptimizer(optimizer.param_groups, type(optimizer), **arguments)
    # Not those of its part, which are a class's own that registers some: torch 2.13,
    # optim/optimizer.py.
    sharded.optim._optimizer_step_pre_hooks.clear()
    sharded.optim._optimizer_step_post_hooks.clear()
    share_hooks(optimizer, sharded)
    return sharded


def _compress(model: DistributedDataParallel, options: DDPOptions) -> None:
    sparse = next((n for p, n in sparse_parameters(model.module).items() if p.requires_grad), None)
    if sparse is not None:
        # Its hook takes a gradient for one row of numbers (torch 2.13, powerSGD_hook.py), which
        # ends in an error, or with ranks that wait for each other.
        raise ConfigError(
            f"ddp: compression=powersgd was given, and parameter '{sparse}' has sparse gradients "
            "(sparse=True), which PowerSGD cannot compress. Build the embedding with sparse=False, "
            "or use compression=fp16 or bf16."
        )
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=options.powersgd_rank,
        start_powerSGD_iter=options.powersgd_start,
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
