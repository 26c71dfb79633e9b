"""The training step of Gemini: chunks of weights, divided among ranks and gathered to be used."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from unipar.batch import MicroBatch
from unipar.engine import ModuleEngine, backward_pass, group_names, refuse_changed_weights
from unipar.errors import ConfigError, first_few
from unipar.loss import Loss, LossFn, LossSum
from unipar.state import EngineState, StateSource
from unipar_colossalai import parts
from unipar_colossalai.checks import check_optimizer, check_parameters
from unipar_colossalai.engine import BoosterEngine, Start
from unipar_colossalai.gemini_state import Held, floating
from unipar_colossalai.scaling import PartScaler, clip_parts
from unipar_colossalai.working import Working, guard_forward


class GeminiEngine(BoosterEngine):
    """Half-precision weights compute; each rank updates its part of their fp32 originals.

    Gemini gathers a chunk of weights when an operation needs it, lets go of it afterwards, and
    reduces its gradients once all of them are there, in half precision. What follows is fp32: the
    sum over micro-batches, the norm, and the user's own optimizer.
    """

    def __init__(self, start: Start) -> None:
        module = start.module
        self._groups: list[tuple[str, ...]] = []
        self._sums: dict[Any, torch.Tensor] = {}
        check_parameters(module)
        start.send_weights()
        super().__init__(start)
        self._undo.append(guard_forward(module))
        self._undo.append(refuse_changed_weights(module, "colossalai:plugin=gemini", ()))
        self._undo.append(self._forget)
        # The weights compute in half precision themselves; autocast has nothing to add.
        self._mixed = False
        self._model = Working(module, self.wrapper)
        self._parameters = list(self._parts)
        if self._scaler is not None:
            self._scaler = PartScaler(self._device.type, process_group=None)

    def _boost(self, optimizer: torch.optim.Optimizer | None) -> None:
        originals = {name: tensor.detach() for name, tensor in floating(self.module)}
        if optimizer is not None:
            check_optimizer(self.module, optimizer)
            # Before its groups hold parts of parameters.
            self._groups = group_names(self.module, optimizer)
        super()._boost(optimizer)
        # Colossal-AI's own walks up the stack for each message, and there is one in every step.
        self.wrapper._logger = logging.getLogger("colossalai")
        self._held = Held(self.module, self.wrapper, originals)
        self._parts = self._held.parts(self.framework_optimizer)

    def _forget(self) -> None:
        # Caches of the class, which would keep every model of this process alive.
        manager = self.wrapper.gemini_manager
        manager._get_layout_info.cache_clear()
        sorts = getattr(manager.placement_policy, "_sort_can_evict_chunks", None)
        if sorts is not None:
            sorts.cache_clear()

    def _require_optimizer(self) -> Any:
        return ModuleEngine._require_optimizer(self)

    def _loss(
        self, model: nn.Module, microbatch: MicroBatch, loss_fn: LossFn, *, training: bool
    ) -> Loss:
        # The module alone has no weights to evaluate with either.
        return super()._loss(self._model, microbatch, loss_fn, training=training)

    # -- gradients -------------------------------------------------------------------------------

    def _backward(self, loss: torch.Tensor) -> None:
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        self._reduce(loss)
        for chunk in self._held.chunks:
            # Gemini's own sum would be half precision, and weigh micro-batches unequally.
            reduced = chunk.grad_chunk.payload
            if chunk in self._sums:
                self._sums[chunk] += reduced
            else:
                self._sums[chunk] = reduced.float()
        self.wrapper.chunk_manager.accumulating_grads = False

    def _reduce(self, loss: torch.Tensor) -> None:
        try:
            self.wrapper.backward(loss)
        except RuntimeError as error:
            if "ZERO DDP error" not in str(error.args[:1]):
                raise
        # It says nothing itself where all of a chunk has no gradient.
        without = [n for n, p in self._held.trained.items() if not p._gemini_reduced]
        if without:
            raise ConfigError(
                f"colossalai: the loss does not depend on {len(without)} of the parameters to "
                f"train: {first_few(without, 8)}. Gemini needs "
                "a gradient of each in every backward pass. Freeze them with "
                "requires_grad_(False), or use plugin='ddp' with find_unused_parameters=true."
            )

    def probe(self, microbatch: MicroBatch, loss_fn: LossFn) -> None:
        self._enter_training()
        buffers = [buffer.clone() for buffer in self.module.buffers()]
        with torch.random.fork_rng([]):
            try:
                loss = self._loss(self._model, microbatch, loss_fn, training=True)
                with backward_pass():
                    self._reduce(loss.total if isinstance(loss, LossSum) else loss)
            finally:
                self._drop_gradients()
                with torch.no_grad():
                    for buffer, saved in zip(self.module.buffers(), buffers, strict=True):
                        buffer.copy_(saved)

    @property
    def _gradients_elsewhere(self) -> bool:
        return True

    def _hide_gradients(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            super()._hide_gradients()

    def _show_gradients(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            super()._show_gradients()

    def _gradients(self) -> list[tuple[int, int]]:
        # A forward pass clears what stands there, and there is no gradient to lose.
        return []

    def _finish_gradients(self) -> None:
        for part, where in self._parts.items():
            part.data = where.held
            part.grad = self._sums[where.chunk][where.span]
        # Colossal-AI can only average.
        self._scale_gradients(self.world.size)

    def _drop_gradients(self) -> None:
        super()._drop_gradients()
        self._sums.clear()
        for part in self._parameters:
            part.grad = None

    def _gradient_norm(self, max_norm: float) -> float:
        return clip_parts(self._parameters, max_norm)

    def _step_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        stepped = super()._step_optimizer(optimizer)
        self._drop_gradients()
        self.framework_optimizer._update_fp16_params()
        return stepped

    # -- state -----------------------------------------------------------------------------------

    def export_state(self) -> EngineState:
        self._sync_buffers()
        weights, aliases = self._held.states()
        exported = EngineState(weights, aliases=aliases)
        if self.optimizer is not None:
            parts.export_optimizer(
                exported,
                self._parts.items(),
                self.optimizer,
                self._groups,
                self.lr_scheduler,
                self.world,
            )
        return self._with_counters(exported)

    def import_state(self, source: StateSource, *, optimizer: bool = True) -> None:
        states, _ = self._held.states()
        source.fill_weights(states)
        self._held.round()
        if optimizer and self.optimizer is not None:
            parts.import_optimizer(
                source,
                self._parts.items(),
                self._held.trained,
                self.optimizer,
                self._groups,
                self.lr_scheduler,
            )
            self._restore_counters(source)
