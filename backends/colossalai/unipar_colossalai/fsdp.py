"""FSDP1, as the plugin applies it: weights gathered unit by unit, and parts that ranks update.

The plugin would rebuild the optimizer over one parameter group, and clip by the norm of a rank's
own part. The optimizer stays as the user built it, over parameters that have become parts, and
clipping takes the norm of the whole gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp._common_utils import (
    FSDP_WRAPPED_MODULE,
    HandleTrainingState,
    TrainingState,
    clean_tensor_name,
)
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.optim import Optimizer

from unipar.engine import (
    OptimizerStepper,
    Reducer,
    build_optimizer,
    group_names,
    modules_of_classes,
    refuse_inner_gradients,
    refuse_parameter_hooks,
    repeated_blocks,
)
from unipar.errors import ConfigError, first_few
from unipar.state import LocalState, named_weights
from unipar.world import World
from unipar_colossalai.checks import check_no_scalar, check_optimizer, check_parameters
from unipar_colossalai.divided_state import Groups, Part, PartsState
from unipar_colossalai.engine import BoosterEngine, Start
from unipar_colossalai.scaling import part_precision, total_norm_of_parts
from unipar_colossalai.working import Divided

STRATEGIES = {
    "full": ShardingStrategy.FULL_SHARD,
    "grad_op": ShardingStrategy.SHARD_GRAD_OP,
}


def units(module: nn.Module, wrap: str | tuple[str, ...]) -> list[nn.Module]:
    """The submodules that are gathered by themselves.

    Raises:
        ConfigError: two of them share a weight, or share one with the rest of the model.
    """
    if wrap == "none":
        return []
    if isinstance(wrap, str):
        chosen = repeated_blocks(module)
    else:
        chosen = modules_of_classes(module, wrap, "colossalai: wrap")
    names = {id(p): name for name, p in module.named_parameters(remove_duplicate=False)}
    for number, unit in enumerate(chosen):
        own = {id(p) for p in unit.parameters()}
        inside = {id(part) for part in unit.modules()}
        outside = {
            id(p)
            for part in module.modules()
            if id(part) not in inside
            for p in part.parameters(recurse=False)
        }
        shared = own & outside
        if shared:
            raise ConfigError(
                f"colossalai: '{names[shared.pop()]}' is a weight of unit {number} "
                f"({type(unit).__name__}) and of another part of the model, and FSDP gathers each "
                "by itself. Set wrap='none', or wrap modules that share none."
            )
    return chosen


def prepare(start: Start) -> BoosterEngine:
    """Divide weights, gradients and optimizer among ranks, unit by unit."""
    spec, world, module = start.spec, start.world, start.module
    check_parameters(module)
    check_no_scalar(module)
    refuse_parameter_hooks(module, "colossalai")
    start.send_weights()
    optimizer = build_optimizer(spec, module)
    groups: Groups = []
    if optimizer is not None:
        check_optimizer(module, optimizer)
        groups = group_names(module, optimizer)
    whole = Whole(module)
    # Without it, parameters would be one flat tensor, and have no groups.
    start.booster.plugin.fsdp_kwargs["use_orig_params"] = True
    wrapper, _ = start.boost(None)
    # Without a hook FSDP1 averages.
    wrapper.module.register_comm_hook(None, _sum)
    state = FlatState(whole, wrapper, optimizer, groups, world)
    precision = part_precision(spec, world)
    framework_optimizer = stepper = None
    if optimizer is not None:
        from colossalai.booster.plugin.torch_fsdp_plugin import (  # pyright: ignore
            FSDPOptimizerWrapper,
        )

        framework_optimizer = FSDPOptimizerWrapper(optimizer, wrapper)
        state.divide_optimizer()
        stepper = OptimizerStepper(optimizer, precision, module.parameters(), total_norm_of_parts)
    # The module alone has no weights to evaluate with.
    model = InUnits(module, wrapper)
    return BoosterEngine(
        start,
        wrapper,
        optimizer,
        framework_optimizer,
        model=model,
        eval_model=model,
        reducer=FlatReducer(start, wrapper, framework_optimizer, whole),
        precision=precision,
        stepper=stepper,
        state=state,
        undo=[
            *start.undo,
            _guard_forward(module, wrapper),
            refuse_inner_gradients(module, "colossalai"),
        ],
    )


class InUnits(Divided):
    """Leaves out the wrappers that FSDP1 puts around units, which are inside the user's module."""

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """By the names that they have in the user's module."""
        for name, part in super().named_modules(*args, **kwargs):
            if not isinstance(part, FullyShardedDataParallel):
                own = [piece for piece in name.split(".") if piece != FSDP_WRAPPED_MODULE]
                yield ".".join(own), part


