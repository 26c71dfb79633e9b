"""The training step through an Accelerator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unipar.batch import MicroBatch
from unipar.engine import (
    AsDTensors,
    DDPModuleEngine,
    DDPReducer,
    ModuleEngine,
    Undo,
    check_divisible,
    sum_shards,
)
from unipar.engine.sharded import refuse_gradients_outside
from unipar.errors import ConfigError
from unipar.loss import LossFn
from unipar.state import is_dtensor
from unipar.strategy import EngineSpec
from unipar.torch_versions import recovering
from unipar.world import World
from unipar_accelerate.accelerator import check_wrapped
from unipar_accelerate.framework import quiet

if TYPE_CHECKING:
    from accelerate import Accelerator

    from unipar_accelerate.options import AccelerateOptions


class AccelerateEngine(ModuleEngine):
    """Model and optimizer as ``Accelerator.prepare`` gives them back.

    Attributes:
        accelerator: Accelerate's own, for what else a user's code does with one: ``print``,
            ``gather``, trackers, ``is_main_process``. Each engine has one; they share their state.
    """

    def __init__(
        self,
        spec: EngineSpec,
        world: World,
        module: nn.Module,
        accelerator: Accelerator,
        options: AccelerateOptions,
        undo: Iterable[Undo],
    ) -> None:
        self.accelerator = accelerator
        self._options = options
        super().__init__(spec, world, module, undo=undo)
        self._undo.append(_restored(module))
        self._prepared: Any = None
        with quiet():
            self._prepare()
        check_wrapped(accelerator, options, self._model, world)
        self._scaler = accelerator.scaler

    def _prepare(self) -> None:
        if self.optimizer is None:
            self._model = self.accelerator.prepare_model(self.module, evaluation_mode=True)
        else:
            self._model, self._prepared = self.accelerator.prepare(self.module, self.optimizer)

    def _backward(self, loss: torch.Tensor) -> None:
        self._check_shared_state()
        self.accelerator.backward(loss)

    def _unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Left to Accelerate, which does so when it clips, or else when it steps."""

    def _gradient_norm(self, max_norm: float) -> float:
        # Accelerate knows an FSDP2 model by the list of all its parameters, frozen ones included.
        norm: Any = self.accelerator.clip_grad_norm_(self._all_parameters, max_norm)
        return (norm.full_tensor() if is_dtensor(norm) else norm).item()

    def _step_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        self._check_shared_state()
        self._prepared.step()
        return not self._prepared.step_was_skipped

    def _check_shared_state(self) -> None:
        """Refuse what another Accelerator may have set for all of them, which is not seen else.

        It would divide the loss once more, and leave steps out.
        """
        steps = self.accelerator.gradient_accumulation_steps
        synced = self.accelerator.sync_gradients
        if steps == 1 and synced:
            return
        raise ConfigError(
            f"accelerate: gradient_accumulation_steps={steps} (sync_gradients={synced}) was set in "
            "this process, by an Accelerator of your own or on engine.accelerator, and all "
            "Accelerators share it. Micro-batches are unipar's: set micro_batch_size, and leave "
            "gradient_accumulation_steps at 1 and accumulate() out."
        )

    def close(self) -> None:
        super().close()
        self._model, self._prepared = self.module, None
        self.accelerator.free_memory()


class ReplicatedEngine(DDPModuleEngine, AccelerateEngine):
    """Under DDP, unless the process is alone: gradients are summed in the last backward pass."""

    def _prepare(self) -> None:
        super()._prepare()
        if isinstance(self._model, DistributedDataParallel):
            hook = self._options.compression
            self._reducer = DDPReducer(
                self._model,
                allow_unused="accelerate:find_unused_parameters=true",
                only_overlapped="" if hook == "none" else f"accelerate:compression={hook}",
                averages=hook != "none",
            )


class ShardedEngine(AccelerateEngine):
    """Under the FSDP2 plugin: gradients are reduce-scattered in the last backward pass."""

    def _prepare(self) -> None:
        # FSDP2 is prepared with an optimizer, or not at all.
        optimizer = self.optimizer or torch.optim.SGD(self.module.parameters(), lr=0.0)
        self._model, self._prepared = self.accelerator.prepare(self.module, optimizer)
        sum_shards(self.module)
        check_divisible(optimizer, "accelerate", self.world, AsDTensors(comes_first=False))
        self._all_parameters = list(self.module.parameters())
        self._parameters = self._all_parameters
        self._undo += refuse_gradients_outside(self.module, "accelerate")

    def _microbatch(self, last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if last else self.accelerator.no_sync(self._model)

    def _probing(self) -> AbstractContextManager[None]:
        # Gradients that are not reduced stay inside FSDP, which adds them to the next step's.
        return contextlib.nullcontext()

    def probe(self, microbatch: MicroBatch, loss_fn: LossFn) -> None:
        with recovering(self.module, "accelerate"):
            super().probe(microbatch, loss_fn)


def _restored(module: nn.Module) -> Undo:
    """Takes back what ``prepare`` sets on the module: a marked one would not be prepared again."""
    before = module.__dict__.get("forward")

    def undo() -> None:
        for name in ("_original_forward", "_is_accelerate_prepared", "forward"):
            module.__dict__.pop(name, None)
        if before is not None:
            module.forward = before

    return undo
