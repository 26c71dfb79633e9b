"""A byte-level GPT with a mixture of experts in each block, divided among ranks.

python examples/mixture.py --strategy mesh:ep=2 --devices 2
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import unipar
from examples.gpt import GPT, loss
from examples.text import ByteText


class Experts(nn.Module):
    """Feed-forward layers of one shape, each parameter with a row for each of them.

    Args:
        number: of experts.
        width: of tokens.
    """

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.num_experts = number
        self.up = nn.Parameter(torch.randn(number, 2 * width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(number, width, 2 * width) * 0.1 / width**0.5)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Sum over each token's experts.

        Args:
            hidden_states: ``(tokens, width)``.
            top_k_index: the numbers of each token's experts, ``(tokens, k)``.
            top_k_weights: their weights, ``(tokens, k)``.
        """
        total = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            inner = functional.gelu(functional.linear(hidden_states[token], self.up[expert]))
            made = functional.linear(inner, self.down[expert])
            weighted = made * top_k_weights[token, place, None]
            total = total.index_add(0, token, weighted.to(total.dtype))
        return total


class Mixture(nn.Module):
    """Experts, of which a router chooses some for each token.

    Args:
        width: of tokens.
        experts: how many there are.
        k: how many a token is given to.
    """

    def __init__(self, width: int, experts: int = 4, k: int = 2) -> None:
        super().__init__()
        self.k = k
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        probabilities = self.router(tokens).float().softmax(-1)
        weights, index = probabilities.topk(self.k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        return self.experts(tokens, index, weights).view_as(x)


def build(layers: int = 3, width: int = 64, experts: int = 4) -> GPT:
    """A GPT whose feed-forward layers are mixtures."""
    model = GPT(layers, width)
    for block in model.blocks:
        # Its first half only has to hand on what the second one takes.
        block.up, block.down = nn.Identity(), nn.Identity()
    for block in model.blocks:
        block.add_module("down", Mixture(width, experts))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output-dir")
    args = parser.parse_args()

    torch.manual_seed(0)
    result = unipar.fit(
        build(),
        ByteText("train"),
        strategy=args.strategy,
        devices=args.devices,
        loss=loss,
        optimizer={"name": "adamw", "lr": 2e-3},
        max_grad_norm=1.0,
        global_batch_size=16,
        steps=args.steps,
        output_dir=args.output_dir,
    )
    print(f"train_loss {result.metrics['train_loss']:.3f}")


if __name__ == "__main__":
    main()
