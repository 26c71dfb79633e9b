"""Evaluation: every sample counted once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from unipar.data.batch import Batch, MicroBatch
from unipar.errors import ConfigError
from unipar.evaluation.metrics import merged
from unipar.loss import LossFn, LossSum
from unipar.objective import Objective
from unipar.strategy import Engine
from unipar.world import World

Predict = Callable[[Any, Any], tuple[Any, Any]]
"""``predict(model, batch) -> (predictions, targets)``.

Or an :class:`unipar.Objective` whose ``loss(output, batch)`` returns these."""


@runtime_checkable
class AccumulatingMetric(Protocol):
    """What torchmetrics calls a metric.

    Those of torchmetrics are reduced over ranks here; others reduce themselves in ``compute``.
    """

    def reset(self) -> None: ...

    def update(self, preds: Any, target: Any) -> None: ...

    def compute(self) -> Any: ...


MetricFn = Callable[[Any, Any], torch.Tensor | LossSum]
"""``metric(predictions, targets)``: a mean over samples, or a :class:`LossSum`."""

Metric = MetricFn | AccumulatingMetric


def evaluate(
    engine: Engine,
    batches: Iterable[Batch],
    loss_fn: LossFn | None,
    world: World,
    *,
    metrics: Mapping[str, Metric] | None = None,
    predict: Predict | None = None,
) -> dict[str, float]:
    """Mean loss and metrics over all samples of all ranks.

    Args:
        engine: the model.
        batches: this rank's share of the evaluation data; the same number on every rank.
        loss_fn: as in training; ``None`` to leave the loss out.
        world: the joined processes.
        metrics: by name, functions of (predictions, targets) or torchmetrics objects.
        predict: makes predictions and targets of a batch. Left out: a batch is a pair
            ``(inputs, targets)``, and the predictions are ``model(inputs)``.

    Returns:
        ``loss`` and each metric by its name.

    Raises:
        ConfigError: a metric is not one number, or nothing says what it compares.
    """
    metrics = dict(metrics or {})
    sums: dict[str, list[float]] = {name: [0.0, 0.0] for name in metrics}
    sums["loss"] = [0.0, 0.0]
    for metric in metrics.values():
        if isinstance(metric, AccumulatingMetric):
            metric.reset()
            if hasattr(metric, "to"):
                metric.to(world.device)  # pyright: ignore[reportAttributeAccessIssue]

    def update(microbatch: MicroBatch, predictions: Any, targets: Any) -> LossSum:
        if microbatch.num_samples:
            for name, metric in metrics.items():
                if isinstance(metric, AccumulatingMetric):
                    metric.update(predictions, targets)
                else:
                    value = metric(predictions, targets)
                    if not isinstance(value, LossSum):
                        value = _number(name, value)
                    _add(sums[name], value, microbatch.num_samples)
        return LossSum(torch.zeros(()), 0)

    def measuring(batch: Batch) -> LossFn:
        """Updates the metrics in place of a loss, which is asked for by micro-batch, in order."""
        parts = iter(batch.microbatches)
        if isinstance(predict, Objective):
            of_output = predict.loss
            return Objective(
                predict.inputs, lambda output, data: update(next(parts), *of_output(output, data))
            )
        return lambda model, data: update(next(parts), *(predict or _predict_pair)(model, data))

    for batch in batches:
        if loss_fn is not None:
            _add(sums["loss"], engine.eval_batch(batch, loss_fn), 0)
        if metrics:
            engine.eval_batch(batch, measuring(batch))

    every = [of_rank for of_rank in world.gather(sums if world.leads else None) if of_rank]
    results: dict[str, float] = {}
    for name in ("loss", *metrics):
        metric = metrics.get(name)
        if isinstance(metric, AccumulatingMetric):
            with merged(metric, world):
                results[name] = _number(name, metric.compute())
            continue
        total, count = (sum(rank[name][i] for rank in every) for i in (0, 1))
        if name != "loss" or loss_fn is not None:
            results[name] = total / count if count else float("nan")
    return results


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        found = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise ConfigError(
            f"metric '{name}' must be one number, and it is a {type(value).__name__} "
            f"({found:.80}). "
            "Return a mean over samples or a unipar.LossSum, and give each of several numbers "
            "(a class's, say) a metric of its own."
        ) from error


def _add(into: list[float], value: float | torch.Tensor | LossSum, num_samples: int) -> None:
    if isinstance(value, LossSum):
        into[0] += float(value.total)
        into[1] += float(value.count)
    else:
        into[0] += float(value) * num_samples
        into[1] += num_samples


def _predict_pair(model: Any, data: Any) -> tuple[Any, Any]:
    if isinstance(data, (tuple, list)) and len(data) == 2:
        return model(data[0]), data[1]
    raise ConfigError(
        f"metrics need predictions and targets, and a batch here is a {type(data).__name__}. "
        "Pass predict=f with f(model, batch) -> (predictions, targets)."
    )
