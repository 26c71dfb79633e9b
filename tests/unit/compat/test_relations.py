"""What the shapes of what is computed of a whole batch, and of a part, show of a model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from unipar.compat.dividing.relations import Call, Calls, relates

W = torch.randn(4, 4)


def calls(model: Callable[[torch.Tensor], object], x: torch.Tensor) -> list[Call]:
    with Calls() as noted:
        model(x)
    return noted.noted


def outliers(x: torch.Tensor) -> torch.Tensor:
    far = (x @ W).square().mean(1)
    return x * (far < 1e9 * far.mean())[:, None]


def in_place(x: torch.Tensor) -> torch.Tensor:
    found = x @ W
    figures = torch.zeros(4)
    figures += found.detach().std(0)
    found[:, 0] = figures.max()
    return found


def scaled_by_python(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.abs().max().clamp(min=1e9))


def masked_words(x: torch.Tensor) -> torch.Tensor:
    words = (x @ W).softmax(1)
    chosen = x[:, 0] > 0
    if not chosen.any() or chosen.float().sum() == 0 or bool(torch.isnan(words.sum())):
        return words.sum()
    loss = functional.cross_entropy(words[chosen], chosen[chosen].long())
    return loss + 0.1 * words.mean() / chosen.sum()


def lengths(x: torch.Tensor) -> torch.Tensor:
    own = 1 + (x > 0).sum(1)
    places = torch.arange(int(own.max().clamp(min=5)))
    return (x @ W) * (places < own[:, None])[:, :4] + x.new_zeros(4) + torch.zeros_like(x[0])


def normalized(x: torch.Tensor) -> torch.Tensor:
    return functional.batch_norm(functional.layer_norm(x, (4,)), None, None, training=True)


@pytest.mark.parametrize("model", [outliers, in_place, scaled_by_python])
def test_figures_of_a_batch_that_go_into_samples_are_found(
    model: Callable[[torch.Tensor], object],
) -> None:
    x = torch.randn(8, 4)
    assert relates(calls(model, x), calls(model, x[:4]))


@pytest.mark.parametrize("model", [masked_words, lengths, normalized])
def test_losses_masks_lengths_and_checks_are_no_such_figures(
    model: Callable[[torch.Tensor], object],
) -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    assert not relates(calls(model, x), calls(model, x[:4]))


def test_of_other_calls_nothing_is_told() -> None:
    x = torch.randn(8, 4)
    assert not relates(calls(outliers, x), calls(lengths, x[:4]))
