"""Parameters, gradients and optimizer divided among ranks by PyTorch's FSDP2."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
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
    Trail,
    Undo,
    WholeLosses,
    build_optimizer,
    checkpoint_activations,
    compile_modules,
    compute_in_float8,
    has_forward,
    keep_weights_in_place,
    modules_of_classes,
    offload_activations,
    parallelize,
    refuse_changed_weights,
    refuse_inner_gradients,
    refuse_parameter_hooks,
    refuse_shared_memory,
    repeated_blocks,
    see_calls,
    sum_shards,
    with_divisible_optimizer,
    with_same_choice,
)
from unipar.engine.outputs import tensors_of
from unipar.engine.sharded import (
    discard_gradients,
    refuse_unreduced,
    refuse_uses_outside,
    scaler_of,
    total_norm_of_shards,
)
from unipar.engine.sharded_places import keep_in_place
from unipar.errors import ConfigError
from unipar.strategy import EngineSpec
from unipar.utils.torch_versions import recovering, sharded_groups
from unipar.world import World
from unipar_torch.expert_sharding import MeshesStepper, shard_experts
from unipar_torch.from_host import (
    give_notes,
    give_values,
    host_model,
    notes_on,
    take_values,
    tied_names,
)
from unipar_torch.fsdp import refuse_scalars

if TYPE_CHECKING:
    from unipar_torch.context_parallel import ContextParallel
    from unipar_torch.fsdp import ShardingOptions
    from unipar_torch.loss_parallel import LossParallel

Divide = Callable[[nn.Module], list[Undo]]
"""Divides the layers of a model, on the meta device too; returns what takes back what can be."""


def prepare(
    spec: EngineSpec,
    world: World,
    options: ShardingOptions,
    divide: Divide | None = None,
    sequences: ContextParallel | None = None,
    experts: Sequence[str] = (),
    loss: LossParallel | None = None,
    *,
    sharded: bool = True,
) -> StepEngine:
    """Shard a model, then build its optimizer. Collective.

    Args:
        spec: what the user asked for.
        world: the joined processes.
        options: of the strategy.
        divide: divides layers before anything else is done to the model.
        sequences: divides sequences.
        experts: names of modules that ranks along ``ep`` have divided.
        loss: computes the loss from divided logits.
        sharded: whether FSDP divides parameters; else ``divide`` alone has.
    """
    name = options.strategy
    module, weights = host_model(spec, world, name)
    refuse_parameter_hooks(module, options.strategy)
    refuse_shared_memory(module, name)
    if sharded:
        refuse_scalars(module, name)
    spec = with_same_choice(spec, module, name)
    take_values(module, name)
    notes, ties = notes_on(module), tied_names(module)
    # While weights are whole: a layer does not tell afterwards who will gather its weight.
    undo = [compute_in_float8(module, spec.precision)]
    if sequences is not None:
        undo += sequences.install(module)
    if divide is not None:
        undo += divide(module)
    if spec.parallelize is not None:
        parallelize(module, spec.parallelize, world)
    undo += [
        checkpoint_activations(module, spec.activation_checkpointing),
        offload_activations(module, spec.activation_offload, world.device),
        # The second backward pass needs weights that FSDP has let go of after the first one, and
        # sums over ranks that divide layers.
        refuse_inner_gradients(module, name, only_graphs=True),
    ]
    units = units_of(module, options)
    compile_modules(units or [module], spec.compile)
    holders = [module.get_submodule(holder) for holder in experts]
    if sharded:
        refuse_apart(name, ties, module, [*holders, *units])
    for holder in holders:
        # First, so that the units around them leave them alone.
        shard_experts(
            holder,
            world,
            reshard_after_forward=not options.keeps_gathered,
            mp_policy=_mixed_precision(spec, options, root=False),
            offload_policy=_offload(world.device, options),
        )
    if sharded:
        shard_units(units, module, spec, world, options)
    refuse_untied(name, ties, tied_names(module))
    give_values(module, weights, world, offloaded=options.cpu_offload)
    give_notes(module.named_parameters(), notes)
    if sharded:
        undo.append(keep_weights_in_place(module))
        parts = [*holders, *units, module]
        undo.append(refuse_changed_weights(module, name, parts, is_copy))
        undo += refuse_uses_outside(module, options.strategy)
        every = options.reduce_scatter_every_microbatch
        reducer = ShardReducer(module, world, name, every=every, keeps=options.keeps_root)
    else:
        undo += keep_in_place(module, name)
        reducer = DividedReducer(module, world)
    spec = with_divisible_optimizer(spec, options.strategy, world, AsDTensors())
    optimizer = build_optimizer(spec, module, may_fuse=True)
    # FSDP casts what goes into its units itself, unless asked to leave parameters as they are.
    autocast = not sharded or options.param_dtype == "fp32"
    scaler = scaler_of(module.parameters(), world.device) if spec.precision == "fp16" else None
    precision = PrecisionPolicy(spec.precision, world.device, autocast=autocast, scaler=scaler)
    if sequences is not None and spec.precision == "fp8":
        # Its layers stay what they are.
        sequences.check_by(precision)
    # Layers that are divided note what is a part. FSDP gathers other parameters than these, and a
    # compiled part of the graph leads to all of its own.
    own = {}
    if not sharded and not spec.compile:
        own = {n: p for n, p in module.named_parameters() if is_divided(p)}
    stepper = None
    if optimizer is not None:
        # Optimizers and clipping take the parameters of one mesh at a time.
        kind = OptimizerStepper if sharded and not experts else MeshesStepper
        stepper = kind(optimizer, precision, module.parameters(), total_norm_of_shards)
    return StepEngine(
        spec,
        world,
        module,
        optimizer,
        reducer=reducer,
        precision=precision,
        stepper=stepper,
        divider=sequences or loss,
        check_loss=None if world.layout.tp == 1 else WholeLosses(own, [], name),
        undo=undo,
    )


def shard_units(
    units: Sequence[nn.Module],
    module: nn.Module,
    spec: EngineSpec,
    world: World,
    options: ShardingOptions,
    *,
    gives_loss: bool = True,
) -> None:
    """Have FSDP divide a module and units within it, whose gradients it sums.

    Args:
        units: what is gathered by itself.
        module: what holds them.
        spec: what the user asked for.
        world: the joined processes.
        options: of the strategy.
        gives_loss: whether a loss is computed from what the module gives, and in fp32.
    """
    hybrid = world.layout.dp_replicate > 1
    mesh = world.mesh("dp_replicate", "fsdp") if hybrid else world.mesh("fsdp")
    for unit in [*units, module]:
        if isinstance(unit, FSDPModule):
            # The user has.
            continue
        kept = options.keeps_root if unit is module else options.keeps_gathered
        fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=not kept,
            mp_policy=_mixed_precision(spec, options, root=unit is module and gives_loss),
            offload_policy=_offload(world.device, options),
        )
    sum_shards(module)
    _prefetch(units, options.prefetch)


class DividedReducer(Reducer):
    """Of a model whose layers ranks divide on the same samples, and that is not sharded.

    A backward pass gives each rank the gradients of what it has, and there are no others to add.
    """

    # Those of a part are not the layer's.
    hides_gradients = True
    calls_hooks = False

    def finish(self) -> None:
        # Of what stands between divided layers each rank has a summand, and an optimizer's state
        # begins as a copy of it.
        for parameter in self.parameters:
            gradient = parameter.grad
            if not (isinstance(gradient, DTensor) and isinstance(parameter, DTensor)):
                continue
            if gradient.placements != parameter.placements:
                whole: Any = gradient.redistribute(placements=parameter.placements)
                parameter.grad = whole


class ShardReducer(Reducer):
    """Reduce-scatters gradients during backward passes.

    Args:
        module: the root of what ``fully_shard`` was called for.
        world: the joined processes.
        strategy: as the user calls it.
        every: whether each micro-batch's are, and not those of all together in the last one.
        keeps: whether parameters stay gathered from forward to backward.
    """

    # FSDP may have them; and a DTensor does not tell of all changes.
    hides_gradients = True
    calls_hooks = False

    module: FSDPModule  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        module: nn.Module,
        world: World,
        strategy: str = "fsdp",
        *,
        every: bool = True,
        keeps: bool = False,
    ) -> None:
        super().__init__(module, world)
        self.strategy, self._every, self._keeps = strategy, every, keeps
        self._parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
        self._groups = [group for part in self._parts for group in sharded_groups(part)]
        named = module.named_parameters()
        # Of experts a rank has its own, and perhaps no sample for them.
        summed = {name: p for name, p in named if not _is_of_experts(p)}
        self.trail = self._trail = Trail(strategy, world, summed)
        self._undo = see_calls(module, strategy, self._trail)
        if keeps:
            self._undo += let_go_without_backward(module)

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        self.module.set_requires_gradient_sync(last or self._every)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)

    def finish(self) -> None:
        refuse_unreduced(self._groups, self.strategy)
        self._trail.look()
        if self._keeps:
            # By a forward pass after the last backward pass: the optimizer makes it old.
            for part in self._parts:
                part.reshard()

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()

    def discard(self) -> None:
        # Those that were not reduced are inside FSDP.
        discard_gradients(self.module, self.strategy)
        self._trail.clear()
        super().discard()

    def probing(self) -> AbstractContextManager[None]:
        return recovering(self.module, self.strategy)


def let_go_without_backward(module: nn.Module) -> list[Callable[[], None]]:
    """Leave no gathered parameter after a pass that no backward pass follows.

    A change of it would be one of a copy; and one of the shard, the next pass would not see.

    Returns:
        What takes that back.
    """
    depth = 0

    def enter(module: nn.Module, args: Any) -> None:
        nonlocal depth
        depth += 1

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal depth
        depth -= 1
        if not depth and not any(tensor.requires_grad for tensor in tensors_of(output)):
            reshard(module)

    before: Any = torch.compiler.disable(enter)
    after: Any = torch.compiler.disable(leave)
    return [
        module.register_forward_pre_hook(before, prepend=True).remove,
        module.register_forward_hook(after, always_call=True).remove,
    ]


def reshard(module: Any) -> None:
    """Let go of what FSDP has gathered, which it does by itself where it was told to."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def is_copy(parameter: nn.Parameter) -> bool:
    """Whether it is a copy, as a forward pass has it. What is changed of a shard stays changed."""
    if not isinstance(parameter, DTensor):
        return True
    # Of a layer that other ranks divide it is still a part.
    return parameter.device_mesh.mesh_dim_names in {("tp",), ("ep",)}


