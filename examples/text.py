"""Real text that every Python carries: the sources of its standard library, as bytes."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset

# What is no part of the library, or is tables rather than text.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "encodings"}


class ByteText(Dataset):
    """Windows of ``length + 1`` bytes, one after the other: a sample is (inputs, targets).

    Files go to training or to evaluation as a whole, so that no text is in both.

    Args:
        split: ``"train"``, or ``"eval"`` for each tenth file.
        length: bytes that the model sees at once.
        max_bytes: how much of the text to take.
    """

    def __init__(self, split: str = "train", length: int = 128, max_bytes: int = 2_000_000) -> None:
        self.length = length
        self.text = _read(split == "eval", max_bytes)

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.length
        window = self.text[start : start + self.length + 1].long()
        return window[:-1], window[1:]


@functools.lru_cache
def _read(evaluation: bool, max_bytes: int) -> torch.Tensor:
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path
        for path in library.rglob("*.py")
        if LEFT_OUT.isdisjoint(path.relative_to(library).parts)
    )
    text = bytearray()
    for number, path in enumerate(files):
        if (number % 10 == 9) == evaluation:
            text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    return torch.frombuffer(text[:max_bytes], dtype=torch.uint8)
