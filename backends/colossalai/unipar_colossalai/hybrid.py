"""HybridParallelPlugin: ranks hold parts of every layer, and exchange activations; or stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from unipar.engine import (
    OptimizerStepper,
    Reducer,
    WholeLosses,
    build_optimizer,
    checkpoint_activations,
    disarm,
    has_hooks,
    layers_of,
    refuse_inner_gradients,
    scale_gradients,
)
from unipar.errors import ConfigError
from unipar_colossalai.boosted import Boosted
from unipar_colossalai.engine import BoosterEngine, Start
from unipar_colossalai.hybrid_models import check_model, check_training
from unipar_colossalai.hybrid_pipeline import PipelineSchedule, use_given_microbatches
from unipar_colossalai.hybrid_state import HybridState, Logical, is_divided
from unipar_colossalai.scaling import part_precision


def prepare(start: Start) -> BoosterEngine:
    """Divide layers among the ranks of a replica, and the row of layers among its stages."""
    spec, world, module = start.spec, start.world, start.module
    plugin = start.booster.plugin
    pipeline = plugin.pp_size > 1
    if pipeline:
        use_given_microbatches(plugin)
    check_model(module, plugin.tp_size, plugin.pp_size)
    start.send_weights()
    # It is given whole parameters, of which Colossal-AI leaves it the parts.
    optimizer = build_optimizer(spec, module)
    if optimizer is not None:
        check_training(module)
    logical = Logical(module, optimizer)
    wrapper, stepped = divide(start, optimizer)
    check_loss = whole_losses(module, pipeline=pipeline)
    undo = [*start.undo, refuse_left_out(module), check_loss.close]
    if not pipeline:
        # In a pipeline no loss has the whole model's graph, and PyTorch says so.
        undo.append(refuse_inner_gradients(module, "colossalai"))
    # Only now: Colossal-AI replaces the methods of the modules that it divides.
    undo.append(checkpoint_activations(module, spec.activation_checkpointing))
    precision = part_precision(spec, world)
    # A stage without the loss has none to scale, and unscales its gradients all the same.
    precision.scale(torch.zeros((), device=world.device))
    parameters = list(module.parameters())
    stepper = None
    if optimizer is not None:
        norm = HybridNorm(plugin, wrapper, [(p, p) for p in parameters])
        stepper = OptimizerStepper(stepped, precision, parameters, norm)
    return BoosterEngine(
        start,
        wrapper,
        optimizer,
        stepped,
        model=Boosted(module, wrapper),
        reducer=HybridReducer(start, wrapper, stepped),
        precision=precision,
        stepper=stepper,
        state=HybridState(logical, module, optimizer, dist.get_rank(plugin.tp_group), world),
        schedule=PipelineSchedule(start, wrapper, stepped, check_loss) if pipeline else None,
        check_loss=check_loss,
        undo=undo,
    )


def divide(start: Start, optimizer: torch.optim.Optimizer | None) -> tuple[Any, Any]:
    """Let Colossal-AI divide the module, and wrap it and the optimizer.

    Raises:
        ConfigError: a layer that it has replaced had a hook.
    """
    hooked = {name: part for name, part in start.module.named_modules() if has_hooks(part)}
    boosted = start.boost(optimizer)
    divided = dict(start.module.named_modules())
    for name, part in hooked.items():
        if divided.get(name) is not part:
            raise ConfigError(
                f"colossalai: '{name}' ({type(part).__name__}) has a hook, which plugin='hybrid' "
                "loses with the layer that it replaces. Take the hook away, or hang it on the "
                "block around it, or use 'mesh:tp=2', which divides layers where they are."
            )
    return boosted


def whole_losses(module: nn.Module, *, pipeline: bool = False) -> WholeLosses:
    """Refuse losses that are computed from this rank's parts of layers, or its stage alone."""
    parameters = dict(module.named_parameters())
    if pipeline:
        return WholeLosses(parameters, [module], "colossalai")
    divided = {name: p for name, p in parameters.items() if is_divided(p)}
    # Colossal-AI's layers say so that are divided by their outputs.
    whole = [layer for layer in layers_of(module) if getattr(layer, "gather_output", True)]
    return WholeLosses(divided, whole, "colossalai")