def _is_of_experts(parameter: nn.Parameter) -> bool:
    axes = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
    return not {"ep", "efsdp"}.isdisjoint(axes or ())


def is_divided(parameter: nn.Parameter) -> bool:
    """Whether ranks have different parts of it."""
    return isinstance(parameter, DTensor) and any(p.is_shard() for p in parameter.placements)


def units_of(module: nn.Module, options: ShardingOptions) -> list[nn.Module]:
    name = options.strategy
    if not has_forward(module):
        raise ConfigError(
            f"{name}: the model is a {type(module).__name__}, which has no forward, and FSDP "
            "gathers parameters when forward is called. Hold it in a module whose forward calls "
            "its parts."
        )
    minimum, wrap = options.wrap_min_params, options.wrap
    if minimum is not None:
        return _large_modules(module, minimum)
    if wrap == "auto":
        return repeated_blocks(module)
    if wrap == "none":
        return []
    assert not isinstance(wrap, str)
    return modules_of_classes(module, wrap, f"{name}: wrap")


def _mixed_precision(
    spec: EngineSpec, options: ShardingOptions, *, root: bool
) -> MixedPrecisionPolicy:
    if spec.precision == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        # A dtype, fp32 too, would also cast what goes into each unit.
        param_dtype=COMPUTE_DTYPES[spec.precision] if options.param_dtype == "compute" else None,
        reduce_dtype=COMPUTE_DTYPES[options.reduce_dtype],
        # Blocks hand activations on in the compute dtype; only the loss wants fp32.
        output_dtype=torch.float32 if root else None,
    )


