"""Fully sharded data parallel (FSDP2): parameters, gradients and optimizer divided among ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from pydantic import Field, model_validator
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from unipar.errors import ConfigError
from unipar.strategy import (
    Capabilities,
    EngineSpec,
    Needs,
    Strategy,
    StrategyOptions,
    seeded_model,
)
from unipar.world import Placement, World
from unipar_torch.engine import COMPUTE_DTYPES, TorchEngine
from unipar_torch.single import DEVICE_TYPES, PRECISIONS
from unipar_torch.transforms import (
    checkpoint_activations,
    compile_modules,
    modules_of_classes,
    repeated_blocks,
)


class FSDPOptions(StrategyOptions):
    """What ``fully_shard`` lets one tune."""

    strategy: ClassVar[str] = "fsdp"

    sharding: Literal["full", "grad_op", "hybrid"] = Field(
        default="full",
        description="'full' frees parameters after each use; 'grad_op' keeps them from forward to "
        "backward; 'hybrid' shards within groups of ranks and replicates across them.",
    )
    shard_size: int | None = Field(
        default=None,
        ge=1,
        description="With 'hybrid': ranks that share one replica. Default: those of a node, or "
        "half of all ranks where there is one node.",
    )
    wrap: Literal["auto", "none"] | tuple[str, ...] = Field(
        default="auto",
        description="Which submodules are gathered as units: the repeated blocks ('auto'), the "
        "model as a whole ('none'), or modules of the named classes.",
    )
    wrap_min_params: int | None = Field(
        default=None,
        ge=1,
        description="Instead of 'wrap': submodules of at least this many parameters.",
    )
    reduce_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32", description="The dtype in which gradients are summed over ranks."
    )
    param_dtype: Literal["compute", "fp32"] = Field(
        default="compute", description="The dtype in which parameters are gathered."
    )
    cpu_offload: bool = Field(
        default=False,
        description="Shards, gradients and optimizer live in host memory between uses.",
    )
    prefetch: int = Field(
        default=0, ge=0, description="Units gathered ahead explicitly; 0 leaves it to PyTorch."
    )

    @model_validator(mode="after")
    def _consistent(self) -> FSDPOptions:
        if self.shard_size is not None and self.sharding != "hybrid":
            raise ValueError("shard_size needs sharding='hybrid'")
        if self.wrap_min_params is not None and self.wrap != "auto":
            raise ValueError("give wrap or wrap_min_params, not both")
        return self


class FSDPStrategy(Strategy):
    """PyTorch's FSDP2."""

    name = "fsdp"
    options_type = FSDPOptions
    options: FSDPOptions
    rewrites_module = True

    @classmethod
    def bid(cls, needs: Needs) -> float:
        return 3.0 if needs.devices > 1 and not needs.fits else 0.5

    def capabilities(self) -> Capabilities:
        return Capabilities(
            PRECISIONS,
            DEVICE_TYPES,
            sharded=frozenset({"parameters", "gradients", "optimizer"}),
            offload=frozenset({"parameters", "optimizer"}),
        )

    def check(self, spec: EngineSpec, placement: Placement) -> None:
        if self.options.sharding == "hybrid":
            self._shard_size(placement)

    def prepare(self, spec: EngineSpec, world: World) -> FSDPEngine:
        options = self.options
        mesh = self._mesh(world.placement)
        module, weights = _unsharded(spec, world)
        undo = [checkpoint_activations(module, spec.activation_checkpointing)]
        units = self._units(module)
        compile_modules(units or [module], spec.compile)
        for unit in [*units, module]:
            fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=options.sharding != "grad_op",
                mp_policy=self._mixed_precision(spec, root=unit is module),
                offload_policy=self._offload(world.device),
            )
        if weights is not None:
            _materialize(module, weights, world, offloaded=options.cpu_offload)
        _prefetch(units, options.prefetch)
        return FSDPEngine(spec, world, module, undo=undo)

    def _mesh(self, placement: Placement) -> DeviceMesh:
        if self.options.sharding != "hybrid":
            return init_device_mesh(
                placement.device_type, (placement.size,), mesh_dim_names=("shard",)
            )
        shard = self._shard_size(placement)
        return init_device_mesh(
            placement.device_type,
            (placement.size // shard, shard),
            mesh_dim_names=("replicate", "shard"),
        )

    def _shard_size(self, placement: Placement) -> int:
        default = placement.local_size if placement.num_nodes > 1 else max(1, placement.size // 2)
        shard = self.options.shard_size or default
        if placement.size % shard:
            raise ConfigError(
                f"fsdp: sharding='hybrid' with shard_size={shard} does not divide "
                f"{placement.size} processes. Use a divisor of {placement.size}, or 'full'."
            )
        return shard

    def _units(self, module: nn.Module) -> list[nn.Module]:
        minimum, wrap = self.options.wrap_min_params, self.options.wrap
        if minimum is not None:
            return _large_modules(module, minimum)
        if wrap == "auto":
            return repeated_blocks(module)
        if wrap == "none":
            return []
        assert not isinstance(wrap, str)
        return modules_of_classes(module, wrap, "fsdp: wrap")

    def _mixed_precision(self, spec: EngineSpec, *, root: bool) -> MixedPrecisionPolicy:
        if spec.precision == "fp32":
            return MixedPrecisionPolicy()
        gathered = spec.precision if self.options.param_dtype == "compute" else "fp32"
        return MixedPrecisionPolicy(
            param_dtype=COMPUTE_DTYPES[gathered],
            reduce_dtype=COMPUTE_DTYPES[self.options.reduce_dtype],
            # Blocks hand activations on in the compute dtype; only the loss wants fp32.
            output_dtype=torch.float32 if root else None,
        )

    def _offload(self, device: torch.device) -> OffloadPolicy:
        if not self.options.cpu_offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=device.type != "cpu")


class FSDPEngine(TorchEngine):
    """Gradients are reduce-scattered during the backward pass of the last micro-batch."""

    module: FSDPModule  # pyright: ignore[reportIncompatibleVariableOverride]

    @contextlib.contextmanager
    def _microbatch(self, last: bool) -> Iterator[None]:
        self.module.set_requires_gradient_sync(last)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)

    def _gradient_norm(self, max_norm: float) -> float:
        grads = [p.grad for p in self._parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if not math.isinf(max_norm):
            nn.utils.clip_grads_with_norm_(self._parameters, max_norm, norm)
        return norm.item()


def _large_modules(model: nn.Module, minimum: int) -> list[nn.Module]:
    """Submodules of at least ``minimum`` parameters outside of others that were taken, innermost
    first."""
    taken: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        own = sum(p.numel() for p in module.parameters(recurse=False))
        size = own + sum(visit(child) for child in module.children())
        if size < minimum or module is model or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            return size
        taken.append(module)
        return 0

    visit(model)
    return taken


def _unsharded(spec: EngineSpec, world: World) -> tuple[nn.Module, dict[str, torch.Tensor] | None]:
    """The module to shard; and, where a function builds it, what its tensors are to be filled with.

    Only rank 0 builds a model function's tensors, on the host, and the shards are sent out one
    tensor at a time: initializers run under DTensor give equal shards on all ranks.
    """
    if isinstance(spec.model, nn.Module):
        module = spec.model.to(world.device)
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        return module, None
    weights: dict[str, torch.Tensor] = {}
    if world.is_main:
        built = seeded_model(spec)
        weights = {**built.state_dict(), **dict(built.named_buffers())}
    try:
        with torch.device("meta"):
            return spec.model(), weights
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the model function cannot run on the meta device ({type(error).__name__}: {error}), "
            "as fsdp needs to shard a model while it is built. Build the module first and pass it "
            "instead of the function."
        ) from error


def _materialize(
    module: nn.Module, weights: dict[str, torch.Tensor], world: World, *, offloaded: bool
) -> None:
    module.to_empty(device="cpu" if offloaded else world.device)
    persistent = set(module.state_dict())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=True)
    full: dict[str, Any] = {name: t for name, t in weights.items() if name in persistent}
    set_model_state_dict(module, full, options=options)
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name not in persistent:
                if world.is_main:
                    buffer.copy_(weights[name])
                dist.broadcast(buffer, src=0)


def _prefetch(units: list[nn.Module], ahead: int) -> None:
    if not ahead:
        return
    blocks: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + ahead])
        block.set_modules_to_backward_prefetch(blocks[max(0, index - ahead) : index][::-1])
