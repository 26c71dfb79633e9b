"""A model cut into stages, each trained where it is, over the ranks along ``pp``.

Layers of a stage may be divided over ``tp``, and its parameters over the ranks on other samples,
which have the same stage: in this order, as they are where there are no stages.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unipar.combined import optimizers_in
from unipar.engine import (
    COMPUTE_DTYPES,
    AsDTensors,
    ByTensor,
    Division,
    OptimizerStepper,
    PrecisionPolicy,
    Reducer,
    Stages,
    StepEngine,
    Undo,
    broadcast_tensors,
    checkpoint_activations,
    refuse_parameter_hooks,
    refuse_shared_memory,
    sparse_parameters,
    with_divisible_optimizer,
    with_same_choice,
)
from unipar.engine.broadcast import in_pieces
from unipar.engine.sharded import total_norm_of_shards
from unipar.errors import ConfigError
from unipar.optimizers.fused import fused_by_default
from unipar.state import LocalState, is_dtensor
from unipar.strategy import EngineSpec
from unipar.world import World
from unipar_torch import stage_sharding
from unipar_torch.from_host import give_notes, host_model, notes_on, take_values
from unipar_torch.sharding import Divide
from unipar_torch.stage_absent import absent_listed
from unipar_torch.stage_modules import Stage, local_part
from unipar_torch.stage_orders import STYLES
from unipar_torch.stage_plan import StagePlan, rank_of_stage
from unipar_torch.stage_schedule import StageSchedule
from unipar_torch.stage_state import StagesState, Whole

if TYPE_CHECKING:
    from unipar.strategy import InitialValues
    from unipar_torch.mesh_options import MeshOptions

_PIECE_BYTES = 2**26


def prepare(
    spec: EngineSpec,
    world: World,
    options: MeshOptions,
    plan: StagePlan,
    divide: Divide | None = None,
) -> StepEngine:
    """Cut a model, then build the optimizer of this rank's stages. Collective.

    Args:
        spec: what the user asked for.
        world: the joined processes.
        options: of the strategy.
        plan: where the model is cut.
        divide: divides the layers of a stage, on the meta device too.
    """
    module, weights = host_model(spec, world, "mesh")
    refuse_parameter_hooks(module, "mesh")
    refuse_shared_memory(module, "mesh")
    spec = with_same_choice(spec, module, "mesh")
    take_values(module, "mesh")
    whole, notes = Whole.of(module), notes_on(module)
    sharded = world.layout.batch > 1
    casts = None
    if sharded and options.param_dtype == "compute" and spec.precision != "fp32":
        # FSDP does as it gathers them, and there is no autocast.
        casts = COMPUTE_DTYPES[spec.precision]
    stages = _stages_of(module, plan, world, options, casts)
    undo: list[Undo] = []
    for stage in stages:
        if divide is not None:
            undo += divide(stage.module)
        undo.append(checkpoint_activations(stage.module, spec.activation_checkpointing))
        if sharded:
            undo += stage_sharding.shard_stage(stage, spec, world, options)
    held = Stages(_one_of_each([stage.module for stage in stages], world.device))
    _give_values(held, whole, weights, world)
    for stage in stages:
        undo += stage.install()
        if sharded:
            undo += stage_sharding.watch_weights(stage)
    ties = Ties(held, whole, plan, options, world)
    named = _name_all(held, whole, world)
    give_notes(named, notes)
    # A function may take them from the model.
    with absent_listed((stage.absent for stage in stages), dict(named)):
        optimizer = _build_optimizer(spec, held, named, world)
    state = StagesState(held, optimizer, whole, _owned(plan, stages), world)
    if optimizer is not None:
        state.name_groups({id(parameter): name for name, parameter in named})
        _only_held(optimizer, held)
    scaler = StageScaler(world) if spec.precision == "fp16" else None
    precision = PrecisionPolicy(spec.precision, world.device, autocast=casts is None, scaler=scaler)
    # A stage without the loss has none to scale, and unscales its gradients all the same.
    precision.scale(torch.zeros((), device=world.device))
    stepper = None
    if optimizer is not None:
        norm = StageNorm(ties.counted_here(held), world)
        stepper = OptimizerStepper(optimizer, precision, held.parameters(), norm)
    reducer, schedule = (
        StageReducer(held, world, ties),
        StageSchedule(stages, options.schedule, world),
    )
    if sharded:
        reducer = ShardedStageReducer(held, world, ties, stages)
        every = options.reduce_scatter_every_microbatch
        schedule.before_backward = functools.partial(stage_sharding.reduce_in, every)
    return StepEngine(
        spec,
        world,
        held,
        optimizer,
        reducer=reducer,
        precision=precision,
        stepper=stepper,
        state=state,
        schedule=schedule,
        undo=undo,
    )


def _stages_of(
    module: nn.Module,
    plan: StagePlan,
    world: World,
    options: MeshOptions,
    casts: torch.dtype | None,
) -> list[Stage]:
    """This rank's stages, on the meta device."""
    ranks = _ranks(plan, world, options)
    own = world.layout.coordinate("pp", world.rank)
    numbers = [stage for stage, rank in enumerate(ranks) if rank == own]
    copies = [module, *(copy.deepcopy(module) for _ in numbers[1:])]
    return [
        Stage(one, plan, number, world.device, casts)
        for one, number in zip(copies, numbers, strict=True)
    ]


