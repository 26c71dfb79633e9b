"""Masks of dropout that depend on a sample and on nothing of where it is computed.

Whether element ``(i_1, …, i_n)`` of a sample is dropped by a call of dropout follows from two words
of the sample, two of the call, and its coordinates, all in arithmetic modulo 2**32::

    x  = (i_1 * G**1 + … + i_n * G**n) ^ sample_0 ^ call_0
    x ^= x >> 16;  x *= M_1;  x ^= sample_1 ^ call_1
    x ^= x >> 13;  x *= M_2
    dropped: x, as a signed number, is less than (p - 1/2) * 2**32

The multiplications and shifts are those of MurmurHash3's ``fmix32``; what the last shift would
change does not reach the bits that decide. A sample's words are the whole ``fmix32``, with a word
of the step between the multiplications, of its place in the global batch.

Coordinates, not an index in memory: how long the other samples of a batch are padded does not
matter. Integers of 32 bits, since every device multiplies them fast; and elementwise operations
alone, since a generator for each sample would be a kernel for each.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

_G, _M1, _M2 = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35


class Words(NamedTuple):
    """Two words of 32 bits: of samples, tensors of shape (samples,), int32; of a call, numbers."""

    first: torch.Tensor | int
    second: torch.Tensor | int


def words_of(number: int) -> Words:
    """Cut a number below 2**63 into two words."""
    return Words(_signed(number), _signed(number >> 32))


def sample_words(
    first: int, num_samples: int, steps: tuple[Words, Words], device: torch.device
) -> Words:
    """Words of samples that follow one another in a global batch.

    Args:
        first: place of the first of them, from 0.
        num_samples: how many there are.
        steps: words of the step, for each of the two words of a sample.
        device: where masks are made.
    """
    places = torch.arange(first, first + num_samples, dtype=torch.int32, device=device)
    made = [_mixed(places ^ step.first, step.second) for step in steps]
    return Words(*(_fold(one, 16) for one in made))


def dropped(samples: Words, call: Words, sizes: Sequence[int], p: float) -> torch.Tensor:
    """Which elements a call drops.

    Args:
        samples: words of the samples.
        call: words of the call.
        sizes: of the dims of a sample.
        p: the probability, between 0 and 1.

    Returns:
        A bool tensor of shape (samples, *sizes).
    """
    assert isinstance(samples.first, torch.Tensor)
    assert isinstance(samples.second, torch.Tensor)
    shape = [-1, *[1] * len(sizes)]
    x = _coordinates(sizes, samples.first.device) ^ (samples.first ^ call.first).view(shape)
    x = _mixed(x, (samples.second ^ call.second).view(shape))
    return x < min(round((p - 0.5) * 2**32), 2**31 - 1)


def signs(sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    """Ones and minus ones without a pattern, float32 of shape ``sizes``."""
    return 1.0 - 2.0 * (_mixed(_coordinates(sizes, device), 0) < 0)


def _mixed(x: torch.Tensor, word: torch.Tensor | int) -> torch.Tensor:
    """Mix ``x`` in place, so that each bit reaches the high ones."""
    x = _fold(x, 16).mul_(_signed(_M1)).bitwise_xor_(word)
    return _fold(x, 13).mul_(_signed(_M2))


def _fold(x: torch.Tensor, bits: int) -> torch.Tensor:
    # Shifts of signed numbers repeat the sign, which the mask takes away.
    return x.bitwise_xor_((x >> bits).bitwise_and_(2 ** (32 - bits) - 1))


def _coordinates(sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    """A new tensor of shape ``sizes`` of what coordinates add up to, int32."""
    total = torch.zeros((), dtype=torch.int32, device=device)
    for dim, size in enumerate(sizes):
        steps = _steps(size, dim + 1, device)
        total = total + steps.view([-1, *[1] * (len(sizes) - dim - 1)])
    return total


# A few sizes, again and again, in each layer: without it, two kernels more for each dim.
@functools.lru_cache(maxsize=64)
def _steps(size: int, power: int, device: torch.device) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int32, device=device).mul_(_signed(_G**power))


def _signed(number: int) -> int:
    """The signed number of 32 bits that is equal modulo 2**32."""
    return (number + 2**31) % 2**32 - 2**31
