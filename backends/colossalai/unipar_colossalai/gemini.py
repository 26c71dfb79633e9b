"""Gemini: chunks of weights, divided among ranks and gathered to be used.

Half-precision weights compute; each rank updates its part of their fp32 originals. Gemini gathers a
chunk of weights when an operation needs it, lets go of it afterwards, and reduces its gradients
once all of them are there, in half precision. What follows is fp32: the sum over micro-batches, the
norm, and the user's own optimizer.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from colossalai.zero.gemini.chunk import TensorState  # pyright: ignore[reportMissingImports]
from torch.optim import Optimizer

from unipar.engine import (
    OptimizerStepper,
    PrecisionPolicy,
    Reducer,
    build_optimizer,
    group_names,
    refuse_changed_weights,
    scale_gradients,
)
from unipar.errors import ConfigError, first_few
from unipar.world import World
from unipar_colossalai.checks import check_optimizer, check_parameters
from unipar_colossalai.divided_state import Groups
from unipar_colossalai.engine import BoosterEngine, Start
from unipar_colossalai.gemini_state import GeminiState, Held, floating
from unipar_colossalai.scaling import part_precision, total_norm_of_parts
from unipar_colossalai.working import Working, guard_forward


def prepare(start: Start) -> BoosterEngine:
    """Divide weights, gradients and optimizer among ranks, chunk by chunk."""
    spec, world, module = start.spec, start.world, start.module
    check_parameters(module)
    start.send_weights()
    optimizer = build_optimizer(spec, module)
    groups: Groups = []
    if optimizer is not None:
        check_optimizer(module, optimizer)
        # Before its groups hold parts of parameters.
        groups = group_names(module, optimizer)
    originals = {name: tensor.detach() for name, tensor in floating(module)}
    wrapper, gemini = start.boost(optimizer)
    # Colossal-AI's own walks up the stack for each message, and there is one in every step.
    wrapper._logger = logging.getLogger("colossalai")
    held = Held(module, wrapper, gemini, originals)
    reducer = GeminiReducer(wrapper, held, world)
    # The weights compute in half precision themselves; autocast has nothing to add.
    precision = part_precision(spec, world, autocast=False)
    stepper = None
    if optimizer is not None:
        stepper = GeminiStepper(optimizer, gemini, reducer, precision)
    # The module alone has no weights, to evaluate with either.
    model = Working(module, wrapper)
    return BoosterEngine(
        start,
        wrapper,
        optimizer,
        gemini,
        model=model,
        eval_model=model,
        reducer=reducer,
        precision=precision,
        stepper=stepper,
        state=GeminiState(held, optimizer, groups, world),
        undo=[
            *start.undo,
            guard_forward(module),
            refuse_changed_weights(module, "colossalai:plugin=gemini", ()),
        ],
    )


class GeminiReducer(Reducer):
    """Adds up in fp32 what Gemini has averaged over ranks in each backward pass.

    Args:
        wrapper: what Colossal-AI has made of the module.
        held: the fp32 values behind what it computes with.
        world: the joined processes.
    """

    # A forward pass clears what stands in `parameter.grad`, and there is no gradient to lose.
    hides_gradients = True
    watches_gradients = False
    calls_hooks = False

    def __init__(self, wrapper: Any, held: Held, world: World) -> None:
        super().__init__(held.module, world)
        self.wrapper, self.held = wrapper, held
        self._sums: dict[Any, torch.Tensor] = {}

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        try:
            self._reduce(loss)
        finally:
            # Gemini's own sum would be half precision, and weigh micro-batches unequally.
            self.wrapper.chunk_manager.accumulating_grads = False
        for chunk in self.held.chunks:
            reduced = chunk.grad_chunk.payload
            if chunk in self._sums:
                self._sums[chunk] += reduced
            else:
                self._sums[chunk] = reduced.float()

    def _reduce(self, loss: torch.Tensor) -> None:
        try:
            self.wrapper.backward(loss)
        except RuntimeError as error:
            if "ZERO DDP error" not in str(error.args[:1]):
                raise
        # It says nothing itself where all of a chunk has no gradient.
        without = [n for n, p in self.held.trained.items() if not p._gemini_reduced]
        if without:
            raise ConfigError(
                f"colossalai: the loss does not depend on {len(without)} of the parameters to "
                f"train: {first_few(without, 8)}. Gemini needs "
                "a gradient of each in every backward pass. Freeze them with "
                "requires_grad_(False), or use plugin='ddp' with find_unused_parameters=true."
            )

    def finish(self) -> None:
        for part, where in self.held.optimized.items():
            part.data = where.held
            part.grad = self._sums[where.chunk][where.span]
        # Colossal-AI can only average.
        scale_gradients(self.held.optimized, self.world.size)

    def clear(self) -> None:
        super().clear()
        self._sums.clear()
        for part in self.held.optimized:
            part.grad = None

    def forget(self) -> None:
        """Let go of the chunks that an interrupted pass has gathered, so that another can begin."""
        manager = self.wrapper.chunk_manager
        if not manager.accessed_chunks:
            return
        for chunk in list(manager.accessed_chunks):
            for tensor in chunk.get_tensors():
                # From wherever its operation was interrupted; what is no transition does nothing
                # (Colossal-AI 0.5.0, zero/gemini/chunk/chunk.py, STATE_TRANS).
                for state in (TensorState.READY_FOR_REDUCE, TensorState.COMPUTE, TensorState.HOLD):
                    chunk.tensor_trans_state(tensor, state)
            if chunk.keep_gathered:
                manager.fake_release_chunk(chunk)
            else:
                manager.release_chunk(chunk)
        self.wrapper.gemini_manager.reset_attributes()

    def close(self) -> None:
        # Caches of the class, which would keep every model of this process alive.
        manager = self.wrapper.gemini_manager
        manager._get_layout_info.cache_clear()
        sorts = getattr(manager.placement_policy, "_sort_can_evict_chunks", None)
        if sorts is not None:
            sorts.cache_clear()


class GeminiStepper(OptimizerStepper):
    """Steps each rank's fp32 parts, and rounds what computes of them.

    Args:
        optimizer: the user's, over the parts.
        gemini: what Colossal-AI has made of it.
        reducer: which gives the parts their gradients.
        precision: what unscales and steps them.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        gemini: Any,
        reducer: GeminiReducer,
        precision: PrecisionPolicy,
    ) -> None:
        super().__init__(optimizer, precision, reducer.held.optimized, total_norm_of_parts)
        self.gemini, self.reducer = gemini, reducer

    def update(self) -> bool:
        stepped = super().update()
        self.reducer.clear()
        self.gemini._update_fp16_params()
        return stepped
