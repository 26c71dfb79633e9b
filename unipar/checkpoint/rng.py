"""The random generators of a rank, as text."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch

from unipar.plain import from_json, to_json


def capture_rng() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators, JSON values."""
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    keys = numpy_state["state"]["key"]
    state = {
        "torch": _text(torch.get_rng_state().numpy()),
        "python": to_json(random.getstate(), "Python's random state"),
        "numpy": {
            **{name: numpy_state[name] for name in ("has_gauss", "gauss")},
            "key": _text(keys.astype("<u4")),
            "pos": int(numpy_state["state"]["pos"]),
        },
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = _text(torch.cuda.get_rng_state().numpy())
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Set the generators to what :func:`capture_rng` told."""
    torch.set_rng_state(torch.from_numpy(_array(state["torch"], "u1")))
    random.setstate(from_json(state["python"], like=random.getstate()))
    numpy_state = state["numpy"]
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": _array(numpy_state["key"], "<u4"), "pos": numpy_state["pos"]},
            "has_gauss": numpy_state["has_gauss"],
            "gauss": numpy_state["gauss"],
        }
    )
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(_array(state["cuda"], "u1")))


def reseed(seed: int, rank: int, step: int) -> None:
    """Seed the generators of a rank that has no saved state: another world size wrote it."""
    mixed = (seed * 1_000_003 + rank) * 1_000_003 + step
    torch.manual_seed(mixed % 2**63)
    random.seed(mixed)
    np.random.seed(mixed % 2**32)


def _text(array: np.ndarray) -> str:
    return base64.b85encode(array.tobytes()).decode()


def _array(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b85decode(text), dtype=dtype).copy()
