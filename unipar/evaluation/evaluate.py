"""Evaluation: every sample counted once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from unipar.data.batch import Batch, MicroBatch
from unipar.errors import ConfigError
from unipar.evaluation.metrics import check_merges, merged
from unipar.evaluation.shared_pass import Arguments, Repeated, joined
from unipar.loss import LossFn, LossSum
from unipar.objective import Objective
from unipar.strategy import Engine
from unipar.world import World

Predict = Callable[[Any, Any], tuple[Any, Any]]
"""``predict(model, batch) -> (predictions, targets)``.

Or an :class:`unipar.Objective` whose ``loss(output, batch)`` returns these."""


@runtime_checkable
class AccumulatingMetric(Protocol):
    """A metric in the sense of torchmetrics.

    On several ranks it is one of torchmetrics, or has ``merge_state(others)``, as torcheval's have.
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
        metrics: by name, functions of (predictions, targets) or :class:`AccumulatingMetric`.
        predict: makes predictions and targets of a batch. Left out: a batch is a pair
            ``(inputs, targets)``, and the predictions are ``model(inputs)``.

    Returns:
        ``loss`` and each metric by its name.

    Raises:
        ConfigError: a metric is not one number, or nothing says what it compares.
    """
    metrics = dict(metrics or {})
    if metrics and world.layout.cp > 1:
        raise ConfigError(
            f"metrics ({', '.join(metrics)}) compare predictions of whole samples, and each rank "
            f"holds a part of every sequence (cp={world.layout.cp}). Evaluate by the loss alone, "
            "or compute metrics of a checkpoint under another strategy: Session.evaluate with "
            "strategy='fsdp'."
        )
    sums = {name: Sums() for name in ("loss", *metrics)}
    for name, metric in metrics.items():
        if isinstance(metric, AccumulatingMetric):
            check_merges(name, metric, world)
            metric.reset()
            if hasattr(metric, "to"):
                metric.to(world.device)  # pyright: ignore[reportAttributeAccessIssue]

    def update(microbatch: MicroBatch, predictions: Any, targets: Any) -> None:
        if microbatch.num_samples:
            for name, metric in metrics.items():
                if isinstance(metric, AccumulatingMetric):
                    metric.update(predictions, targets)
                else:
                    sums[name].add(name, metric(predictions, targets), microbatch.num_samples)

    repeated = _repeated(engine, loss_fn, predict) if metrics else None
    for batch in batches:
        if loss_fn is not None and repeated is not None:
            once = _once(repeated, predict, batch, update)
            sums["loss"].add("loss", engine.eval_batch(batch, once), 0)
            if repeated.undecided:
                repeated.decide(all(world.gather(repeated.equal)))
            continue
        shared = _joined(loss_fn, predict, batch, update) if metrics else None
        if loss_fn is not None:
            sums["loss"].add("loss", engine.eval_batch(batch, shared or loss_fn), 0)
        if metrics and shared is None:
            engine.eval_batch(batch, _measuring(predict, batch, update))

    own = read([part for one in sums.values() for part in (one.total, one.count)], world.device)
    every = [of_rank for of_rank in world.gather(own if world.leads else None) if of_rank]
    results: dict[str, float] = {}
    for i, name in enumerate(sums):
        metric = metrics.get(name)
        if isinstance(metric, AccumulatingMetric):
            with merged(metric, world) as whole:
                results[name] = _number(name, whole.compute())
            continue
        total, count = (sum(rank[2 * i + part] for rank in every) for part in (0, 1))
        if name != "loss" or loss_fn is not None:
            results[name] = total / count if count else float("nan")
    if any(isinstance(metric, AccumulatingMetric) for metric in metrics.values()):
        # What ranks compute may differ by rounding, and all of them act on it alike.
        return world.broadcast(results)
    return results


# -- running the model ---------------------------------------------------------------------------

Update = Callable[[MicroBatch, Any, Any], None]


def _joined(
    loss_fn: LossFn | None, predict: Predict | None, batch: Batch, update: Update
) -> Objective | None:
    """The one pass for loss and metrics of two objectives, if they call the model alike."""
    if not (isinstance(loss_fn, Objective) and isinstance(predict, Objective)):
        return None
    parts = iter(batch.microbatches)
    return joined(loss_fn, predict, lambda *found: update(next(parts), *found))


def _repeated(engine: Engine, loss_fn: LossFn | None, predict: Predict | None) -> Repeated | None:
    """The one pass for a loss and metrics that say what they call the model with."""
    if loss_fn is None or not (predict is None or isinstance(predict, Objective)):
        return None
    if isinstance(loss_fn, Objective) and predict is not None:
        return None
    arguments = _pair_arguments if predict is None else predict.arguments
    return Repeated(loss_fn, arguments, watch=not engine.spec.compile)


def _once(repeated: Repeated, predict: Predict | None, batch: Batch, update: Update) -> LossFn:
    parts = iter(batch.microbatches)

    def loss_fn(model: Any, data: Any) -> Any:
        microbatch = next(parts)
        loss, output = repeated.run(model, microbatch.data, data)
        found = predict.loss(output, data) if isinstance(predict, Objective) else (output, data[1])
        update(microbatch, *found)
        return loss

    return loss_fn


def _measuring(predict: Predict | None, batch: Batch, update: Update) -> LossFn:
    """Updates the metrics in place of a loss, which is asked for by micro-batch, in order."""
    parts = iter(batch.microbatches)
    nothing = LossSum(torch.zeros(()), 0)

    def of_output(output: Any, data: Any) -> LossSum:
        assert isinstance(predict, Objective)
        update(next(parts), *predict.loss(output, data))
        return nothing

    def of_model(model: Any, data: Any) -> LossSum:
        update(next(parts), *(predict or _predict_pair)(model, data))
        return nothing

    return Objective(predict.inputs, of_output) if isinstance(predict, Objective) else of_model


def _pair_arguments(data: Any) -> Arguments:
    if isinstance(data, (tuple, list)) and len(data) == 2:
        return (data[0],), {}
    raise ConfigError(
        f"metrics need predictions and targets, and a batch here is a {type(data).__name__}. "
        "Pass predict=f with f(model, batch) -> (predictions, targets)."
    )


def _predict_pair(model: Any, data: Any) -> tuple[Any, Any]:
    args, _ = _pair_arguments(data)
    return model(*args), data[1]


# -- sums ----------------------------------------------------------------------------------------


class Sums:
    """A sum over items, and their number, added up where they are: on the device or the host."""

    def __init__(self) -> None:
        self.total: torch.Tensor | float = 0.0
        self.count: torch.Tensor | float = 0.0

    def add(self, name: str, value: float | torch.Tensor | LossSum, num_samples: int) -> None:
        """Add a sum with its count, or a mean over samples."""
        if isinstance(value, LossSum):
            self.total = self.total + _double(name, value.total)
            self.count = self.count + _double(name, value.count)
        else:
            self.total = self.total + _double(name, value) * num_samples
            self.count = self.count + num_samples


def read(values: list[torch.Tensor | float], device: torch.device) -> list[float]:
    """Scalars on the host, those of the device by one copy."""
    there = [value.to(device) for value in values if isinstance(value, torch.Tensor)]
    found = iter(torch.stack(there).tolist() if there else ())
    return [next(found) if isinstance(value, torch.Tensor) else value for value in values]


def _double(name: str, value: Any) -> torch.Tensor | float:
    """A scalar in float64, where it is: nothing waits for the device."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().reshape(()).to(torch.float64)
    return _number(name, value)


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