class Whole:
    """The user's model as it was before its weights were divided.

    Args:
        module: still whole.

    Attributes:
        module: the user's module.
        shapes: its parameters by name, and what their shapes were.
        buffers: the names of its buffers.
        aliases: other names of tied weights, and the names that they stand for.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.shapes = {name: (p, tuple(p.shape)) for name, p in module.named_parameters()}
        named, self.aliases = named_weights(module)
        self.buffers = named.keys() - self.shapes.keys()


def _handles(wrapper: nn.Module) -> Iterator[tuple[FullyShardedDataParallel, Any]]:
    for unit in FullyShardedDataParallel.fsdp_modules(wrapper):
        if unit._handle is not None:
            yield unit, unit._handle


def _guard_forward(module: nn.Module, wrapper: nn.Module) -> Callable[[], None]:
    """Refuse a call of the module itself, whose weights are not there; what takes it back."""
    inside = [0]

    def enter(module: nn.Module, args: Any) -> None:
        inside[0] += 1

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        inside[0] -= 1

    def check(module: nn.Module, args: Any) -> None:
        if not inside[0]:
            raise ConfigError(
                "engine.module was called, and FSDP has divided its weights among ranks. Call "
                "the engine, engine(...), which gathers them."
            )

    wrapper.register_forward_pre_hook(enter)
    wrapper.register_forward_hook(leave, always_call=True)
    return module.register_forward_pre_hook(check).remove


class FlatReducer(Reducer):
    """Reduce-scatters gradients in each backward pass.

    Args:
        start: what the engine is made from.
        wrapper: what Colossal-AI has made of the module.
        framework_optimizer: what it has made of the optimizer.
        whole: what the model was before.
    """

    # FSDP1 frees a unit's parameters after its first backward pass, which other graphs still hold
    # views of (torch 2.13, distributed/fsdp/_runtime_utils.py, _post_backward_hook).
    holds_forwards = False
    calls_hooks = False

    def __init__(self, start: Start, wrapper: Any, framework_optimizer: Any, whole: Whole) -> None:
        run_backward = partial(start.booster.backward, optimizer=framework_optimizer)
        super().__init__(start.module, start.world, run_backward)
        self.wrapper = wrapper
        self._interrupted = False
        self._trained = {id(p): n for n, (p, _) in whole.shapes.items() if p.requires_grad}
        self._without: set[int] = set()
        self._watches = [
            unit.module.register_forward_pre_hook(partial(self._watch, handle))
            for unit, handle in _handles(wrapper)
        ]

    def _watch(self, handle: Any, module: nn.Module, args: Any) -> None:
        """Notice which of the gathered weights get a gradient; FSDP makes up zeros for the others.

        A step of the optimizer would decay them, and move them by their momentum.
        """
        if not torch.is_grad_enabled():
            return
        flat = handle.flat_param
        for p, (name, owner, _) in zip(flat._params, flat._param_infos, strict=True):
            gathered = getattr(owner, name)
            if gathered.requires_grad and not gathered.is_leaf:
                gathered.register_hook(partial(self._saw, id(p)))

    def _saw(self, parameter: int, gradient: torch.Tensor) -> None:
        self._without.discard(parameter)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        if self._interrupted:
            raise ConfigError(
                "colossalai: an error has ended an earlier backward pass before its end, and "
                "plugin='fsdp' cannot begin another: FSDP is left in the middle of it. "
                "Start again from a checkpoint, or use strategy='fsdp'."
            )
        self._without, self._interrupted = set(self._trained), True
        super().backward(loss, last=last)
        self._interrupted = False
        without = [self._trained[p] for p in self._trained if p in self._without]
        if without:
            raise ConfigError(
                f"colossalai: the loss does not depend on {len(without)} of the parameters to "
                f"train: {first_few(without, 8)}. The FSDP "
                "plugin would update them all the same. Freeze them with requires_grad_(False), or "
                "use strategy='fsdp'."
            )

    def forget(self) -> None:
        """Let go of the weights that an interrupted forward pass has gathered.

        The next one would compute with them, and they would get no gradient (torch 2.13,
        distributed/fsdp/_runtime_utils.py: a unit that is gathered is not gathered again).
        """
        for unit in FullyShardedDataParallel.fsdp_modules(self.wrapper):
            handle = unit._handle
            if unit.training_state is TrainingState.FORWARD_BACKWARD:
                unit.training_state = TrainingState.IDLE
            if handle is not None and handle._training_state is HandleTrainingState.FORWARD:
                _reshard(unit, handle, handle.uses_sharded_strategy)
                handle._training_state = HandleTrainingState.IDLE

    def close(self) -> None:
        for handle in self._watches:
            handle.remove()


class FlatState(PartsState):
    """Parts of the flat tensors that FSDP1 makes of a unit's parameters.

    Args:
        whole: what the model was before.
        wrapper: what Colossal-AI has made of it.
        optimizer: the user's, if there is one.
        groups: the names of the parameters of each of its groups.
        world: the joined processes.
    """

    def __init__(
        self,
        whole: Whole,
        wrapper: nn.Module,
        optimizer: Optimizer | None,
        groups: Groups,
        world: World,
    ) -> None:
        super().__init__(optimizer, groups, whole.aliases, world)
        self.whole, self.wrapper = whole, wrapper

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for _, shape in self.whole.shapes.values())

    @property
    def trained(self) -> Collection[str]:
        return [name for name, (p, _) in self.whole.shapes.items() if p.requires_grad]

    def weights(self) -> list[LocalState]:
        weights = [part.state(part.name, part.held) for _, part in self._each()]
        buffers = {clean_tensor_name(name): b for name, b in self.whole.module.named_buffers()}
        return weights + [LocalState.of(name, buffers[name]) for name in sorted(self.whole.buffers)]

    def parts(self) -> Iterator[tuple[nn.Parameter, Part]]:
        return ((p, part) for p, part in self._each() if p.numel())

    def _each(self) -> Iterator[tuple[nn.Parameter, Part]]:
        """What this rank holds of each parameter, in the same order on every rank."""
        starts: dict[int, int] = {}
        for _, handle in _handles(self.wrapper):
            flat = handle.flat_param
            if not handle.uses_sharded_strategy:
                continue
            for p, info in zip(flat._params, flat._shard_param_infos, strict=True):
                starts[id(p)] = info.intra_param_start_idx or 0
        for name, (p, shape) in self.whole.shapes.items():
            yield p, Part(name, shape, starts.get(id(p), 0), p.detach())

    def divide_optimizer(self) -> None:
        """Of what the optimizer has made when it was built, as Adagrad does, keep this rank's."""
        assert self.optimizer is not None
        for parameter, part in self._each():
            state = self.optimizer.state.get(parameter, {})
            for key, value in state.items():
                if part.shape and torch.is_tensor(value) and tuple(value.shape) == part.shape:
                    own = value.flatten()[part.start : part.start + part.held.numel()]
                    state[key] = own.view(part.held.shape).clone()


def _sum(state: None, gradient: torch.Tensor, own: torch.Tensor | None = None) -> None:
    """The communication hook; ``own`` is this rank's part, which one rank alone has not."""
    if own is None:
        dist.all_reduce(gradient)
    else:
        dist.reduce_scatter_tensor(own, gradient)


def policy(chosen: list[nn.Module]) -> CustomPolicy:
    """Wrap these modules, and no others."""
    wanted = {id(unit) for unit in chosen}
    return CustomPolicy(lambda module: id(module) in wanted)
