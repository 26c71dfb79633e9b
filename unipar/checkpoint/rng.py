"""The state of a rank's random number generators, as JSON values."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from unipar.errors import CheckpointError

_STRICT = ConfigDict(strict=True, extra="forbid")
_NUM_WORDS = 624
"""Words in the state of a Mersenne twister, which Python and NumPy both use."""
_Word = Annotated[int, Field(ge=0, lt=2**32)]
_Place = Annotated[int, Field(ge=0, le=_NUM_WORDS)]
_Bytes = Annotated[str, Field(pattern="^([0-9a-f]{2})*$")]


class _Twister(BaseModel):
    model_config = _STRICT
    key: Annotated[_Bytes, Field(min_length=8 * _NUM_WORDS, max_length=8 * _NUM_WORDS)]
    # NumPy does not check it, and would read beyond the key.
    pos: _Place


class _NumPy(BaseModel):
    model_config = _STRICT
    bit_generator: Literal["MT19937"]
    state: _Twister
    has_gauss: Annotated[int, Field(ge=0, le=1)]
    gauss: float


class State(BaseModel):
    """A rank's generators, as :func:`capture` describes them."""

    model_config = _STRICT
    python: tuple[
        Literal[3],
        Annotated[list[_Word], Field(min_length=_NUM_WORDS + 1, max_length=_NUM_WORDS + 1)],
        float | None,
    ]
    numpy: _NumPy
    torch: _Bytes
    cuda: _Bytes | None

    def for_python(self) -> tuple[Any, ...]:
        version, words, gauss = self.python
        return (version, tuple(words), gauss)

    def for_numpy(self) -> dict[str, Any]:
        key = np.frombuffer(bytes.fromhex(self.numpy.state.key), dtype="<u4")
        return {**self.numpy.model_dump(), "state": {"key": key, "pos": self.numpy.state.pos}}


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


def decode(data: bytes, path: Path) -> State:
    """Decode what :func:`capture` gave, from JSON.

    Raises:
        CheckpointError: it is something else, or no state that these generators can be in.
    """
    try:
        state = State.model_validate_json(data)
        # Tried on generators of no consequence: a bad state is found before any is changed.
        random.Random().setstate(state.for_python())
        np.random.RandomState().set_state(state.for_numpy())
        torch.Generator().set_state(_tensor(state.torch))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "it"
        raise CheckpointError(f"{path} is damaged: {field}: {first['msg']}.") from error
    except (ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path} is damaged: no state of a generator: {error}.") from error
    return state


def restore(state: State) -> None:
    """Put the generators back to a captured state.

    Raises:
        CheckpointError: CUDA's generator does not take its part.
    """
    random.setstate(state.for_python())
    np.random.set_state(state.for_numpy())
    torch.set_rng_state(_tensor(state.torch))
    # A run on CPUs has no use for it, and would begin to use a GPU.
    if state.cuda and torch.cuda.is_initialized():
        try:
            torch.cuda.set_rng_state(_tensor(state.cuda))
        except (RuntimeError, TypeError) as error:
            raise CheckpointError(f"The stored state of CUDA's generator: {error}.") from error


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