def _offload(device: torch.device, options: ShardingOptions) -> OffloadPolicy:
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


def refuse_apart(
    strategy: str, ties: Mapping[str, str], module: nn.Module, units: Sequence[nn.Module]
) -> None:
    """Refuse parameters that are one, and stand in several units.

    Args:
        strategy: as the user calls it.
        ties: the first name of each parameter, by each of its names.
        module: the model.
        units: what is gathered by itself within it.
    """
    known = set(units)
    for name, first in ties.items():
        if _unit_of(name, module, known) is not _unit_of(first, module, known):
            raise _two_of_one(strategy, first, name)


def refuse_untied(strategy: str, before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Refuse parameters that were one, and of which a user's own division has made several."""
    for name, first in before.items():
        if after[name] != after[first]:
            raise _two_of_one(strategy, first, name)


def _unit_of(name: str, module: nn.Module, units: Container[nn.Module]) -> nn.Module:
    """The innermost unit that holds a parameter by one of its names."""
    holder, _, _ = name.rpartition(".")
    while holder:
        part = module.get_submodule(holder)
        if part in units:
            return part
        holder, _, _ = holder.rpartition(".")
    return module


def _two_of_one(strategy: str, first: str, name: str) -> ConfigError:
    return ConfigError(
        f"{strategy}: '{first}' and '{name}' are one parameter of the model, and stand in "
        "modules that are sharded each by itself, which would make two of it. Let one unit "
        "hold both: name a class that does by wrap=[…], or use wrap=none."
    )


def _prefetch(units: Sequence[nn.Module], ahead: int) -> None:
    if not ahead:
        return
    blocks: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + ahead])
        block.set_modules_to_backward_prefetch(blocks[max(0, index - ahead) : index][::-1])
