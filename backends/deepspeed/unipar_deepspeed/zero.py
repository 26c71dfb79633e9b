"""The training step of ZeRO's stages 1 to 3: DeepSpeed reduces, clips and updates."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from unipar.batch import MicroBatch
from unipar.engine import backward_pass, refuse_changed_weights
from unipar.errors import ConfigError, first_few
from unipar.loss import Loss, LossFn, LossSum
from unipar.state import EngineState, StateSource
from unipar.strategy import StepResult
from unipar_deepspeed import state
from unipar_deepspeed.engine import DeepSpeedEngine
from unipar_deepspeed.layout import is_stage_3
from unipar_deepspeed.swapped import Swapping, align_gradients
from unipar_deepspeed.unused import refusal


class ZeROEngine(DeepSpeedEngine):
    """Gradients and the optimizer live in DeepSpeed's flat partitions.

    DeepSpeed divides gradients by its loss scale when it steps. That is 1 while gradients are
    made; for the step it carries the fp16 loss scale, the division that is known only when all
    items of the batch have been counted, and what takes back an average over ranks.

    Args:
        refuse_unused: whether to stop where no rank has used some parameter; further arguments are
            those of :class:`DeepSpeedEngine`.
    """

    def __init__(self, *args: Any, refuse_unused: bool, **kwargs: Any) -> None:
        self._refuse_unused = refuse_unused
        super().__init__(*args, **kwargs)
        named = self.module.named_parameters()
        self._frozen = {name: p for name, p in named if not p.requires_grad}
        self._places: dict[str, int] = {}
        self._calls = 0
        if self._deepspeed is not None and not is_stage_3(self._zero):
            self._places = self._find_places()
        elif self._deepspeed is not None:
            self._deepspeed.register_forward_pre_hook(self._saw_call)
            gathered = [m for m in self.module.modules() if [*m.parameters(recurse=False)]]
            self._undo.append(
                refuse_changed_weights(self.module, "zero3", gathered, between_passes=True)
            )

    @property
    def num_parameters(self) -> int:
        # Stage 3 leaves nothing of a parameter in the module but what it was.
        return sum(getattr(p, "ds_numel", p.numel()) for p in self.module.parameters())

    def _build_optimizer(self) -> Optimizer:
        optimizer = super()._build_optimizer()
        if self._zero.optimizer is not optimizer:
            # DeepSpeed 0.19.8 builds Adagrad once more, from its defaults alone, for its first
            # state (stage_1_and_2.py and stage3.py, `initialize_optimizer_states`): without the
            # user's groups, and with learning rates that no scheduler reaches.
            optimizer.state = self._zero.optimizer.state
            self._zero.optimizer = optimizer
            if not is_stage_3(self._zero):
                # What it has linked is the parameters of one group.
                self._zero._link_all_hp_params()
        return optimizer

    @property
    def _zero(self) -> Any:
        return self._deepspeed.optimizer

    @property
    def _holds_forwards(self) -> bool:
        # DeepSpeed 0.19.8 counts, for each module of stage 3, the backward passes of its last
        # forward pass alone (runtime/zero/parameter_offload.py), and loses gradients of others.
        return self._deepspeed is None or not is_stage_3(self._zero)

    @property
    def _gradients_elsewhere(self) -> bool:
        return True

    @functools.cached_property
    def _swapping(self) -> Swapping:
        align_gradients(self._zero)
        return Swapping(self._zero)

    def _backward(self, loss: torch.Tensor) -> None:
        self._swapping.settle()
        super()._backward(loss)

    def _update(self) -> StepResult:
        loss, count, divisor = self._finish_loss()
        self._check_frozen()
        self._check_used()
        self._clear()
        self.num_steps += 1
        if not math.isfinite(loss):
            self._discard()
            return self._not_finite("loss", loss, count)
        self._take_over_weights()
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        self._zero.loss_scale = scale * divisor / self._averaged_over
        try:
            self._deepspeed.step()
        finally:
            self._zero.loss_scale = 1.0
        overflow = bool(self._zero.overflow)
        if self._scaler is not None:
            _update_scale(self._scaler, overflow)
        elif overflow:
            return self._not_finite("gradient norm", loss, count)
        norm = None
        if self.spec.max_grad_norm is not None:
            norm = float(self._deepspeed.get_global_grad_norm())
        if not overflow:
            self._step_scheduler()
        return StepResult(loss, count, norm, skipped=overflow)

    def _find_places(self) -> dict[str, int]:
        return {name: p.data_ptr() for name, p in self.module.named_parameters()}

    def _saw_call(self, *_: Any) -> None:
        self._calls += 1

    def _loss(
        self, model: nn.Module, microbatch: MicroBatch, loss_fn: LossFn, *, training: bool
    ) -> Loss:
        calls = self._calls
        loss = super()._loss(model, microbatch, loss_fn, training=training)
        if training and is_stage_3(self._zero) and self._calls == calls:
            raise ConfigError(
                "the loss did not come from a call of the model that the loss function was given, "
                "model(…), but from its parts or from engine.module. Stage 3 of ZeRO loses "
                "gradients of what goes around that call. Call model(…), whose forward may do "
                "what its argument says."
            )
        return loss

    def _take_over_weights(self) -> None:
        """Have what was done to weights by hand since the last step, such as clamping them.

        Else they would be what this rank's fp32 share says, which is equal if nothing was done.
        Where the share is in host memory it would have to travel for that, and is left.
        """
        zero = self._zero
        if is_stage_3(zero):
            return
        places = self._find_places()
        if moved := [name for name, place in places.items() if place != self._places[name]]:
            self._discard()
            raise ConfigError(
                f"deepspeed: parameter.data of {first_few(moved)} was given another tensor. "
                "ZeRO has parameters in one buffer, which would not change. Change them in place: "
                "parameter.data.copy_(new)."
            )
        groups = zip(
            zero.single_partition_of_fp32_groups,
            zero.parallel_partitioned_bit16_groups,
            zero.real_dp_process_group,
            strict=True,
        )
        for share, whole, group in groups:
            weights = whole[dist.get_rank(group)]
            if share.device == weights.device:
                share.data.copy_(weights)

    def _check_frozen(self) -> None:
        """Refuse parameters that were thawed: ZeRO has no partitions for them."""
        thawed = [name for name, p in self._frozen.items() if p.requires_grad]
        if thawed:
            self._discard()
            raise ConfigError(
                f"deepspeed: {first_few(thawed)} was frozen "
                "when the model was prepared, and is not now: ZeRO would leave it as it is. "
                "Prepare the model again from a checkpoint, or use strategy='ddp' or 'horovod'."
            )

    def _check_used(self) -> None:
        if not self._refuse_unused:
            return
        assert self._unused is not None
        names = self._unused.take()
        if names:
            self._discard()
            raise refusal(names, "deepspeed")

    def _discard(self) -> None:
        """Throw the gradients away by DeepSpeed's own means: a step whose norm is no number."""
        with _overflowing(self._zero):
            self._deepspeed.step()

    def probe(self, microbatch: MicroBatch, loss_fn: LossFn) -> None:
        self._enter_training()
        buffers = [buffer.clone() for buffer in self.module.buffers()]
        devices = [self._device] if self._device.type == "cuda" else []
        self._swapping.settle()
        with torch.random.fork_rng(devices), self._probing():
            try:
                loss = self._loss(self._model, microbatch, loss_fn, training=True)
                total = loss.total if isinstance(loss, LossSum) else loss
                with backward_pass():
                    self._deepspeed.backward(total, scale_wrt_gas=False)
            finally:
                self._discard()
                if self._unused is not None:
                    self._unused.clear()
                with torch.no_grad():
                    for buffer, saved in zip(self.module.buffers(), buffers, strict=True):
                        buffer.copy_(saved)

    def export_state(self) -> EngineState:
        if self._deepspeed is None:
            return super().export_state()
        self._sync_buffers()
        exported = state.export_state(
            self.module,
            self._zero,
            self._swapping,
            self._group_names,
            self.lr_scheduler,
            self.world.rank,
        )
        return self._with_counters(exported)

    def import_state(self, source: StateSource, *, optimizer: bool = True) -> None:
        if self._deepspeed is None:
            super().import_state(source, optimizer=optimizer)
            return
        state.import_weights(source, self.module, self._zero, self._swapping, self.world.rank)
        if optimizer:
            state.import_optimizer(
                source,
                self.module,
                self._zero,
                self._swapping,
                self._group_names,
                self.lr_scheduler,
                self.world.rank,
            )
            self._restore_counters(source)


@contextlib.contextmanager
def _overflowing(zero: Any) -> Iterator[None]:
    """Let a step find a gradient norm that is no number, which makes it drop the gradients."""
    infinite = torch.tensor(math.inf)
    if is_stage_3(zero):
        zero._get_norm_groups = lambda: [infinite]
    else:
        zero.scaled_global_norm = lambda: infinite
    try:
        yield
    finally:
        # Its class has the real one.
        zero.__dict__.pop("_get_norm_groups", None)
        zero.__dict__.pop("scaled_global_norm", None)


def _update_scale(scaler: torch.amp.GradScaler, overflow: bool) -> None:
    """What ``GradScaler.update`` does after a step that it has seen itself."""
    state = scaler.state_dict()
    if overflow:
        state["scale"] *= state["backoff_factor"]
        state["_growth_tracker"] = 0
    else:
        state["_growth_tracker"] += 1
        if state["_growth_tracker"] == state["growth_interval"]:
            state["scale"] *= state["growth_factor"]
            state["_growth_tracker"] = 0
    scaler.load_state_dict(state)
