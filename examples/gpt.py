"""A byte-level GPT on the text of Python's standard library.

python examples/gpt.py --strategy ddp --devices 2
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import unipar
from examples.text import ByteText


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm and added to its input.

    What is added starts small, so that a deep stack begins as little more than its embeddings.
    """

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm_feed = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        for last in (self.proj, self.down):
            nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * layers))
            nn.init.zeros_(last.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.norm_feed(x))))


class GPT(nn.Module):
    """A decoder over bytes; input and output embeddings are tied.

    Args:
        layers: number of blocks.
        width: size of the residual stream.
        heads: attention heads; divides ``width``.
        length: the longest input, in bytes.
    """

    def __init__(
        self, layers: int = 5, width: int = 128, heads: int = 4, length: int = 128
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads, layers) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.1)
        self.head.weight = self.tokens.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.tokens(inputs) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(layers: int = 5, width: int = 128, heads: int = 4, length: int = 128) -> GPT:
    """About a million parameters as it stands; ten with ``layers=13, width=256``."""
    return GPT(layers, width, heads, length)


def loss(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of the next byte, in nats."""
    inputs, targets = batch
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


parts = unipar.Objective(
    inputs=lambda batch: (batch[0],),
    loss=lambda logits, batch: functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten()),
)
"""The same loss in its parts, as a pipeline takes it."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--output-dir")
    args = parser.parse_args()

    torch.manual_seed(0)
    result = unipar.fit(
        GPT(layers=args.layers, width=args.width),
        ByteText("train"),
        strategy=args.strategy,
        devices=args.devices,
        precision=args.precision,
        loss=loss,
        optimizer="adamw",
        lr_scheduler={"name": "onecyclelr", "max_lr": 2e-3, "total_steps": args.steps},
        max_grad_norm=1.0,
        global_batch_size=16,
        steps=args.steps,
        eval_data=ByteText("eval", max_bytes=100_000),
        output_dir=args.output_dir,
    )
    print(f"evaluation loss {result.metrics['loss']:.3f} nats a byte; run in {result.output_dir}")


if __name__ == "__main__":
    main()