def refuse_left_out(module: nn.Module) -> Callable[[], None]:
    """Refuse a model that is asked for outputs that Colossal-AI leaves out with a warning.

    Colossal-AI 0.5.0 (colossalai/shardformer/modeling/llama.py, ``llama_model_forward``, and those
    of the other models) does so in a pipeline, and for most models without one, too.

    Returns:
        What takes the refusal back.
    """

    def check(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        for name in ("hidden_states", "attentions"):
            asked = kwargs.get(f"output_{name}")
            if asked is None:
                asked = getattr(module.config, f"output_{name}", False)
            if asked and getattr(output, name, None) is None:
                raise ConfigError(
                    f"colossalai: the model was asked for output_{name}=True, and under "
                    f"plugin='hybrid' a {type(module).__name__} does not give its {name}. Leave "
                    f"output_{name} out of the model's inputs and of its config, and compute the "
                    "loss from logits; or use a strategy under which each rank has whole layers, "
                    "such as 'fsdp' or plugin='zero2'."
                )

    return module.register_forward_hook(check, with_kwargs=True).remove


class HybridReducer(Reducer):
    """Averages gradients over replicas.

    Args:
        start: what the engine is made from.
        wrapper: what Colossal-AI has made of the module.
        framework_optimizer: what it has made of the optimizer.
    """

    calls_hooks = False

    def __init__(self, start: Start, wrapper: Any, framework_optimizer: Any) -> None:
        run_backward = partial(start.booster.backward, optimizer=framework_optimizer)
        super().__init__(start.module, start.world, run_backward)
        self.booster, self.wrapper = start.booster, wrapper
        self.framework_optimizer = framework_optimizer
        self._begun = self._interrupted = False

    def begin(self, *, whole_step: bool) -> None:
        self._begun = True

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        if last:
            return super().microbatch(last=last)
        return self.booster.no_sync(self.wrapper, self.framework_optimizer)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        if self._interrupted:
            raise ConfigError(
                "colossalai: an error has ended an earlier backward pass before its end, and "
                "plugin='hybrid' with several replicas of the model cannot begin another: what it "
                "was reducing may still be on its way. Start again from a checkpoint."
            )
        self._interrupted = self.booster.plugin.dp_size > 1
        super().backward(loss, last=last)
        self._interrupted = False

    def finish(self) -> None:
        self._begun = False
        # Colossal-AI averages, once or, in a user's own loop, what it has averaged already.
        scale_gradients(self.parameters, self.booster.plugin.dp_size)

    def forget(self) -> None:
        if self._begun and self.wrapper.use_ddp:
            disarm(self.wrapper.module)
        self._begun = False

    def probing(self) -> NoReturn:
        refuse_probing()

    def share_buffers(self, buffers: Iterable[torch.Tensor] | None = None) -> None:
        """The buffers of the models that are proved never change."""


def refuse_probing() -> NoReturn:
    raise ConfigError(
        "colossalai: micro_batch_size='auto' and shares='auto' try passes, and with "
        "plugin='hybrid' a rank that runs out of memory would leave the others waiting for its "
        "part of the model. Give numbers."
    )


class HybridNorm:
    """2-norm of the whole gradient, of which the ranks of a replica hold parts. Collective.

    Args:
        plugin: Colossal-AI's.
        wrapper: what it has made of the module.
        held: what this rank updates, and which of the module's parameters each of it is of.
        zero: whether replicas update other parts.
    """

    def __init__(
        self,
        plugin: Any,
        wrapper: Any,
        held: Iterable[tuple[torch.Tensor, nn.Parameter]],
        *,
        zero: bool = False,
    ) -> None:
        self._plugin = plugin
        self._holders = [(t, self._num_holders(p, wrapper.shared_params)) for t, p in held]
        self._groups = [plugin.tp_group, plugin.pp_group, *([plugin.dp_group] if zero else [])]

    def _num_holders(self, parameter: nn.Parameter, tied: Sequence[dict[int, Any]]) -> int:
        """How many ranks of a replica hold the same elements."""
        holders = 1 if is_divided(parameter) else self._plugin.tp_size
        for stages in tied:
            if any(parameter is shared for shared in stages.values()):
                holders *= len(stages)
        return holders

    def __call__(self, gradients: Collection[torch.Tensor]) -> torch.Tensor:
        found = [(p.grad, holders) for p, holders in self._holders if p.grad is not None]
        assert len(found) == len(gradients)
        squared = torch.zeros((), dtype=torch.float64, device=self._holders[0][0].device)
        for gradient, holders in found:
            squared += gradient.double().square().sum() / holders
        for group in self._groups:
            dist.all_reduce(squared, group=group)
        return squared.sqrt().float()