def _ranks(plan: StagePlan, world: World, options: MeshOptions) -> list[int]:
    style = STYLES.get(options.schedule, "loop")
    return rank_of_stage(plan.num_stages, world.layout.pp, style)


def _owned(plan: StagePlan, stages: Iterable[Stage]) -> frozenset[str]:
    """The names of the tensors that this rank writes into checkpoints."""
    return frozenset(name for stage in stages for name in plan.owners if stage.owns(name))


def _one_of_each(modules: Sequence[nn.Module], device: torch.device) -> Sequence[nn.Module]:
    """The same stages, with memory, in which tensors of one name, and tied ones, are one."""
    made: dict[str, torch.Tensor] = {}
    for module in modules:
        by_id: dict[int, str] = {}
        first = {name: by_id.setdefault(id(old), name) for name, old in _named(module)}
        if any(map(is_dtensor, module.parameters())):
            # FSDP has them in its books, and is told of this.
            module.to_empty(device=device)
        for name, old in list(_named(module)):
            known = first[name]
            if is_dtensor(old):
                if made.setdefault(known, old) is old:
                    continue
                if isinstance(module, FSDPModule):
                    raise ConfigError(
                        f"mesh: '{known}' is on two stages of one rank, and each stage is sharded "
                        "by itself, which would make two of it. Name it on stages of different "
                        "ranks by stages=[[…], […]], or set schedule='1f1b', which has one stage "
                        "on each rank."
                    )
            if known not in made:
                new = torch.empty_like(old, device=device)
                if isinstance(old, nn.Parameter):
                    new = nn.Parameter(new, old.requires_grad)
                    vars(new).update(vars(old))
                made[known] = new
            _set(module, name, made[known])
    return modules


