"""Engines of a migrated script: what trains its models."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from unipar.compat.runconfig import FILE
from unipar.engine import COMPUTE_DTYPES
from unipar.errors import ConfigError
from unipar.loss import LossSum
from unipar.migrated.script.run import (
    Prepared,
    current,
    device,
    own_randomness,
    session,
    settings,
    world,
)
from unipar.strategy import Engine, OptimizerFactory, StepResult


def prepare(
    model: nn.Module, *, optimizer: OptimizerFactory, max_grad_norm: float | None = None
) -> Engine:
    """Put a model under the strategy, then build its optimizer. Collective.

    Args:
        model: stays usable as it is; calls that lead to a loss go through :func:`engine`.
        optimizer: called with the named parameters once they have their final form.
        max_grad_norm: the 2-norm that gradients are clipped to in each step.

    Raises:
        ConfigError: the strategy cannot do it, or the optimizer holds other parameters.
    """
    run, number = session(), len(current.engines)
    with own_randomness():
        engine = run.prepare(
            model,
            optimizer=renewed(optimizer, model),
            max_grad_norm=max_grad_norm,
            name="model" if number == 0 else f"model{number + 1}",
        )
    current.engines.append(Prepared(engine, (model, engine.module, engine.optimizer)))
    return engine


def engine(of: Any = None) -> Any:
    """The engine of a model or of its optimizer; left out: the only one.

    Gives back a model that has none and is not trained here: an average of weights, or one that is
    read from a file after training.

    Raises:
        ConfigError: it was not prepared.
    """
    if of is None and len(current.engines) == 1:
        return current.engines[0].engine
    for one in reversed(current.engines):
        if any(of is key for key in one.keys):
            return one.engine
    if isinstance(of, nn.Module) and not _is_trained(of):
        return of
    what = "this run" if of is None else f"this {type(of).__name__}"
    raise ConfigError(
        f"{what} has {'not one engine' if of is None else 'no engine'}: call "
        "script.prepare(model, optimizer=...) before the model is trained."
    )


def is_prepared(of: Any) -> bool:
    """Return whether a model or an optimizer belongs to an engine of this run."""
    return any(of is key for one in current.engines for key in one.keys)


def backward(loss: torch.Tensor, of: Any = None) -> None:
    """Add gradients as ``loss.backward()`` under DDP does.

    A step is then on the mean over ranks of the sum of the losses since the last one, each as the
    script has scaled it. Where :func:`split` has cut the batch, ranks count by their samples, so
    that the step is that of the whole batch.

    Args:
        loss: scalar tensor.
        of: the optimizer or model; left out: the only one.
    """
    one: Engine = engine(of)
    first = current.begun.get(id(one)) != one.num_steps
    current.begun[id(one)] = one.num_steps
    if current.share is not None:
        samples, all_samples = current.share
        share = samples * world().data_size / all_samples
        loss = loss if share == 1 else loss * share
    one.backward(LossSum(loss, 1.0 if first else 0.0))


def grad_norm(result: StepResult) -> torch.Tensor:
    """The 2-norm of the gradient of a step before it was clipped, as ``clip_grad_norm_`` gives it.

    Args:
        result: of the step of an engine that clips.

    Returns:
        Scalar tensor, on the CPU; NaN where the engine does not clip.
    """
    return torch.tensor(math.nan if result.grad_norm is None else result.grad_norm)


def no_sync() -> AbstractContextManager[None]:
    """Nothing: an engine knows by itself when gradients are to be reduced."""
    return contextlib.nullcontext()


def autocast(enabled: bool | None = None) -> torch.autocast:
    """Autocast to the run's precision, which is none under ``fp32``.

    Args:
        enabled: whether the script asks for half precision, which the settings must do as well.

    Raises:
        ConfigError: they do not.
    """
    precision = settings().precision
    dtype = None if precision == "fp32" else COMPUTE_DTYPES[precision]
    if enabled is not None and bool(enabled) != (dtype is not None):
        raise ConfigError(
            f"the script asks for autocast with enabled={bool(enabled)}, and {FILE} has precision: "
            f"{precision}. Set precision: {'bf16 or fp16' if enabled else 'fp32'} there, or in "
            "UNIPAR_PRECISION."
        )
    return torch.autocast(device().type, dtype or torch.bfloat16, enabled=dtype is not None)


def _is_trained(model: nn.Module) -> bool:
    """Return whether what a model computes now may lead to gradients of it."""
    learns = any(parameter.requires_grad for parameter in model.parameters())
    return model.training and torch.is_grad_enabled() and learns


def renewed(optimizer: OptimizerFactory, model: nn.Module) -> OptimizerFactory:
    """Let an optimizer update a model's final parameters, also where it is given those of before.

    Args:
        optimizer: the script's.
        model: before the strategy has it.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def build(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        final = dict(named)
        built = optimizer(iter(final.items()))
        own = {id(parameter) for parameter in final.values()}
        for group in built.param_groups:
            for at, parameter in enumerate(group["params"]):
                if id(parameter) in own:
                    continue
                name = names.get(id(parameter))
                if name not in final or parameter in built.state:
                    raise ConfigError(
                        "the optimizer was given parameters that are not the model's final ones, "
                        "which would never be updated. Build its groups inside the function that "
                        "script.prepare calls."
                    )
                group["params"][at] = final[name]
        return built

    return build
