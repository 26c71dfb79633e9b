"""The training step under HybridParallelPlugin without a pipeline: tensor parallelism."""

from __future__ import annotations

import contextlib
import math
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import nn

from unipar.batch import MicroBatch
from unipar.engine import checkpoint_activations, refuse_inner_gradients
from unipar.errors import ConfigError
from unipar.loss import LossFn
from unipar.state import EngineState, StateSource
from unipar_colossalai import hybrid_state, parts
from unipar_colossalai.engine import BoosterEngine, Start
from unipar_colossalai.hybrid_models import check_model, check_training
from unipar_colossalai.scaling import PartScaler


class HybridEngine(BoosterEngine):
    """Each rank holds a part of every layer, and ranks exchange activations.

    Attributes:
        logical: the model as it was before it was divided.
    """

    def __init__(self, start: Start) -> None:
        module = start.module
        plugin = start.booster.plugin
        self._plugin = plugin
        self._tp_rank: int = dist.get_rank(plugin.tp_group)
        check_model(module, plugin.tp_size, plugin.pp_size)
        start.send_weights()
        super().__init__(start)
        if self._scaler is not None:
            # Of the parts of a gradient, one may overflow alone.
            self._scaler = PartScaler(self._device.type, process_group=None)
            # A stage without the loss has none to scale, and unscales its gradients all the same.
            self._scaler.scale(torch.zeros((), device=self._device))
        if plugin.pp_size == 1:
            # In a pipeline no loss has the whole model's graph, and PyTorch says so.
            self._undo.append(refuse_inner_gradients(module, "colossalai"))
        # Only now: Colossal-AI replaces the methods of the modules that it divides.
        self._undo.append(checkpoint_activations(module, start.spec.activation_checkpointing))

    def _boost(self, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is not None:
            check_training(self.module)
        # The optimizer is given whole parameters, of which Colossal-AI leaves it the parts.
        self.logical = hybrid_state.Logical(self.module, optimizer)
        super()._boost(optimizer)

    @property
    def num_parameters(self) -> int:
        return self.logical.num_parameters

    # -- training --------------------------------------------------------------------------------

    def _microbatch(self, last: bool) -> AbstractContextManager[None]:
        if last:
            return contextlib.nullcontext()
        return self.booster.no_sync(self.wrapper, self.framework_optimizer)

    def _finish_gradients(self) -> None:
        # Colossal-AI averages, once or, in a user's own loop, what it has averaged already.
        self._scale_gradients(self._plugin.dp_size)

    def probe(self, microbatch: MicroBatch, loss_fn: LossFn) -> None:
        raise ConfigError(
            "colossalai: micro_batch_size='auto' tries what fits, and with plugin='hybrid' a rank "
            "that runs out of memory would leave the others waiting for its part of the model. "
            "Set micro_batch_size to a number."
        )

    def _gradient_norm(self, max_norm: float) -> float:
        squared = torch.zeros((), dtype=torch.float64, device=self._device)
        for parameter in self._parameters:
            if parameter.grad is not None:
                part = parameter.grad.double().square().sum()
                squared += part / self._num_holders(parameter)
        for group in (self._plugin.tp_group, self._plugin.pp_group):
            dist.all_reduce(squared, group=group)
        norm = squared.sqrt().float()
        if not math.isinf(max_norm):
            nn.utils.clip_grads_with_norm_(self._parameters, max_norm, norm)
        return norm.item()

    def _num_holders(self, parameter: nn.Parameter) -> int:
        """How many ranks of a replica hold the same elements."""
        holders = 1 if hybrid_state.is_divided(parameter) else self._plugin.tp_size
        for stages in self.wrapper.shared_params:
            if any(parameter is shared for shared in stages.values()):
                holders *= len(stages)
        return holders

    def _sync_buffers(self) -> None:
        """The buffers of the models that are proved never change."""

    # -- state -----------------------------------------------------------------------------------

    def export_state(self) -> EngineState:
        weights = hybrid_state.weights(self.logical, self.module, self._tp_rank)
        exported = EngineState(weights, aliases=self.logical.aliases)
        if self.optimizer is not None:
            parts.export_optimizer(
                exported,
                self.logical.parts(self.module, self._tp_rank),
                self.optimizer,
                self.logical.groups,
                self.lr_scheduler,
                self.world,
            )
        return self._with_counters(exported)

    def import_state(self, source: StateSource, *, optimizer: bool = True) -> None:
        source.fill_weights(hybrid_state.weights(self.logical, self.module, self._tp_rank))
        if not optimizer:
            return
        if self.optimizer is not None:
            parts.import_optimizer(
                source,
                self.logical.parts(self.module, self._tp_rank),
                self.logical.weights,
                self.optimizer,
                self.logical.groups,
                self.lr_scheduler,
            )
        self._restore_counters(source)
