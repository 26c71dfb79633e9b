"""The safetensors file format, as far as streaming into and out of it needs.

The ``safetensors`` package writes whole files from tensors that are all in memory; here the header
is laid out beforehand, and tensors are written as they come.
See https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unipar.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAX_HEADER_BYTES = 100_000_000
"""The longest header that the safetensors package accepts."""


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """The format's name of ``dtype``, which tensor ``name`` has.

    Raises:
        CheckpointError: the format has none.
    """
    if dtype not in NAMES:
        raise CheckpointError(
            f"Tensor '{name}' has dtype {dtype}, which safetensors cannot hold; it holds "
            f"{', '.join(str(known) for known in NAMES)}."
        )
    return NAMES[dtype]


class Entry(NamedTuple):
    """A tensor to be laid out in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Where everything in a file goes.

    Attributes:
        header: the file's first bytes.
        starts: where each entry's data begin, from the start of the file, in the entries' order.
        size: bytes in the whole file.
    """

    header: bytes
    starts: tuple[int, ...]
    size: int


def lay_out(entries: Sequence[Entry], metadata: Mapping[str, str]) -> Layout:
    """Lay ``entries`` out in one file. Wide dtypes come first, so that all data are aligned."""
    order = sorted(range(len(entries)), key=lambda i: -entries[i].dtype.itemsize)
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    starts, at = [0] * len(entries), 0
    for i in order:
        entry = entries[i]
        starts[i] = at
        table[entry.name] = {
            "dtype": dtype_name(entry.name, entry.dtype),
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.nbytes],
        }
        at += entry.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return Layout(header, tuple(len(header) + start for start in starts), len(header) + at)


class Stored(NamedTuple):
    """A tensor found in a file: its data begin at byte ``start`` of it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


def read_header(path: Path) -> list[Stored]:
    """The tensors of a safetensors file, in the order of their data.

    Raises:
        CheckpointError: the file is missing, short, or no safetensors file.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if size < 8 or not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(f"{path} is no safetensors file, or is cut short.")
            table = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise CheckpointError(f"{path} has a damaged safetensors header: {error}.") from error
    table.pop("__metadata__", None)
    return sorted(_stored(path, table, 8 + length, size), key=lambda stored: stored.start)


def _stored(path: Path, table: Mapping[str, Any], base: int, size: int) -> Iterable[Stored]:
    for name, entry in table.items():
        if entry["dtype"] not in DTYPES:
            raise CheckpointError(f"{path}: tensor '{name}' has unknown dtype {entry['dtype']}.")
        found = Entry(name, DTYPES[entry["dtype"]], tuple(entry["shape"]))
        start, end = entry["data_offsets"]
        if end - start != found.nbytes or base + end > size:
            raise CheckpointError(
                f"{path}: tensor '{name}' should take {found.nbytes} bytes at {base + start}, "
                f"but the file has {size} bytes; it is cut short or damaged."
            )
        yield Stored(*found, base + start)
