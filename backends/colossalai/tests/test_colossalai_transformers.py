"""A language model that computes its own loss trains as it does on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unipar import Objective, Session
from unipar.testing.models import Samples, sentences
from unipar.testing.pool import WorldPools
from unipar.world import Placement

pytestmark = pytest.mark.slow


class Tokens(Samples):
    """Token rows as transformers names them, some of their labels left out."""

    def __init__(self) -> None:
        made = sentences(20).columns
        labels = made["labels"].clone()
        # A mean over no label at all is not a number.
        labels[:, 1] = made["tokens"][:, 0]
        super().__init__(input_ids=made["tokens"], labels=labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: self.columns[name][index] for name in ("input_ids", "labels")}


def losses(placement: Placement, strategy: str, attention: str) -> list[float]:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    settings: dict[str, Any] = {**sizes, **rates, **ends, "attn_implementation": attention}
    config = GPT2Config(**settings)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)

    def adamw(named: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in named], lr=1e-2)

    with Session(strategy, device="cpu", placement=placement) as session:
        engine = session.prepare(model, optimizer=adamw, max_grad_norm=1.0)
        loader = session.loader(Tokens(), global_batch_size=6)
        loss = Objective.of_model(engine.module)
        return [engine.train_step(batch, loss).loss for batch in loader]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("plugin", ["ddp", "zero1", "zero2", "fsdp"])
def test_a_model_with_its_own_loss_trains_the_same_run(
    plugin: str, attention: str, world_pool: WorldPools
) -> None:
    expected = world_pool(1).run(losses, "single", attention)[0]
    for own in world_pool(2).run(losses, f"colossalai:plugin={plugin}", attention):
        assert own == pytest.approx(expected, rel=1e-5)
