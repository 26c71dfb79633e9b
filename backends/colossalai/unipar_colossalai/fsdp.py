"""The training step of the FSDP plugin, and its state in canonical form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp.wrap import CustomPolicy

from unipar.batch import MicroBatch
from unipar.engine import (
    modules_of_classes,
    refuse_inner_gradients,
    refuse_parameter_hooks,
    repeated_blocks,
)
from unipar.errors import ConfigError, first_few
from unipar.loss import Loss, LossFn
from unipar.state import EngineState, LocalState, StateSource, named_weights
from unipar_colossalai import parts
from unipar_colossalai.checks import check_no_scalar, check_optimizer, check_parameters
from unipar_colossalai.engine import BoosterEngine, Start
from unipar_colossalai.framework import quiet
from unipar_colossalai.parts import Part
from unipar_colossalai.scaling import PartScaler, clip_parts
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


class FSDPEngine(BoosterEngine):
    """Gradients are reduce-scattered in each backward pass, and each rank updates its part.

    The plugin would build the optimizer anew over one parameter group, and clip by the norm of a
    rank's own part. The optimizer stays as the user built it, over parameters that have become
    parts, and clipping takes the norm of the whole gradient.
    """

    def __init__(self, start: Start) -> None:
        module = start.module
        self._groups: list[tuple[str, ...]] = []
        check_parameters(module)
        check_no_scalar(module)
        refuse_parameter_hooks(module, "colossalai")
        start.send_weights()
        self._shapes = {name: (p, tuple(p.shape)) for name, p in module.named_parameters()}
        named, self._aliases = named_weights(module)
        self._buffers = named.keys() - self._shapes.keys()
        super().__init__(start)
        self._model = Divided(module, self.wrapper)
        self._undo.append(self._guard())
        self._undo.append(refuse_inner_gradients(module, "colossalai"))
        self._trained = {id(p): n for n, (p, _) in self._shapes.items() if p.requires_grad}
        self._without: set[int] = set()
        for unit, handle in self._handles():
            watch = partial(self._watch, handle)
            self._undo.append(unit.module.register_forward_pre_hook(watch).remove)
        if self._scaler is not None:
            self._scaler = PartScaler(self._device.type, process_group=None)

    @property
    def _holds_forwards(self) -> bool:
        # FSDP1 frees a unit's parameters after its first backward pass, which other graphs still
        # hold views of (torch 2.13, distributed/fsdp/_runtime_utils.py, _post_backward_hook).
        return False

    def _boost(self, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is not None:
            check_optimizer(self.module, optimizer)
            names = {id(p): name for name, (p, _) in self._shapes.items()}
            self._groups = [
                tuple(names[id(p)] for p in group["params"]) for group in optimizer.param_groups
            ]
        plugin = self.booster.plugin
        # Without it, parameters would be one flat tensor, and have no groups.
        plugin.fsdp_kwargs["use_orig_params"] = True
        with quiet():
            self.wrapper, *_ = self.booster.boost(self.module)
        # Without a hook FSDP1 averages.
        self.wrapper.module.register_comm_hook(None, _sum)
        if optimizer is not None:
            from colossalai.booster.plugin.torch_fsdp_plugin import (  # pyright: ignore
                FSDPOptimizerWrapper,
            )

            self.framework_optimizer = FSDPOptimizerWrapper(optimizer, self.wrapper)
            self._divide_state(optimizer)

    def _divide_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Of what the optimizer has made when it was built, as Adagrad does, keep this rank's."""
        for parameter, part in self._parts():
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if part.shape and torch.is_tensor(value) and tuple(value.shape) == part.shape:
                    own = value.flatten()[part.start : part.start + part.held.numel()]
                    state[key] = own.view(part.held.shape).clone()

    def _require_optimizer(self) -> Any:
        super()._require_optimizer()
        return self.optimizer

    def _guard(self) -> Callable[[], None]:
        """Refuse a call of the module itself, whose weights are not there."""
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

        self.wrapper.register_forward_pre_hook(enter)
        self.wrapper.register_forward_hook(leave, always_call=True)
        return self.module.register_forward_pre_hook(check).remove

    def _loss(
        self, model: nn.Module, microbatch: MicroBatch, loss_fn: LossFn, *, training: bool
    ) -> Loss:
        # The module alone has no weights to evaluate with.
        return super()._loss(self._model, microbatch, loss_fn, training=training)

    def _handles(self) -> Iterator[tuple[FullyShardedDataParallel, Any]]:
        for unit in FullyShardedDataParallel.fsdp_modules(self.wrapper):
            if unit._handle is not None:
                yield unit, unit._handle

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

    def _backward(self, loss: torch.Tensor) -> None:
        self._without = set(self._trained)
        super()._backward(loss)
        without = [self._trained[p] for p in self._trained if p in self._without]
        if without:
            raise ConfigError(
                f"colossalai: the loss does not depend on {len(without)} of the parameters to "
                f"train: {first_few(without, 8)}. The FSDP "
                "plugin would update them all the same. Freeze them with requires_grad_(False), or "
                "use strategy='fsdp'."
            )

    def _gradient_norm(self, max_norm: float) -> float:
        return clip_parts(self._parameters, max_norm)

    # -- state -----------------------------------------------------------------------------------

    def _parts(self) -> Iterator[tuple[nn.Parameter, Part]]:
        """What this rank holds of each parameter, in the same order on every rank."""
        starts: dict[int, int] = {}
        for _, handle in self._handles():
            flat = handle.flat_param
            if not handle.uses_sharded_strategy:
                continue
            for p, info in zip(flat._params, flat._shard_param_infos, strict=True):
                starts[id(p)] = info.intra_param_start_idx or 0
        for name, (p, shape) in self._shapes.items():
            yield p, Part(name, shape, starts.get(id(p), 0), p.detach())

    def _states(self) -> list[LocalState]:
        weights = [part.state(part.name, part.held) for _, part in self._parts()]
        buffers = {clean_tensor_name(name): b for name, b in self.module.named_buffers()}
        return weights + [LocalState.of(name, buffers[name]) for name in sorted(self._buffers)]

    def export_state(self) -> EngineState:
        self._sync_buffers()
        exported = EngineState(self._states(), aliases=self._aliases)
        if self.optimizer is not None:
            held = [(p, part) for p, part in self._parts() if p.numel()]
            parts.export_optimizer(
                exported, held, self.optimizer, self._groups, self.lr_scheduler, self.world
            )
        return self._with_counters(exported)

    def import_state(self, source: StateSource, *, optimizer: bool = True) -> None:
        source.fill_weights(self._states())
        if optimizer and self.optimizer is not None:
            held = [(p, part) for p, part in self._parts() if p.requires_grad and p.numel()]
            trained = [name for name, (p, _) in self._shapes.items() if p.requires_grad]
            parts.import_optimizer(
                source, held, trained, self.optimizer, self._groups, self.lr_scheduler
            )
            self._restore_counters(source)


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
