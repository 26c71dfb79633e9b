"""The training step of ZeRO's stages 1 to 3: DeepSpeed reduces, clips and updates."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from unipar.engine import (
    PrecisionPolicy,
    Reducer,
    Undo,
    Update,
    note_overflow,
    refuse_hidden_outputs,
)
from unipar.errors import ConfigError, first_few
from unipar.utils.host_copy import HostCopy
from unipar.world import World
from unipar_deepspeed.engine import Initialized
from unipar_deepspeed.layout import is_stage_3
from unipar_deepspeed.swapped import Swapping
from unipar_deepspeed.unused import Unused, refusal


class ZeROReducer(Reducer):
    """Gradients form in DeepSpeed's flat partitions, summed or averaged as soon as DeepSpeed can.

    Args:
        module: the user's module.
        world: the joined processes.
        deepspeed: runs backward passes.
        swapping: what was brought from files goes back before DeepSpeed needs its buffers.
        refuse_unused: whether to stop where no rank has used some parameter.
    """

    hides_gradients = True

    def __init__(
        self,
        module: nn.Module,
        world: World,
        deepspeed: Initialized,
        swapping: Swapping,
        *,
        refuse_unused: bool,
    ) -> None:
        super().__init__(module, world, deepspeed.backward)
        self._deepspeed, self._swapping = deepspeed, swapping
        self._unused, self._refuse_unused = Unused(module, world), refuse_unused
        self._frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
        self._stage_3 = is_stage_3(deepspeed.zero)
        # DeepSpeed 0.19.8 counts, for each module of stage 3, the backward passes of its last
        # forward pass alone (runtime/zero/parameter_offload.py), and loses gradients of others.
        self.holds_forwards = not self._stage_3
        self._places: dict[str, int] = {}
        self._calls = 0
        self._begun = self._interrupted = False
        self._undo: list[Undo] = []
        if self._stage_3:
            deepspeed.engine.register_forward_pre_hook(self._saw_call)
            self._undo = refuse_hidden_outputs(module, "stage 3 of ZeRO", _found)
        else:
            self._places = self._find_places()

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        if self._stage_3 and not self._calls:
            raise ConfigError(
                "the loss did not come from a call of the model that the loss function was given, "
                "model(…), but from its parts or from engine.module. Stage 3 of ZeRO loses "
                "gradients of what goes around that call. Call model(…), whose forward may do "
                "what its argument says."
            )
        self._calls = 0
        self._swapping.settle()
        self._begun = self._interrupted = True
        super().backward(loss, last=last)
        self._interrupted = False

    def finish(self) -> None:
        self._check_frozen()
        self._check_places()
        if names := self._unused.take(named=self._refuse_unused):
            raise refusal(names, "deepspeed")

    def discard(self) -> None:
        """Throw the gradients away by DeepSpeed's own means: a step whose norm is no number."""
        if not self._begun:
            # DeepSpeed has made no gradients to throw away, and fails for want of them.
            self.clear()
            return
        if self._interrupted:
            raise ConfigError(
                "deepspeed: an error has ended an earlier backward pass before its end, and ZeRO "
                "cannot begin another: it is in the middle of reducing gradients. Start again from "
                "a checkpoint, or use strategy='fsdp' or 'ddp'."
            )
        self._swapping.settle()
        with _overflowing(self._deepspeed.zero):
            self._deepspeed.engine.step()
        self.clear()

    def probing(self) -> AbstractContextManager[None]:
        if (tp := self.world.layout.tp) > 1:
            raise ConfigError(
                "deepspeed: micro_batch_size='auto' and shares='auto' try passes, and with "
                f"tp={tp} a rank that runs out of memory would leave the others waiting for its "
                "part of a layer. Give numbers."
            )
        return super().probing()

    def clear(self) -> None:
        super().clear()
        self._begun = self._interrupted = False

    def forget(self) -> None:
        self._calls = 0
        self._unused.clear()

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._unused.stop()

    def _saw_call(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self._calls += 1

    def _find_places(self) -> dict[str, int]:
        return {name: p.data_ptr() for name, p in self.module.named_parameters()}

    def _check_places(self) -> None:
        """Refuse parameters that are no longer in DeepSpeed's buffer."""
        if self._stage_3:
            return
        places = self._find_places()
        if moved := [name for name, place in places.items() if place != self._places[name]]:
            raise ConfigError(
                f"deepspeed: parameter.data of {first_few(moved)} was given another tensor. "
                "ZeRO has parameters in one buffer, which would not change. Change them in place: "
                "parameter.data.copy_(new)."
            )

    def _check_frozen(self) -> None:
        """Refuse parameters that were thawed: ZeRO has no partitions for them."""
        thawed = [name for name, p in self._frozen.items() if p.requires_grad]
        if thawed:
            raise ConfigError(
                f"deepspeed: {first_few(thawed)} was frozen "
                "when the model was prepared, and is not now: ZeRO would leave it as it is. "
                "Prepare the model again from a checkpoint, or use strategy='ddp' or 'horovod'."
            )


def _found(output: Any) -> Iterator[torch.Tensor]:
    """The tensors that stage 3 finds in what a module gives.

    DeepSpeed 0.19.8, runtime/zero/utils.py, ``apply_to_tensors_only``.
    """
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (list, tuple, dict)):
        for item in output.values() if isinstance(output, dict) else output:
            yield from _found(item)


