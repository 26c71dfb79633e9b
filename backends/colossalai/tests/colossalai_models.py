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


_SHAPE = {"num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 16}
_LLAMA = {
    **_SHAPE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
_GPT2 = {
    **_SHAPE,
    "hidden_size": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "initializer_range": 0.1,
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}
_BLOOM = {
    "n_layer": 3,
    "n_head": 4,
    "hidden_size": 16,
    "initializer_range": 0.1,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA),
    "Mistral": ("MistralForCausalLM", "MistralConfig", _LLAMA),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _LLAMA | {"sliding_window": 4}),
    "GPT2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "GPTJ": ("GPTJForCausalLM", "GPTJConfig", _GPT2 | {"rotary_dim": 4}),
    "Bloom": ("BloomForCausalLM", "BloomConfig", _BLOOM),
}
"""Classes of transformers, and sizes by which every dimension but the vocabulary divides.

Weights are larger than the defaults': from small ones, steps of this rate jump about, and the plain
loop itself, cut into micro-batches, differs from the whole one by more than is allowed here.
"""
_TIED = {"initializer_range": 0.15}
"""Embeddings that are tied need more for that: from 0.1 the cut loop is 5e-6 off at the tenth step,
half of what is allowed, from this 3e-7."""


def language_model(kind: str = "Llama", *, seed: int = 0, **settings: Any) -> Any:
    """A model with a vocabulary that does not divide.

    Args:
        kind: one of ``KINDS``.
        seed: of the weights.
        settings: of the configuration.
    """
    import transformers

    model, config, sizes = KINDS[kind]
    if settings.get("tie_word_embeddings"):
        sizes = sizes | _TIED
    given = {"vocab_size": VOCABULARY, "attn_implementation": "eager", **sizes, **settings}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return getattr(transformers, model)(getattr(transformers, config)(**given))


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens whose first labels are left out; one row in nine has none at all.

    Two tokens of every third row are masked: the first, or the last.
    """

    def __init__(self, samples: int = SAMPLES, *, mask_last: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)
        self.labels = self.tokens.clone()
        for i, row in enumerate(self.labels):
            row[: LENGTH if i % 9 == 4 else i % 6] = -100
        self.mask = torch.ones_like(self.tokens)
        self.mask[::3, slice(-2, None) if mask_last else slice(2)] = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int | slice) -> dict[str, torch.Tensor]:
        return {
            "input_ids": self.tokens[index],
            "labels": self.labels[index],
            "attention_mask": self.mask[index],
        }


def adamw(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    named = list(named)
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


def inputs(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What goes into a model that is to give logits alone."""
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def entropy(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed loss of labels, each predicted from the tokens before it, and their number."""
    return entropy_of(model(**inputs(batch)), batch)


def entropy_of(output: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, of the model's output."""
    labels = batch["labels"][:, 1:].flatten()
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
