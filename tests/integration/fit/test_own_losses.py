"""Models that compute their own loss train as a plain loop does, over the labels that count."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from unipar import Objective, Session
from unipar.testing.pool import WorldPools
from unipar.world import Placement

pytestmark = pytest.mark.slow

SAMPLES, BATCH, LENGTH, VOCABULARY, CLASSES = 20, 8, 6, 11, 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}


def build(kind: str) -> Any:
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "causal":
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
        sizes: dict[str, Any] = SIZES | {"num_labels": CLASSES}
        return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**sizes))


def data(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of tokens, and labels, of which some are left out, and in one micro-batch all."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    if kind == "causal":
        labels = tokens.clone()
        lengths = torch.randint(0, LENGTH + 1, (SAMPLES,), generator=generator)
        lengths[2:4] = 0
        labels[torch.arange(LENGTH)[None] >= lengths[:, None]] = -100
    else:
        labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
        labels[torch.rand(SAMPLES, generator=generator) < 0.4] = -100
        labels[2:4] = -100
    return tokens, labels


def adamw(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-2, eps=1e-6)


Steps = list[tuple[float, float, float]]


@functools.cache
def expected(kind: str) -> Steps:
    """By the logits of whole batches: the mean over the labels that are not -100."""
    model, (rows, targets), steps = build(kind), data(kind), []
    optimizer = adamw(model.named_parameters())
    for _ in range(2):
        for first in range(0, SAMPLES, BATCH):
            labels = targets[first : first + BATCH]
            logits = model(input_ids=rows[first : first + BATCH]).logits
            if kind == "causal":
                logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            loss = nn.functional.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            steps.append((loss.item(), norm.item(), float((labels != -100).sum())))
    return steps


def train(placement: Placement, strategy: str, kind: str) -> Steps:
    with Session(strategy, device="cpu", placement=placement) as session:
        engine = session.prepare(build(kind), optimizer=adamw, max_grad_norm=0.5)
        loss = Objective.of_model(engine.module)
        pairs = zip(*data(kind), strict=True)
        samples = [{"input_ids": tokens, "labels": labels} for tokens, labels in pairs]
        loader = session.loader(samples, global_batch_size=BATCH, micro_batch_size=2, shuffle=False)
        done = [engine.train_step(batch, loss) for _ in range(2) for batch in loader]
        return [(step.loss, step.grad_norm or 0.0, step.num_items) for step in done]


@pytest.mark.parametrize("kind", ["causal", "classes"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_steps_are_those_of_a_plain_loop(strategy: str, kind: str, world_pool: WorldPools) -> None:
    for done in world_pool(2).run(train, strategy, kind):
        assert done == [pytest.approx(step, rel=1e-5) for step in expected(kind)]
