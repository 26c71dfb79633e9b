"""Parameters, gradients and optimizer divided among ranks by PyTorch's FSDP2."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from unipar.engine import (
    COMPUTE_DTYPES,
    AsDTensors,
    OptimizerStepper,
    PrecisionPolicy,
    Reducer,
    StepEngine,
    build_optimizer,
    checkpoint_activations,
    compile_modules,
    compute_in_float8,
    has_forward,
    modules_of_classes,
    parallelize,
    refuse_changed_weights,
    refuse_inner_gradients,
    refuse_parameter_hooks,
    repeated_blocks,
    sum_shards,
    with_divisible_optimizer,
)
from unipar.engine.sharded import discard_gradients, refuse_gradients_outside, total_norm_of_shards
from unipar.errors import ConfigError
from unipar.strategy import EngineSpec, seeded_model
from unipar.utils.torch_versions import recovering
from unipar.world import World

if TYPE_CHECKING:
    from unipar_torch.fsdp import FSDPOptions


def prepare(spec: EngineSpec, world: World, options: FSDPOptions) -> StepEngine:
    """Shard a model, then build its optimizer. Collective.

    Args:
        spec: what the user asked for.
        world: the joined processes.
        options: of the strategy.
    """
    hybrid = world.layout.dp_replicate > 1
    mesh = world.mesh("dp_replicate", "fsdp") if hybrid else world.mesh("fsdp")
    module, weights = _unsharded(spec, world)
    refuse_parameter_hooks(module, options.strategy)
    # While weights are whole: a layer does not tell afterwards who will gather its weight.
    undo = [compute_in_float8(module, spec.precision)]
    if spec.parallelize is not None:
        parallelize(module, spec.parallelize, world)
    undo += [
        checkpoint_activations(module, spec.activation_checkpointing),
        # The second backward pass needs weights that the first one lets go of.
        refuse_inner_gradients(module, "fsdp", only_graphs=True),
    ]
    units = _units(module, options)
    compile_modules(units or [module], spec.compile)
    for unit in [*units, module]:
        if isinstance(unit, FSDPModule):
            # The user has.
            continue
        fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=options.sharding != "grad_op",
            mp_policy=_mixed_precision(spec, options, root=unit is module),
            offload_policy=_offload(world.device, options),
        )
    sum_shards(module)
    if weights is not None:
        _materialize(module, weights, world, offloaded=options.cpu_offload)
    _prefetch(units, options.prefetch)
    # What is changed of a DTensor is changed for good.
    parts = [*units, module]
    undo.append(refuse_changed_weights(module, "fsdp", parts, lambda p: not isinstance(p, DTensor)))
    spec = with_divisible_optimizer(spec, options.strategy, world, AsDTensors())
    undo += refuse_gradients_outside(module, options.strategy)
    optimizer = build_optimizer(spec, module)
    precision = PrecisionPolicy(spec.precision, world.device)
    stepper = None
    if optimizer is not None:
        parameters = module.parameters()
        stepper = OptimizerStepper(optimizer, precision, parameters, total_norm_of_shards)
    return StepEngine(
        spec,
        world,
        module,
        optimizer,
        reducer=ShardReducer(module, world),
        precision=precision,
        stepper=stepper,
        undo=undo,
    )


class ShardReducer(Reducer):
    """Reduce-scatters gradients during the backward pass of the last micro-batch."""

    # Between micro-batches they are inside FSDP; and a DTensor does not tell of all changes.
    hides_gradients = True

    module: FSDPModule  # pyright: ignore[reportIncompatibleVariableOverride]

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        self.module.set_requires_gradient_sync(last)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)

    def discard(self) -> None:
        # Those that were not reduced are inside FSDP.
        discard_gradients(self.module, "fsdp")
        super().discard()

    def probing(self) -> AbstractContextManager[None]:
        return recovering(self.module, "fsdp")


def _units(module: nn.Module, options: FSDPOptions) -> list[nn.Module]:
    if not has_forward(module):
        raise ConfigError(
            f"fsdp: the model is a {type(module).__name__}, which has no forward, and FSDP gathers "
            "parameters when forward is called. Hold it in a module whose forward calls its parts."
        )
    minimum, wrap = options.wrap_min_params, options.wrap
    if minimum is not None:
        return _large_modules(module, minimum)
    if wrap == "auto":
        return repeated_blocks(module)
    if wrap == "none":
        return []
    assert not isinstance(wrap, str)
    return modules_of_classes(module, wrap, "fsdp: wrap")


def _mixed_precision(spec: EngineSpec, options: FSDPOptions, *, root: bool) -> MixedPrecisionPolicy:
    if spec.precision == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        # A dtype, fp32 too, would also cast what goes into each unit.
        param_dtype=COMPUTE_DTYPES[spec.precision] if options.param_dtype == "compute" else None,
        reduce_dtype=COMPUTE_DTYPES[options.reduce_dtype],
        # Blocks hand activations on in the compute dtype; only the loss wants fp32.
        output_dtype=torch.float32 if root else None,
    )


def _offload(device: torch.device, options: FSDPOptions) -> OffloadPolicy:
    if not options.cpu_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device.type != "cpu")


def _large_modules(model: nn.Module, minimum: int) -> list[nn.Module]:
    """Submodules of at least ``minimum`` parameters outside of others that were taken, innermost
    first."""
    taken: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        own = sum(p.numel() for p in module.parameters(recurse=False))
        size = own + sum(visit(child) for child in module.children())
        if size < minimum or module is model or not has_forward(module):
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
