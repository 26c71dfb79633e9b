"""The state of a rank's random number generators, as JSON values."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import xxhash


def capture() -> dict[str, Any]:
    """The state of Python's, NumPy's and PyTorch's global generators, CUDA's if it is in use."""
    numpy: Any = np.random.get_state(legacy=False)
    numpy["state"] = {**numpy["state"], "key": numpy["state"]["key"].astype("<u4").tobytes().hex()}
    return {
        "python": random.getstate(),
        "numpy": numpy,
        "torch": _hex(torch.get_rng_state()),
        "cuda": _hex(torch.cuda.get_rng_state()) if torch.cuda.is_initialized() else None,
    }


def restore(state: dict[str, Any]) -> None:
    """Put the generators back to a captured state."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    numpy = state["numpy"]
    key = np.frombuffer(bytes.fromhex(numpy["state"]["key"]), dtype="<u4")
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})
    torch.set_rng_state(_tensor(state["torch"]))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def reseed(seed: int, rank: int, step: int) -> None:
    """Seed the generators as a function of (seed, rank, step) alone.

    A run that goes on with another number of ranks cannot hand out the old states; this makes its
    randomness differ between ranks and repeat from run to run.
    """
    mixed = xxhash.xxh3_64_intdigest(f"unipar:{seed}:{rank}:{step}".encode())
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    torch.manual_seed(mixed)


def _hex(tensor: torch.Tensor) -> str:
    return tensor.numpy().tobytes().hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
