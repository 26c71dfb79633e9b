"""Whether the rows that dropout is given are those of samples: a micro-batch held against itself.

Before the first step, the first micro-batch is computed twice without gradients, the second time
with its samples rolled by one place, and their masks with them. What each call of dropout is given
must then be rolled, too, and the loss must stay. They are not where the first dim is that of
positions, where rows are picked, or where what samples share is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name

from unipar.data.batch import MicroBatch
from unipar.data.rolled import rolled
from unipar.engine.sample_dropout import (
    OPTION,
    REMEDY,
    SampleDropout,
    calling_module,
    drawn_otherwise,
)
from unipar.engine.trials import trial
from unipar.errors import ConfigError
from unipar.loss import Loss, LossSum
from unipar.world import World


def check_rows(
    dropout: SampleDropout,
    module: nn.Module,
    microbatch: MicroBatch,
    step: int,
    compute: Callable[[MicroBatch], Loss],
    world: World,
    *,
    exact: bool,
) -> None:
    """Refuse a model in which dropout is given other rows than those of samples. Collective.

    Args:
        dropout: what draws.
        module: the model, in training.
        microbatch: the first of a step.
        step: of training, from 0.
        compute: forward pass and loss.
        world: the joined processes.
        exact: whether the model computes in fp32.

    Raises:
        ConfigError: it is, on any rank; or ranks call dropout unequally often.
    """
    samples = max(microbatch.num_samples, 1)
    try:
        other = rolled(microbatch.data, samples)
    except ValueError as error:
        raise ConfigError(
            f"{OPTION} needs to know which samples a batch has, in a micro-batch of {samples}, and "
            f"finds {error}. Let collate_fn put samples along the first dim of each tensor, "
            f"{REMEDY}"
        ) from None
    tolerance = 1e-4 if exact else 3e-2
    seen, losses, elsewhere = [], [], ""
    for shift, data in enumerate((microbatch.data, other)):
        dropout.seen = []
        piece = replace(microbatch, data=data, copy=None)
        with (
            trial(module, world.device, dropout=True) as draws,
            torch.no_grad(),
            dropout.drawing(step, piece, shift=shift),
            _Watched(dropout, module),
        ):
            loss = compute(piece)
        if draws.on_host and not elsewhere:
            elsewhere = drawn_otherwise("the forward pass or the loss", "Python's or NumPy's")
        losses.append(float(loss.total if isinstance(loss, LossSum) else loss))
        seen.append(dropout.seen)
        dropout.seen = None
    problem = elsewhere or _first_difference(seen[0], seen[1], tolerance)
    # What is no number shows nothing, and is the run's to find.
    if not problem and abs(losses[0] - losses[1]) > tolerance * max(map(abs, losses)):
        problem = (
            f"{OPTION}: the loss of a micro-batch is {losses[0]:.6g}, and {losses[1]:.6g} with its "
            "samples in another order and their masks of dropout with them. Let the model treat "
            f"samples alike, whatever their order, and drop nothing that they share, {REMEDY}"
        )
    found = world.gather((problem, dropout.num_calls))
    for said, _ in found:
        if said:
            raise ConfigError(said)
    calls = [number for _, number in found]
    if len(set(calls)) > 1:
        raise ConfigError(
            f"{OPTION} numbers the calls of dropout in a forward pass, and ranks call it unequally "
            f"often: {', '.join(map(str, calls))} times. Call it equally often in each pass, "
            f"{REMEDY}"
        )


def _first_difference(
    whole: list[tuple[torch.Tensor, torch.Tensor, str]],
    other: list[tuple[torch.Tensor, torch.Tensor, str]],
    tolerance: float,
) -> str:
    """Say what differs first between a micro-batch and the rolled one."""
    for (told, norm, said), (rolled_told, _, _) in zip(whole, other, strict=True):
        apart = (rolled_told - told.roll(1)).abs().max()
        if bool(apart > tolerance * norm.max()):
            return said
    return ""


class _Watched(TorchFunctionMode):
    """Names the first function that draws random numbers, of a pass that is looked at."""

    def __init__(self, dropout: SampleDropout, model: nn.Module) -> None:
        super().__init__()
        self._dropout, self._model = dropout, model
        self._states, self._draws = dropout.generators(), dropout.draws

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        states = self._dropout.generators()
        if not all(map(torch.equal, states, self._states)):
            if self._dropout.draws == self._draws:
                name = resolve_name(func) or getattr(func, "__name__", repr(func))
                where = f"{name} in {calling_module(self._model)}"
                raise ConfigError(drawn_otherwise(where))
            self._states, self._draws = states, self._dropout.draws
        return result
