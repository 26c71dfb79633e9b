"""The training step of ZeRO-1 and ZeRO-2."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from unipar.engine import group_names
from unipar.errors import ConfigError, first_few
from unipar.state import EngineState, LocalState, StateSource, named_weights
from unipar_colossalai import parts
from unipar_colossalai.checks import check_optimizer, check_parameters
from unipar_colossalai.engine import BoosterEngine, Start
from unipar_colossalai.parts import Part


class ZeROEngine(BoosterEngine):
    """Each rank updates its part of every parameter, in fp32, and ranks exchange the parts.

    Half precision is autocast's. Colossal-AI's own would round the weights too, and keep their
    fp32 originals out of its checkpoints.
    """

    def __init__(self, start: Start) -> None:
        module = start.module
        self._partial = start.booster.plugin.stage == 2
        self._reduces_now = True
        self._without: set[nn.Parameter] = set()
        check_parameters(module)
        start.send_weights()
        for parameter in module.parameters():
            parameter.data = parameter.data.contiguous()
        super().__init__(start)
        zero = self.framework_optimizer
        if zero is None:
            return
        # Backward passes of other engines may go through this model; its hooks reduce in its own.
        zero.require_grad_sync = False
        self._trained = [p for p in self._all_parameters if p.requires_grad]
        self._undo.extend(
            p.register_post_accumulate_grad_hook(self._without.discard).remove
            for p in self._trained
        )
        self._undo.append(self._release)
        # What is clipped, unscaled and stepped is this rank's part of each parameter.
        self._parameters = [p for group in zero.param_groups for p in group["params"]]
        if self._scaler is not None:
            self._scaler = ShardedGradScaler(self._device.type, process_group=None)

    def _boost(self, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is not None:
            check_optimizer(self.module, optimizer)
            # Before its groups hold parts of parameters.
            self._groups = group_names(self.module, optimizer)
        super()._boost(optimizer)

    def _release(self) -> None:
        for handle in self.framework_optimizer.grad_handles:
            handle.remove()

    # -- gradients -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _microbatch(self, last: bool) -> Iterator[None]:
        # ZeRO-2 keeps no whole gradient, so that it reduces each micro-batch's.
        self._reduces_now = last or self._partial
        try:
            yield
        finally:
            self._reduces_now = True

    def _backward(self, loss: torch.Tensor) -> None:
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        # Its own `backward` would reduce at once, with no moment to look at what there is.
        zero = self.framework_optimizer
        self._without.update(self._trained)
        if self._reduces_now and self._partial:
            # Its hooks fill buckets in the pass, and reduce those that are full.
            with self._synchronizing():
                loss.backward()
                self._check_all_have_gradients()
                zero._reduce_grad(self._partial)
            return
        with zero.no_sync():
            self.booster.backward(loss, zero)
        if self._reduces_now:
            self._check_all_have_gradients()
            zero._reduce_grad(self._partial)

    @property
    def _gradients_elsewhere(self) -> bool:
        return True

    @contextlib.contextmanager
    def _synchronizing(self) -> Iterator[None]:
        zero = self.framework_optimizer
        zero.require_grad_sync = True
        try:
            yield
        finally:
            zero.require_grad_sync = False

    def _check_all_have_gradients(self) -> None:
        """Colossal-AI pairs ranks' buckets by their order: one gradient less, and all are wrong."""
        if not self._without:
            return
        names = [name for name, p in self.module.named_parameters() if p in self._without]
        raise ConfigError(
            f"colossalai: the loss does not depend on {len(names)} of the parameters to train: "
            f"{first_few(names, 8)}. ZeRO needs a gradient of "
            "each in every backward pass. Freeze them with requires_grad_(False), or use "
            "plugin='ddp' with find_unused_parameters=true."
        )

    def _finish_gradients(self) -> None:
        zero = self.framework_optimizer
        for master in self._parameters:
            working = zero.master_to_working_param[id(master)]
            # The tensor that `zero.step()` will take: what is done to it here, is done there.
            master.grad = zero.get_working_grad_by_param_id(id(working))
        # Colossal-AI can only average.
        self._scale_gradients(self.world.size)

    def _drop_gradients(self) -> None:
        super()._drop_gradients()
        zero = self.framework_optimizer
        if zero is not None:
            zero.zero_grad()
            for master in self._parameters:
                master.grad = None

    def _gradient_norm(self, max_norm: float) -> float:
        grads = [p.grad for p in self._parameters if p.grad is not None]
        squared = nn.utils.get_total_norm(grads).square()
        dist.all_reduce(squared)
        norm = squared.sqrt()
        if not math.isinf(max_norm):
            nn.utils.clip_grads_with_norm_(self._parameters, max_norm, norm)
        return norm.item()

    def _step_optimizer(self, optimizer: Any) -> bool:
        self._take_over_weights()
        with self._synchronizing():
            return super()._step_optimizer(optimizer)

    def _take_over_weights(self) -> None:
        """Have what was done to weights by hand since the last step, such as clamping them.

        Else they would be what this rank's fp32 parts say, which are equal if nothing was done.
        """
        zero = self.framework_optimizer
        own, given = [], []
        for master in self._parameters:
            working = zero.master_to_working_param[id(master)].detach().view(-1)
            if master.device == working.device:
                share = working[self.world.rank * master.numel() :][: master.numel()]
                own.append(master.detach()[: share.numel()])
                given.append(share)
        if own:
            torch._foreach_copy_(own, given)  # pyright: ignore[reportPrivateImportUsage]

    # -- state -----------------------------------------------------------------------------------

    def export_state(self) -> EngineState:
        if self.framework_optimizer is None:
            return super().export_state()
        self._sync_buffers()
        weights, aliases = named_weights(self.module)
        exported = EngineState(
            [LocalState.of(*named) for named in weights.items()], aliases=aliases
        )
        parts.export_optimizer(
            exported,
            self._parts(),
            self.framework_optimizer.optim,
            self._groups,
            self.lr_scheduler,
            self.world,
        )
        return self._with_counters(exported)

    def import_state(self, source: StateSource, *, optimizer: bool = True) -> None:
        zero = self.framework_optimizer
        if zero is None:
            super().import_state(source, optimizer=optimizer)
            return
        weights, _ = named_weights(self.module)
        source.fill_weights([LocalState.of(*named) for named in weights.items()])
        with torch.no_grad():
            zero.update_master_params(self.module)
        if optimizer:
            held = list(self._parts())
            trained = [part.name for _, part in held]
            parts.import_optimizer(
                source, held, trained, zero.optim, self._groups, self.lr_scheduler
            )
            self._restore_counters(source)

    def _parts(self) -> Iterator[tuple[torch.Tensor, Part]]:
        """What this rank's optimizer holds of each trained parameter: one of equal parts."""
        masters = self.framework_optimizer.get_working_to_master_map()
        for name, parameter in self.module.named_parameters():
            if id(parameter) in masters:
                master = masters[id(parameter)]
                start = min(self.world.rank * master.numel(), parameter.numel())
                yield master, Part(name, tuple(parameter.shape), start, master)
