"""Small language models, sentences for them, and the plain loop that their runs have to equal.

Nothing of unipar is imported here: one process, whole global batches in their order, the loss as
the mean over all labels that count.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

VOCABULARY, LENGTH, BATCH, SAMPLES = 11, 8, 8, 52
CLIP = 0.5

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    # From small weights, steps of this rate jump about, and roundings with them.
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    # A block that is computed again would append to it again.
    "use_cache": False,
}


def language_model(kind: str = "Llama", *, seed: int = 0, **settings: Any) -> Any:
    """A model with a vocabulary that does not divide.

    Args:
        kind: the name of the architecture in transformers.
        seed: of the weights.
        settings: of the configuration.
    """
    import transformers

    model = getattr(transformers, f"{kind}ForCausalLM")
    config = getattr(transformers, f"{kind}Config")(**{**_SIZES, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model(config)


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens whose first labels are left out; one row in nine has none at all.

    The last two tokens of every third row are masked.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
        self.labels = self.tokens.clone()
        for i, row in enumerate(self.labels):
            row[: LENGTH if i % 9 == 4 else i % 6] = -100
        self.mask = torch.ones_like(self.tokens)
        self.mask[::3, -2:] = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int | slice) -> dict[str, torch.Tensor]:
        return {
            "input_ids": self.tokens[index],
            "labels": self.labels[index],
            "attention_mask": self.mask[index],
        }


def adamw(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    named = [(name, p) for name, p in named if p.requires_grad]
    flat = [p for name, p in named if "norm" in name or name.endswith("bias")]
    deep = [p for name, p in named if not ("norm" in name or name.endswith("bias"))]
    groups = [{"params": deep}, {"params": flat, "weight_decay": 0.0, "lr": 5e-3}]
    # A key's bias has no gradient but rounding's, of which the default's `eps` makes whole steps.
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, eps=1e-4)


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)


class Step(NamedTuple):
    loss: float
    grad_norm: float
    num_items: float


def entropy(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed loss of labels, each predicted from the tokens before it, and their number."""
    labels = batch["labels"][:, 1:].flatten()
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    total = nn.functional.cross_entropy(
        output.logits[:, :-1].flatten(0, 1).float(), labels, ignore_index=-100, reduction="sum"
    )
    return total, (labels != -100).sum()


def plain_loop(model: Any, steps: int) -> list[Step]:
    """Train on the sentences in their order, epoch after epoch, the last batch being smaller."""
    data = Sentences()
    optimizer = adamw(model.named_parameters())
    scheduler = schedule(optimizer)
    done: list[Step] = []
    while True:
        for start in range(0, SAMPLES, BATCH):
            total, count = entropy(model, data[start : start + BATCH])
            loss = total / count
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            done.append(Step(loss.item(), norm.item(), count.item()))
            if len(done) == steps:
                return done