def _named(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _set(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner, _, own = name.rpartition(".")
    setattr(module.get_submodule(owner), own, tensor)


def _give_values(
    held: nn.Module, whole: Whole, weights: dict[str, torch.Tensor] | InitialValues, world: World
) -> None:
    """Fill what this rank holds with rank 0's values, or its own. Collective."""
    targets = dict(_named(held))
    if not isinstance(weights, dict):
        weights.fill(targets, world)
        return
    tensors = {**whole.parameters, **whole.buffers}
    if world.is_main:
        differing = [n for n, t in tensors.items() if weights[n].shape != t.shape]
        if differing:
            raise ConfigError(
                "the model function has built another model on the host than on the meta device: "
                f"{differing[0]} differs in shape. Let it build the same each time, or pass the "
                "module itself."
            )
    names = {id(t): name for name, t in tensors.items()}
    for piece in in_pieces(tensors.values(), _PIECE_BYTES):
        values = [
            weights.pop(names[id(t)]).cpu()
            if world.is_main
            else torch.empty(t.shape, dtype=t.dtype, device="cpu")
            for t in piece
        ]
        broadcast_tensors(values, world)
        for tensor, value in zip(piece, values, strict=True):
            if names[id(tensor)] in targets:
                LocalState.of("", targets[names[id(tensor)]]).take(value)
    weights.clear()


# -- what is stepped by ----------------------------------------------------------------------------


def _name_all(held: nn.Module, whole: Whole, world: World) -> list[tuple[str, nn.Parameter]]:
    """The parameters of the whole model; for those of other stages, some that take no memory."""
    own = dict(held.named_parameters(remove_duplicate=False))
    mesh = next((p.device_mesh for p in own.values() if is_dtensor(p)), None)
    named: list[tuple[str, nn.Parameter]] = []
    for name, parameter in whole.parameters.items():
        found = own.get(name)
        if found is None:
            number = torch.zeros((), dtype=parameter.dtype, device=world.device)
            found = number.expand(parameter.shape)
            if mesh is not None:
                # Optimizers are built over tensors of one kind.
                found = DTensor.from_local(found, mesh, run_check=False)
            found = nn.Parameter(found, parameter.requires_grad)
        named.append((name, found))
    return named


def _build_optimizer(
    spec: EngineSpec, held: nn.Module, named: Iterable[tuple[str, nn.Parameter]], world: World
) -> Optimizer | None:
    """The user's optimizer over the whole model, so that its groups are the same on every rank."""
    if spec.optimizer is None:
        return None
    layout = world.layout
    divisions: list[Division] = [ByTensor()]
    if layout.size > layout.pp:
        divisions.append(AsDTensors())
    spec = with_divisible_optimizer(spec, "mesh", world, *divisions)
    assert spec.optimizer is not None
    with fused_by_default(sparse_parameters(held)):
        return spec.optimizer(named)


def _only_held(optimizer: Optimizer, held: nn.Module) -> None:
    """Leave the optimizer what this rank has; groups may then be empty."""
    own = {id(parameter) for parameter in held.parameters()}
    groups = {
        id(group): group
        for one in (optimizer, *optimizers_in(optimizer).values())
        for group in one.param_groups
    }
    for group in groups.values():
        kept = [number for number, p in enumerate(group["params"]) if id(p) in own]
        for key in {"params", "param_names"} & group.keys():
            group[key] = [group[key][number] for number in kept]
    for one in (optimizer, *optimizers_in(optimizer).values()):
        for parameter in [p for p in one.state if id(p) not in own]:
            del one.state[parameter]


class Ties:
    """Parameters that stages on two ranks both have, and keep equal.

    Args:
        held: this rank's stages.
        whole: the model.
        plan: where it is cut.
        options: of the strategy.
        world: the joined processes.

    Raises:
        ConfigError: more than two ranks have one.
    """

    def __init__(
        self, held: nn.Module, whole: Whole, plan: StagePlan, options: MeshOptions, world: World
    ) -> None:
        ranks = _ranks(plan, world, options)
        own = world.layout.coordinate("pp", world.rank)
        self._group = world.mesh("pp").get_group()
        self._pairs: list[tuple[nn.Parameter, int]] = []
        self._elsewhere: set[int] = set()
        parameters = dict(held.named_parameters(remove_duplicate=False))
        for name in whole.parameters:
            owners = sorted({ranks[stage] for stage in plan.owners[name]})
            if len(owners) > 2:
                raise ConfigError(
                    f"mesh: parameter '{name}' is needed on {len(owners)} ranks along pp, and pp "
                    "keeps a tied parameter equal on two. Cut the model so that it is on two by "
                    "stages=[[…], […]], or use dp_shard, which divides any model."
                )
            if len(owners) < 2 or own not in owners:
                continue
            parameter = parameters[name]
            (other,) = set(owners) - {own}
            peer = dist.get_global_rank(self._group, other)
            self._pairs.append((parameter, peer))
            if own != owners[-1]:
                self._elsewhere.add(id(parameter))

    def counted_here(self, held: nn.Module) -> list[nn.Parameter]:
        """The parameters whose gradients this rank adds to the norm."""
        return [p for p in held.parameters() if id(p) not in self._elsewhere]

    def sum(self) -> None:
        """Add up the gradients of both. Collective."""
        pairs = [(p, peer) for p, peer in self._pairs if p.requires_grad]
        if not pairs:
            return
        transfers: list[dist.P2POp] = []
        received: list[tuple[torch.Tensor, torch.Tensor, bool]] = []
        for parameter, peer in pairs:
            used = parameter.grad is not None
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            own = local_part(parameter.grad).contiguous()
            there = torch.full((1,), int(used), dtype=torch.int32, device=own.device)
            others = torch.empty_like(own), torch.empty_like(there)
            received.append((*others, used))
            for sent, other in zip((own, there), others, strict=True):
                transfers += [
                    dist.P2POp(dist.isend, sent, peer, self._group),
                    dist.P2POp(dist.irecv, other, peer, self._group),
                ]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
        for (parameter, _), (other, there, used) in zip(pairs, received, strict=True):
            assert parameter.grad is not None
            local_part(parameter.grad).add_(other)
            # Optimizers leave out what has no gradient, and decay what has one of zeros. Only a
            # rank that has none needs to wait for the other's word.
            if not used and not there.item():
                parameter.grad = None


class StageReducer(Reducer):
    """Sums the gradients of tied parameters; those of others are of one stage.

    Args:
        held: this rank's stages.
        world: the joined processes.
        ties: what stages on two ranks both have.
    """

    calls_hooks = False

    def __init__(self, held: Stages, world: World, ties: Ties) -> None:
        super().__init__(held, world)
        self._ties = ties

    def finish(self) -> None:
        self._ties.sum()

    def probing(self) -> NoReturn:
        raise ConfigError(
            "mesh: micro_batch_size='auto' and shares='auto' try passes, and with pp a rank that "
            "runs out of memory would leave the others waiting for its stages. Give numbers."
        )

    def share_buffers(self, buffers: Iterable[torch.Tensor] | None = None) -> None:
        """Give ranks that have the same stages the buffers of the first of them."""
        shared = [*(self.module.buffers() if buffers is None else buffers)]
        layout = self.world.layout
        for axis in ("fsdp", "dp_replicate", "tp"):
            if getattr(layout, axis) > 1:
                group = self.world.mesh(axis).get_group()
                broadcast_tensors(shared, self.world, group)


class ShardedStageReducer(StageReducer):
    """Also reduces among the ranks that have the same stages, during backward passes.

    Args:
        held: this rank's stages.
        world: the joined processes.
        ties: what stages on two ranks both have.
        stages: this rank's, each divided by FSDP.
    """

    # As where FSDP divides a model that is not cut.
    hides_gradients = True

    def __init__(self, held: Stages, world: World, ties: Ties, stages: Sequence[Stage]) -> None:
        super().__init__(held, world, ties)
        self._stages = stages

    def discard(self) -> None:
        stage_sharding.discard(self._stages)
        super().discard()


class StageNorm:
    """2-norm of the whole gradient, each tied parameter counted once. Collective.

    Args:
        counted: the parameters whose gradients count on this rank.
        world: the joined processes.
    """

    def __init__(self, counted: Sequence[nn.Parameter], world: World) -> None:
        self._counted, self._device = counted, world.device
        self._group = world.mesh("pp").get_group()

    def __call__(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        own = [p.grad for p in self._counted if p.grad is not None]
        squared = torch.zeros((), dtype=torch.float64, device=self._device)
        if own:
            squared += total_norm_of_shards(own).double().square()
        dist.all_reduce(squared, group=self._group)
        return squared.sqrt().float()


class StageScaler(GradScaler):
    """Lets all ranks know of an overflow that one of them has seen.

    Torch's looks at this process's gradients (torch 2.13, amp/grad_scaler.py, unscale_).

    Args:
        world: the joined processes.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world.device.type)
        self._on = world.device

    def unscale_(self, optimizer: Optimizer) -> None:
        super().unscale_(optimizer)
        seen = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        # Where all parameters of a stage are frozen, there are no gradients to see it in.
        found = seen.setdefault(self._on, torch.zeros((), device=self._on))
        dist.all_reduce(found, dist.ReduceOp.MAX)
