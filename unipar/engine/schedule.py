"""A pipeline: the part of a :class:`StepEngine` that runs a model cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from unipar.engine.trials import torch_generators
from unipar.errors import ConfigError


@dataclass(frozen=True)
class StageCall:
    """One micro-batch on its way through the stages.

    Attributes:
        inputs: makes the model's positional and keyword arguments. They are the same on every
            stage, on the device.
        loss: takes what the model has given, on the last stage alone, once, and in the order of
            micro-batches; gives the scalar that the backward pass starts from.
        computing: surrounds a stage's forward pass, and :attr:`loss`.
    """

    inputs: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    loss: Callable[[Any], torch.Tensor]
    computing: Callable[[], AbstractContextManager[Any]]


class Schedule(Protocol):
    """Runs the stages of this process over all micro-batches of a batch. Collective."""

    def run(self, calls: Sequence[StageCall], *, training: bool) -> None:
        """Forward passes, and in training the backward passes that reduce gradients, too."""
        ...

    def share(self, values: torch.Tensor) -> None:
        """Give every stage, in place, what the last one has in ``values``."""
        ...


class PassClock(Protocol):
    """Times one step's passes, for whoever has asked for that."""

    def batch(self, bubble: float | None) -> AbstractContextManager[None]:
        """Surround all that a schedule does in a step, transfers and waiting for them included.

        Args:
            bubble: by :func:`bubble_of`; ``None`` where that does not hold for the schedule.
        """
        ...

    def computing(self) -> AbstractContextManager[None]:
        """Surround one forward or backward pass, or a part of one, that waits for no other stage.

        What a pass needs has come when this is entered, and sending what it gives follows.
        """
        ...


@runtime_checkable
class TimedSchedule(Protocol):
    """A :class:`Schedule` whose passes can be timed.

    Attributes:
        clock: surrounds the steps of training; ``None``, as in all training but a benchmark's:
            nothing is timed.
    """

    clock: PassClock | None


def bubble_of(ranks: int, microbatches: int, virtual: int) -> float:
    """The share of a step that each rank idles while the pipeline fills and drains.

    ``(p - 1) / (m * v + p - 1)`` of the whole step; Narayanan et al., "Efficient Large-Scale
    Language Model Training on GPU Clusters Using Megatron-LM" (2021), section 2.2, set the same
    time beside that of computing, ``(p - 1) / (m * v)``. It holds for GPipe, for 1F1B, and for
    interleaved 1F1B where ``m`` is a multiple of ``p``, if all stages take the same time and
    transfers none.

    Args:
        ranks: ``p``, that hold stages.
        microbatches: ``m``, of the step.
        virtual: ``v``, stages on each rank.
    """
    return (ranks - 1) / (microbatches * virtual + ranks - 1)


def drawing_nothing(inputs: Callable[[], Any], device: torch.device) -> Any:
    """Call ``inputs``, which every stage does for itself.

    Args:
        inputs: makes what the model is given.
        device: where it is made, beside the host.

    Raises:
        ConfigError: it is drawn at random.
    """
    before = torch_generators(device)
    given = inputs()
    if not all(map(torch.equal, before, torch_generators(device))):
        raise ConfigError(
            "the objective's inputs(batch) draws random numbers, and the stages of a pipeline "
            "would draw different ones. Draw them in the dataset, or train without a pipeline."
        )
    return given
