"""Models of transformers behind PyTorch's face: divided among ranks, and as on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_scripts import check, plainly, train
from torch import nn

WORDS, KINDS = 11, 3
SMALL: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 12,
}  # fmt: skip
DECODER: dict[str, Any] = {**SMALL, "num_key_value_heads": 1, "use_cache": False}


def build(name: str) -> tuple[nn.Module, str]:
    """A model, and what its samples are."""
    import transformers

    hub: Any = transformers
    torch.manual_seed(1)
    if name == "gpt2":
        config = hub.GPT2Config(
            vocab_size=WORDS, n_embd=8, n_layer=1, n_head=2, n_positions=16, use_cache=False,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return hub.GPT2LMHeadModel(config), "texts"
    if name == "llama":
        return hub.LlamaForCausalLM(hub.LlamaConfig(**DECODER)), "texts"
    if name == "mixtral":
        return hub.MixtralForCausalLM(hub.MixtralConfig(**DECODER, num_local_experts=2)), "texts"
    if name == "bert":
        config = hub.BertConfig(**SMALL, num_labels=KINDS)
        return hub.BertForSequenceClassification(config), "kinds"
    if name == "t5":
        config = hub.T5Config(
            vocab_size=WORDS, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2,
            use_cache=False, decoder_start_token_id=0,
        )  # fmt: skip
        return hub.T5ForConditionalGeneration(config), "texts"
    if name == "vit":
        small = {key: value for key, value in SMALL.items() if key != "vocab_size"}
        config = hub.ViTConfig(**small, num_labels=KINDS, image_size=8, patch_size=4)
        return hub.ViTForImageClassification(config), "pictures"
    config = hub.ResNetConfig(
        num_labels=KINDS, embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1]
    )
    return hub.ResNetForImageClassification(config), "pictures"


def batch(samples: str, number: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(number)
    kinds = torch.randint(KINDS, (8,), generator=draw)
    if samples == "pictures":
        return {"pixel_values": torch.randn(8, 3, 8, 8, generator=draw), "labels": kinds}
    words = torch.randint(WORDS, (8, 6), generator=draw)
    there = torch.ones_like(words)
    there[::2, 4:] = 0
    labels = kinds if samples == "kinds" else words.masked_fill(there == 0, -100)
    return {"input_ids": words, "attention_mask": there, "labels": labels}


def trained(name: str) -> list[float]:
    model, samples = build(name)

    def loss_of(model: nn.Module, number: torch.Tensor) -> torch.Tensor:
        return model(**batch(samples, int(number))).loss

    return train(model, loss_of, list(torch.arange(5)))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "bert", "t5", "vit", "resnet"])
def test_models_are_divided_and_train_as_on_one_process(world_pool: Any, name: str) -> None:
    check(world_pool(2).run(plainly, "ddp", trained, name), lambda: trained(name))
