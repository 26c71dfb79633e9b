"""Masks of ``dropout_seed="sample"`` by hand, in NumPy, from what the docs say of them.

Nothing of unipar is imported here.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np
import torch

_WORD = 2**32


def dropped(
    seed: int, name: str, step: int, call: int, shape: tuple[int, ...], p: float
) -> torch.Tensor:
    """Which elements of a whole global batch a call of dropout drops.

    Args:
        seed: of the run.
        name: of the engine.
        step: of training, from 0.
        call: of dropout in the forward pass, from 0.
        shape: samples, then rows of a sample (1 where samples are rows), then the other dims.
        p: the probability.

    Returns:
        A bool tensor of that shape.
    """
    numbers = draws(seed, name, step, call + 3)
    places = np.arange(shape[0], dtype=np.uint32)
    words = [_fold(_mixed(places, *_cut(number)), 16) for number in numbers[:2]]
    of_call = _cut(numbers[-1])
    x = np.zeros(shape[1:], dtype=np.uint32)
    for dim, coordinates in enumerate(np.indices(shape[1:], dtype=np.uint64), start=1):
        x += (coordinates * pow(0x9E3779B1, dim, _WORD) % _WORD).astype(np.uint32)
    first, second = (
        (word ^ np.uint32(own)).reshape(-1, *[1] * x.ndim)
        for word, own in zip(words, of_call, strict=True)
    )
    x = _fold(x ^ first, 16) * np.uint32(0x85EBCA6B)
    x = _fold(x ^ second, 13) * np.uint32(0xC2B2AE35)
    return torch.from_numpy(x.view(np.int32) < round((p - 0.5) * _WORD))


@functools.cache
def draws(seed: int, name: str, step: int, count: int) -> list[int]:
    """What a step draws on the host: two numbers for its samples, then one for each call."""
    digest = hashlib.blake2b(repr((seed, name, step)).encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") % 2**63)
    return torch.empty(count, dtype=torch.int64).random_(generator=generator).tolist()


def _cut(number: int) -> tuple[int, int]:
    return number % _WORD, number // _WORD


def _mixed(x: np.ndarray, first: int, second: int) -> np.ndarray:
    x = _fold(x ^ np.uint32(first), 16) * np.uint32(0x85EBCA6B) ^ np.uint32(second)
    return _fold(x, 13) * np.uint32(0xC2B2AE35)


def _fold(x: np.ndarray, bits: int) -> np.ndarray:
    return x ^ (x >> np.uint32(bits))
