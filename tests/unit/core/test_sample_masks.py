"""Masks of dropout by sample: their formula, and that nothing in them repeats."""

from __future__ import annotations

import itertools

import pytest
import torch

from unipar.engine.sample_masks import Words, dropped, sample_words, words_of
from unipar.testing import masks

HOST = torch.device("cpu")
SEED = 5


def steps(step: int) -> tuple[Words, Words, list[Words]]:
    """The words of a step, and of its calls."""
    numbers = masks.draws(SEED, "model", step, 10)
    first, second, *calls = map(words_of, numbers)
    return first, second, calls


def mask(
    sizes: list[int], *, p: float = 0.5, step: int = 0, call: int = 0, first: int = 0, num: int = 4
) -> torch.Tensor:
    one, two, calls = steps(step)
    return dropped(sample_words(first, num, (one, two), HOST), calls[call], sizes, p)


@pytest.mark.parametrize("sizes", [[1], [1, 7], [5, 8], [1, 3, 6, 6], [2, 1, 1]], ids=str)
@pytest.mark.parametrize("p", [1e-12, 0.1, 0.5, 0.9, 1 - 1e-12])
def test_masks_are_those_of_the_formula(sizes: list[int], p: float) -> None:
    for step, call in ((0, 0), (0, 3), (7, 1)):
        found = mask(sizes, p=p, step=step, call=call)
        expected = masks.dropped(SEED, "model", step, call, (4, *sizes), p)
        assert torch.equal(found, expected)


def test_a_sample_has_the_same_mask_whatever_is_beside_it() -> None:
    whole = mask([3, 8], num=6)
    assert torch.equal(mask([3, 8], first=2, num=3), whole[2:5])
    # Where other samples are longer, it is padded.
    assert torch.equal(mask([9, 20], num=6)[:, :3, :8], whole)


LARGE = [256, 384]


def apart(one: torch.Tensor, other: torch.Tensor, p: float) -> float:
    """How far two masks are from independent, in standard deviations of their correlation."""
    one, other = (x.double().flatten() - p for x in (one, other))
    return float((one * other).mean() / (p * (1 - p)) * one.numel() ** 0.5)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_have_no_pattern(p: float) -> None:
    """In standard deviations, of which hundreds of numbers have 4.5 once in a thousand times."""
    made = {
        (step, call, sample): one
        for step, call in itertools.product(range(3), range(3))
        for sample, one in enumerate(mask(LARGE, p=p, step=step, call=call, num=3))
    }
    found: dict[str, float] = {}
    deviation = (p * (1 - p)) ** 0.5
    for key, one in made.items():
        x = one.double() - p
        found[f"mean {key}"] = float(x.mean() / deviation * x.numel() ** 0.5)
        # The sums of rows and columns are as far apart as those of independent numbers.
        for dim in (0, 1):
            sums = x.sum(dim) / (deviation * x.shape[dim] ** 0.5)
            spread = sums.square().mean() - 1
            found[f"sums along {dim} {key}"] = float(spread * (sums.numel() / 2) ** 0.5)
        for name, shifted in {
            "next column": (one[:, :-1], one[:, 1:]),
            "next row": (one[:-1], one[1:]),
            "next both": (one[:-1, :-1], one[1:, 1:]),
            "next but one": (one[:, :-2], one[:, 2:]),
            "16 on": (one[:, :-16], one[:, 16:]),
            "128 rows on": (one[:-128], one[128:]),
        }.items():
            found[f"{name} {key}"] = apart(*shifted, p)
    for (one, x), (two, y) in itertools.combinations(made.items(), 2):
        found[f"{one} and {two}"] = apart(x, y, p)
    far = {key: round(value, 1) for key, value in found.items() if abs(value) > 5}
    assert not far


def test_pairs_and_runs_are_as_frequent_as_those_of_independentdraws() -> None:
    """Chi-squared of all patterns of eight neighbors, each dropped or not."""
    bits = mask(LARGE, p=0.5, num=8).flatten().view(-1, 8)
    numbers = (bits * torch.tensor([1 << k for k in range(8)])).sum(1)
    counts = torch.bincount(numbers, minlength=256).double()
    expected = len(numbers) / 256
    chi = float(((counts - expected) ** 2 / expected).sum())
    # 255 degrees of freedom: mean 255, standard deviation 22.6.
    assert abs(chi - 255) < 5 * 22.6


def test_two_places_that_agree_in_one_word_differ() -> None:
    """Calls whose first words are equal have unlike masks by their second."""
    one, two, _ = steps(0)
    samples = sample_words(0, 2, (one, two), HOST)
    for other in (0x2468ACE1, -0x13579BDF, 2**31 - 1):
        first = dropped(samples, Words(1, 0x3C6EF372), LARGE, 0.5)
        second = dropped(samples, Words(1, other), LARGE, 0.5)
        assert abs(apart(first, second, 0.5)) < 5
