"""The scenarios of the kit: each is everything that a run depends on, but for who runs it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from unipar.data import Loader, slicing_of
from unipar.loss import Loss, LossFn, LossSum
from unipar.objective import Objective
from unipar.strategy import ActivationCheckpointing, DropoutSeed, EngineSpec, OnNaN, Precision
from unipar.testing import models, reference
from unipar.testing.models import Samples
from unipar.testing.reference import MakeSeveral, Terms, Trace

HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LOSS_SCALE = 2.0**10
"""Of the reference in fp16, where gradients underflow without; small enough not to overflow."""

NUM_SAMPLES = 66
"""Four global batches of 16, and a ragged fifth of 2, which leaves ranks of four without any."""
AN_EPOCH_AND_MORE = 7
"""Steps that meet all of an epoch, and batches after a ragged one."""


points = functools.partial(models.points, NUM_SAMPLES)


def adamw(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    return AdamW([p for _, p in named if p.requires_grad], lr=5e-3, eps=1e-6)


def sgd(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    return SGD([p for _, p in named if p.requires_grad], lr=0.1, momentum=0.9)


def plain_sgd(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """It takes sparse gradients too."""
    return SGD([p for _, p in named], lr=0.1)


def grouped(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """Biases and norms without decay, and the output layer at a tenth of the learning rate."""
    named = list(named)
    last = [p for name, p in named if name.startswith("outward")]
    plain = [p for name, p in named if p.ndim == 1 and not name.startswith("outward")]
    decayed = [p for name, p in named if p.ndim > 1 and not name.startswith("outward")]
    return AdamW(
        [
            {"params": decayed, "weight_decay": 0.1},
            {"params": plain, "weight_decay": 0.0},
            {"params": last, "lr": 5e-4, "betas": (0.8, 0.95)},
        ],
        lr=5e-3,
        eps=1e-6,
    )


def warmup_and_decay(optimizer: Optimizer) -> LRScheduler:
    """A different learning rate in every step, so that one step too many or too few is seen."""
    return LambdaLR(optimizer, _warmup_and_decay)


def _warmup_and_decay(step: int) -> float:
    return min(1.0, (step + 1) / 4) * (1.0 - step / 40)


def on_plateau(optimizer: Optimizer) -> LRScheduler:
    """Half the learning rate after each two metrics in a row that are no better."""
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=1)


def classify(model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    return of_logits(model(batch["x"]), batch)


def predict_tokens(model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    logits, labels = model(batch["tokens"]), batch["labels"]
    total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, (labels != -100).sum()


def predict_next(model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    """What :class:`unipar.testing.models.LongDecoder` computes itself."""
    logits, labels = model(batch["tokens"])[:, :-1], batch["labels"][:, 1:]
    total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, (labels != -100).sum()


def own_loss_inputs(batch: Any) -> dict[str, Any]:
    """A batch as it is given to a model that computes its own loss."""
    return {name: batch[name] for name in ("tokens", "labels", "shift_labels") if name in batch}


def num_shifted(batch: Any) -> torch.Tensor:
    """The labels that such a loss is over."""
    labels = batch["labels"][:, 1:] if "shift_labels" not in batch else batch["shift_labels"]
    return (labels != -100).sum()


def predict_with_routers(model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    """:func:`predict_tokens`, and a tenth of what routers cost for the same tokens."""
    labels, output = batch["labels"], model(batch["tokens"])
    counted = labels != -100
    total = functional.cross_entropy(
        output["logits"].flatten(0, 1), labels.flatten(), reduction="sum"
    )
    return total + 0.1 * (output["router"] * counted).sum(), counted.sum()


def mean_over_tokens(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    """Return the mean over tokens of what :func:`predict_tokens` sums; NaN where there are none."""
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def pass_dict(model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    return of_logits(model({"x": batch["x"], "factors": [2.0]}), batch)


def pass_tuple(model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    return of_logits(model((batch["x"], 2.0)), batch)


def pass_keywords(model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    return of_logits(model(x=batch["x"], factor=2.0)["logits"], batch)


def of_logits(logits: torch.Tensor, batch: Any) -> tuple[torch.Tensor, Any]:
    """The loss of points, or of sequences of points."""
    labels = batch["y"].flatten()
    return functional.cross_entropy(logits.flatten(0, -2), labels, reduction="sum"), len(labels)


class _Called(Exception):
    """The model was called with these arguments."""


def in_parts(terms: Terms, *, weighted: bool) -> Objective:
    """The loss that ``terms`` computes, which calls the model once, in its parts."""

    def inputs(batch: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            assert not (args and kwargs), "an objective passes arguments of one kind"
            raise _Called(args or kwargs)

        try:
            terms(called, batch)
        except _Called as found:
            return found.args[0]
        raise AssertionError("the loss does not call the model")

    def loss(output: Any, batch: Any) -> Loss:
        total, count = terms(lambda *_, **__: output, batch)
        return LossSum(total, count) if weighted else total / count

    return Objective(inputs, loss)


def watched(
    loss_fn: LossFn, see: Callable[[], Any], change: Callable[[Any], Any] = lambda loss: loss
) -> LossFn:
    """The same loss, seen before the model is called, and changed afterwards."""

    def whole(model: Any, batch: Any) -> Loss:
        see()
        return change(loss_fn(model, batch))

    if not isinstance(loss_fn, Objective):
        return whole
    parts = loss_fn

    def inputs(batch: Any) -> Any:
        see()
        return parts.inputs(batch)

    return replace(parts, inputs=inputs, loss=lambda o, b: change(parts.loss(o, b)))


@dataclass(frozen=True)
class Scenario:
    """A run: the same for the reference and for every strategy and world size.

    Attributes:
        terms: the loss as a sum over items and their count, as the reference takes it.
        weighted: whether a strategy is given ``LossSum(*terms)``; otherwise it gets their quotient,
            which must then be a mean over samples.
        objective: what a strategy is given instead, the same loss in its parts.
        accumulation: micro-batches of a full global batch.
        unequal: whether the first share of a global batch is three times as large as each other.
        factory: give the strategy a function that builds the model, not the model.
        experts: whether the model has a mixture of experts besides.
        by_hand: where ``optimizer`` and ``scheduler`` are several in one, the same as the reference
            takes them.
    """

    model: Callable[[], nn.Module] = models.Network
    data: Callable[[], Samples] = points
    terms: Terms = classify
    weighted: bool = False
    objective: Objective | None = None
    optimizer: Callable[..., Optimizer] = adamw
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    num_steps: int = 20
    global_batch_size: int = 16
    accumulation: int = 1
    unequal: bool = False
    precision: Precision = "fp32"
    max_grad_norm: float | None = math.inf
    on_nan: OnNaN = "raise"
    activation_checkpointing: ActivationCheckpointing = "off"
    activation_offload: bool = False
    compile_backend: str | None = None
    factory: bool = False
    experts: bool = False
    by_hand: MakeSeveral | None = None
    dropout_seed: DropoutSeed = "rank"
    seed: int = 0
    leave_out: frozenset[int] = field(default=frozenset())

    def build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self.make()

    def make(self) -> nn.Module:
        """The model, of whatever the random generator gives."""
        return models.with_experts(self.model()) if self.experts else self.model()

    def spec(self, data_size: int) -> EngineSpec:
        """Make the spec that a strategy on ``data_size`` ranks is given."""
        return EngineSpec(
            model=self.make if self.factory else self.build(),
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            precision=self.precision,
            max_grad_norm=self.max_grad_norm,
            activation_checkpointing=self.activation_checkpointing,
            activation_offload=self.activation_offload,
            compile={"backend": self.compile_backend} if self.compile_backend else False,
            on_nan=self.on_nan,
            seed=self.seed,
            dropout_seed=self.dropout_seed,
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size(data_size),
            accumulation=self.accumulation,
        )

    def in_sequences(self) -> Scenario:
        """The scenario on sequences, if its samples have none: of points, each counted by itself.

        Its model computes each position alike.
        """
        columns = self.data().columns
        if "x" not in columns or columns["x"].ndim > 2:
            return self
        data = functools.partial(models.in_sequences, self.data)
        return replace(self, data=data, weighted=True)

    def shares(self, data_size: int) -> list[int] | None:
        return [3, *[1] * (data_size - 1)] if self.unequal else None

    def micro_batch_size(self, data_size: int) -> int:
        shares = self.shares(data_size)
        whole = slicing_of(self.global_batch_size, None, 0, data_size, shares).micro_batch_size
        return math.ceil(whole / self.accumulation)

    def loader(self, data_rank: int, data_size: int, *, shuffle: bool = True) -> Loader:
        return Loader(
            self.data(),
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size(data_size),
            data_rank=data_rank,
            data_size=data_size,
            shares=self.shares(data_size),
            seed=self.seed,
            shuffle=shuffle,
            num_workers=0,
        )

    @property
    def loss(self) -> LossFn:
        """The loss that a strategy is given."""
        return self.objective or self._loss

    def _loss(self, model: Any, batch: Any) -> Loss:
        total, count = self.terms(model, batch)
        return LossSum(total, count) if self.weighted else total / count

    def order(self) -> list[list[int]]:
        """The indices of the samples of each global batch, as one process sees them."""
        loader = replace(self, accumulation=1).loader(0, 1)
        batches: list[list[int]] = []
        while len(batches) < self.num_steps:
            for batch in loader:
                (microbatch,) = batch
                batches.append(microbatch.data["index"].tolist())
        return batches[: self.num_steps]


def reference_trace(
    scenario: Scenario, *, parts: int = 1, half_weights: bool = False, device: str = "cpu"
) -> Trace:
    """The reference's run of ``scenario``; computed once for all strategies and world sizes.

    Args:
        scenario: what is run.
        parts: how many parts each global batch is computed in, as ranks compute it. In exact
            arithmetic their number makes no difference.
        half_weights: compute in half precision with half-precision weights, and not by autocast.
        device: the type of the device that computes.
    """
    return _reference_trace(
        replace(
            scenario,
            accumulation=1,
            unequal=False,
            weighted=False,
            objective=None,
            factory=False,
            activation_checkpointing="off",
            activation_offload=False,
            dropout_seed="rank",
            compile_backend=None,
            on_nan="raise",
        ),
        parts,
        half_weights,
        device,
    )


@functools.cache
def _reference_trace(scenario: Scenario, parts: int, half_weights: bool, device: str) -> Trace:
    data = scenario.data()
    dtype = HALF_DTYPES.get(scenario.precision)
    clip = scenario.max_grad_norm
    return reference.train(
        scenario.build(),
        [
            [data.batch(part.tolist()) for part in np.array_split(indices, parts) if len(part)]
            for indices in scenario.order()
        ],
        scenario.terms,
        scenario.optimizer,
        make_scheduler=scenario.scheduler,
        make_several=scenario.by_hand,
        max_grad_norm=None if clip is None or math.isinf(clip) else clip,
        autocast=None if half_weights else dtype,
        half_weights=dtype if half_weights else None,
        leave_out=scenario.leave_out,
        device=device,
        loss_scale=LOSS_SCALE if dtype is torch.float16 else 1.0,
    )