class ZeROStepper:
    """DeepSpeed divides, clips and steps, and drops a step whose gradient is not finite.

    It divides by its loss scale. That is 1 while gradients are made; for the step it carries the
    fp16 loss scale, the division that is known only when all items of the batch have been counted,
    and what takes back an average over ranks. It clips to a norm that each step may change.

    Args:
        deepspeed: what steps.
        precision: has the fp16 loss scale.
        take_over: has DeepSpeed take over what was done to weights by hand.
    """

    def __init__(
        self, deepspeed: Initialized, precision: PrecisionPolicy, take_over: Callable[[], None]
    ) -> None:
        self._deepspeed, self._precision, self._take_over = deepspeed, precision, take_over

    def step(self, divisor: float, max_norm: float | None, *, careful: bool) -> Update:
        zero, scaler = self._deepspeed.zero, self._precision.scaler
        self._take_over()
        scale = 1.0 if scaler is None else scaler.get_scale()
        zero.loss_scale = scale * divisor / self._deepspeed.averaged_over
        # DeepSpeed 0.19.8 has it from its configuration, and looks at it here in each step.
        zero.clip_grad = 0.0 if max_norm is None or math.isinf(max_norm) else max_norm
        try:
            self._deepspeed.engine.step()
        finally:
            zero.loss_scale = 1.0
        overflow = bool(zero.overflow)
        if scaler is not None:
            _update_scale(scaler, overflow)
        norm = None
        if max_norm is not None:
            found: Any = self._deepspeed.engine.get_global_grad_norm()
            of_tensor = isinstance(found, torch.Tensor)
            norm = HostCopy(found.reshape(())) if of_tensor else float(found)
        # Without a loss scale that may be too high, it is the gradient itself.
        failed = overflow and careful and scaler is None
        return Update(norm, stepped=not overflow, finite=not failed)


def step_own_optimizer(zero: Any, optimizer: Optimizer) -> None:
    """Have DeepSpeed step the optimizer that it was given.

    DeepSpeed 0.19.8 builds Adagrad once more, from its defaults alone, for its first state
    (stage_1_and_2.py and stage3.py, ``initialize_optimizer_states``): without the user's groups,
    and with learning rates that no scheduler reaches.
    """
    if zero.optimizer is optimizer:
        return
    optimizer.state = zero.optimizer.state
    zero.optimizer = optimizer
    if not is_stage_3(zero):
        # What it has linked is the parameters of one group.
        zero._link_all_hp_params()


def take_over_weights(zero: Any) -> None:
    """Have what was done to weights by hand since the last step, such as clamping them.

    Else they would be what this rank's fp32 share says, which is equal if nothing was done.
    Where the share is in host memory it would have to travel for that, and is left.
    """
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
    """Tell a scaler of a step that DeepSpeed has seen itself."""
    scale = scaler._scale
    assert scale is not None
    note_overflow(scaler, torch.full_like(scale, float(overflow)))
    scaler.update()
