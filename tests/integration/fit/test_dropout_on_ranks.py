"""A run with dropout has the losses of a hand-written loop, on any number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import fit_in_world
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from unipar.data.order import epoch_order
from unipar.testing import masks
from unipar.testing.pool import WorldPools

VOCABULARY, LENGTH, WIDTH, HEADS, BATCH, SAMPLES, STEPS = 11, 6, 16, 2, 8, 20, 7
"""An epoch is two global batches and a ragged one of four."""
TOLERANCE = 1e-5


def tokens() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def attend(self, q: Any, k: Any, v: Any) -> torch.Tensor:
        p = 0.2 if self.training else 0.0
        return functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)

    def drop(self, x: torch.Tensor, p: float) -> torch.Tensor:
        return functional.dropout(x, p, self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        shape = rows, length, HEADS, -1
        q, k, v = (y.view(shape).transpose(1, 2) for y in self.qkv(self.before(x)).chunk(3, -1))
        attended = self.attend(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + self.drop(self.out(attended), 0.1)
        hidden = self.drop(functional.gelu(self.up(self.between(x))), 0.3)
        return x + self.down(hidden)


class Transformer(nn.Module):
    def __init__(self, layer: Callable[[], Layer] = Layer) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.outward = nn.Linear(WIDTH, VOCABULARY)

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, 0.1, self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.tokens(x))
        for layer in self.layers:
            x = layer(x)
        # Tokens as rows.
        return self.outward(self.drop(x.flatten(0, 1)))


class Place:
    """Where the hand-written loop is."""

    step, call = 0, 0

    def drop(self, x: torch.Tensor, p: float, rows: int) -> torch.Tensor:
        """``x`` of shape (samples, ...), or (samples * rows, ...)."""
        shape = len(x) // rows, rows, *x.shape[1:]
        gone = masks.dropped(0, "model", self.step, self.call, shape, p).view_as(x)
        self.call += 1
        return torch.where(gone, 0.0, x / (1 - p))


class LayerByHand(Layer):
    place: Place

    def attend(self, q: Any, k: Any, v: Any) -> torch.Tensor:
        scores = q @ k.mT / q.shape[-1] ** 0.5
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        return self.place.drop(scores.masked_fill(hidden, -torch.inf).softmax(-1), 0.2, 1) @ v

    def drop(self, x: torch.Tensor, p: float) -> torch.Tensor:
        return self.place.drop(x, p, 1)


class TransformerByHand(Transformer):
    def __init__(self, place: Place) -> None:
        super().__init__(LayerByHand)
        self.place = place
        for layer in self.layers:
            assert isinstance(layer, LayerByHand)
            layer.place = place

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        return self.place.drop(x, 0.1, LENGTH if x.ndim == 2 else 1)


def build(make: Callable[[], nn.Module] = Transformer) -> nn.Module:
    torch.manual_seed(3)
    return make()


def next_token(model: Any, batch: Any) -> torch.Tensor:
    (rows,) = batch
    return functional.cross_entropy(model(rows[:, :-1]), rows[:, 1:].flatten())


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for _, p in named], lr=3e-3, eps=1e-6)


def order() -> Iterator[torch.Tensor]:
    for epoch in itertools.count():
        yield from epoch_order(SAMPLES, seed=0, epoch=epoch, shuffle=True).split(BATCH)


def by_hand() -> list[float]:
    """Losses of a plain loop over whole global batches, with masks from the documented formula."""
    place = Place()
    model = build(lambda: TransformerByHand(place))
    optimizer, data = adam(model.named_parameters()), tokens()
    losses = []
    for step, indices in enumerate(itertools.islice(order(), STEPS)):
        place.step, place.call = step, 0
        loss = next_token(model, data[indices])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses_of(
    world_pool: WorldPools, size: int, directory: Path, model: Any = build, **changes: Any
) -> list[float]:
    settings: dict[str, Any] = {
        "loss": next_token,
        "optimizer": adam,
        "dropout_seed": "sample",
        "steps": STEPS,
        **changes,
    }
    task = partial(fit_in_world, directory=directory, model=model, samples=tokens(), **settings)
    return [record.loss for record in world_pool(size).run(task)[0].history]


def test_a_transformer_has_the_losses_of_a_hand_written_loop(
    world_pool: WorldPools, tmp_path: Path
) -> None:
    found = losses_of(world_pool, 2, tmp_path, strategy="ddp", micro_batch_size=3)
    assert found == pytest.approx(by_hand(), rel=TOLERANCE)


@pytest.mark.thorough
@pytest.mark.parametrize("accumulates", [False, True], ids=["whole", "accumulated"])
@pytest.mark.parametrize("policy", ["off", "full", "selective"])
@pytest.mark.parametrize(
    ("strategy", "size"),
    [("single", 1), ("ddp", 2), ("fsdp", 2), ("ddp", 3), ("fsdp", 4), ("mesh:dp_replicate=2", 4)],
)
def test_any_strategy_and_number_of_ranks_has_them(
    world_pool: WorldPools, tmp_path: Path, strategy: str, size: int, policy: str, accumulates: bool
) -> None:
    found = losses_of(
        world_pool,
        size,
        tmp_path,
        strategy=strategy,
        micro_batch_size=1 if accumulates else None,
        activation_checkpointing=policy,
    )
    assert found == pytest.approx(by_hand(), rel=TOLERANCE)


@pytest.mark.thorough
def test_unequal_shares_and_workers_have_them(world_pool: WorldPools, tmp_path: Path) -> None:
    found = losses_of(
        world_pool, 2, tmp_path, strategy="ddp", shares=[3, 1], num_workers=1, micro_batch_size=2
    )
    assert found == pytest.approx(by_hand(), rel=TOLERANCE)


@pytest.mark.thorough
def test_a_run_goes_on_elsewhere_with_the_same_losses(
    world_pool: WorldPools, tmp_path: Path
) -> None:
    """Within an epoch, on other numbers of ranks, under other strategies."""
    found: list[float] = []
    stages = [(2, "ddp", 2), (4, "fsdp", 5), (1, "single", STEPS)]
    for size, strategy, steps in stages:
        found += losses_of(
            world_pool,
            size,
            tmp_path,
            strategy=strategy,
            steps=steps,
            checkpoint={"directory": tmp_path / "saved"},
            resume="auto",
        )
    assert found == pytest.approx(by_hand(), rel=TOLERANCE)


def bert() -> nn.Module:
    """Dropout of embeddings, attention weights and hidden units, as transformers has it."""
    import transformers

    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=32,
        max_position_embeddings=LENGTH + 1,
    )
    config.num_labels = 3
    return transformers.BertForSequenceClassification(config)


def classes(model: Any, batch: Any) -> torch.Tensor:
    (rows,) = batch
    seen = rows[:, 1:] > 1
    logits = model(input_ids=rows[:, 1:], attention_mask=seen.long()).logits
    return functional.cross_entropy(logits, rows[:, 0] % 3)


@pytest.mark.thorough
@pytest.mark.parametrize(("strategy", "size"), [("ddp", 2), ("fsdp", 3), ("ddp", 4)])
def test_a_model_of_transformers_has_those_of_one_process(
    world_pool: WorldPools, tmp_path: Path, strategy: str, size: int
) -> None:
    pytest.importorskip("transformers")
    one, other = (
        losses_of(world_pool, ranks, tmp_path / str(ranks), bert, loss=classes, **changes)
        for ranks, changes in (
            (1, {"strategy": "single"}),
            (size, {"strategy": strategy, "micro_batch_size": 2}),
        )
    )
    assert other == pytest.approx(one, rel=TOLERANCE)
    # Dropout is in them.
    without = losses_of(
        world_pool, 1, tmp_path / "rank", bert, loss=classes, strategy="single", dropout_seed="rank"
    )
    assert without != pytest.approx(one, rel=1e-3)
