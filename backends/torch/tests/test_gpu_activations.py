"""What is kept on a GPU for the backward pass, and that its values survive the way to the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from unipar.engine import checkpoint_activations, offload_activations

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none"),
]

WIDTH, ROWS, BLOCKS = 1024, 2048, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def gradients(policy: str, offload: bool) -> tuple[list[torch.Tensor], int]:
    """Of three passes in a row, without waiting between them; and the bytes that one keeps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(*(Block() for _ in range(BLOCKS)))).cuda()
    checkpoint_activations(model, policy)
    offload_activations(model, offload)
    inputs = torch.randn(3, ROWS, WIDTH, device="cuda")
    kept = 0
    for x in inputs:
        before = torch.cuda.memory_allocated()
        loss = model(x).square().mean()
        kept = torch.cuda.memory_allocated() - before
        loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], kept


@pytest.mark.parametrize(
    ("policy", "offload"),
    [("selective", False), ("full", False), ("off", True), ("full", True)],
)
def test_gradients_stay_the_same_and_less_is_kept(policy: str, offload: bool) -> None:
    expected, all_of_it = gradients("off", False)
    found, kept = gradients(policy, offload)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    assert kept < all_of_it


def test_what_is_kept_is_in_order() -> None:
    kept: dict[Any, int] = {
        case: gradients(*case)[1]
        for case in [("off", False), ("selective", False), ("full", False), ("off", True)]
    }
    assert sorted(kept, key=lambda case: -kept[case]) == list(kept)
