"""The safetensors file format, as far as streaming into and out of it needs.

The ``safetensors`` package writes whole files from tensors that are all in memory; here the header
is laid out beforehand, and tensors are written as they come.
See https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unipar.checkpoint.boxes import MAX_DIMS
from unipar.checkpoint.paths import open_regular
from unipar.errors import CheckpointError

METADATA = "__metadata__"
SHARDING = "DCP_SHARDING_INFO"
"""What the metadata calls the offsets of boxes, for PyTorch's distributed checkpoint."""
CHECKSUMS = "UNIPAR_XXH3"
"""What the metadata calls the digests of all pieces of the data, in their order in the file."""
NO_DIGEST = "0" * 16
"""The room of a digest that is not yet known."""

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


def in_file(dtypes: Sequence[torch.dtype]) -> list[int]:
    """The order of tensors' data in a file: wide dtypes come first, so that all are aligned."""
    return sorted(range(len(dtypes)), key=lambda i: -dtypes[i].itemsize)


def lay_out(entries: Sequence[Entry], metadata: Mapping[str, str]) -> Layout:
    """Lay ``entries`` out in one file, in the order of :func:`in_file`."""
    order = in_file([entry.dtype for entry in entries])
    table: dict[str, Any] = {METADATA: dict(metadata)}
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


class Header(NamedTuple):
    """The header of a file: its tensors in the order of their data, and its metadata."""

    tensors: list[Stored]
    metadata: Mapping[str, str]


def read_header(path: Path) -> Header:
    """Read the header of a safetensors file, and hold that it accounts for every byte.

    What the ``safetensors`` package refuses is refused here. Besides it refuses a tensor that is
    listed twice, one written as a list, and dtypes and sizes that torch does not have.

    Raises:
        CheckpointError: the file is missing, no regular file, short, or no safetensors file.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(f"{path} is no safetensors file, or is cut short.")
            text = file.read(length)
        except OSError as error:
            raise CheckpointError(f"Cannot read {path}: {error.strerror}.") from error
    return parse_header(path, text, 8 + length, size)


def parse_header(path: Path, text: bytes, base: int, size: int) -> Header:
    """As :func:`read_header`, of a header in memory.

    Args:
        path: the file, for messages.
        text: the header, without the length before it.
        base: where the data begin in the file.
        size: bytes in the whole file.

    Raises:
        CheckpointError: the header is damaged, or does not fit the file.
    """
    try:
        table = _decode(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a damaged safetensors header: {error}.") from error
    metadata: dict[str, str] = {}
    spans: dict[str, tuple[int, int]] = {}
    tensors: list[Stored] = []
    for name, entry in table:
        if name == METADATA:
            metadata = _metadata(path, entry)
        elif name in spans:
            raise CheckpointError(f"{path}: tensor '{name}' is listed twice.")
        else:
            dtype, shape, spans[name] = _entry(path, name, entry)
            tensors.append(Stored(name, dtype, shape, base + spans[name][0]))
    tensors.sort(key=lambda stored: spans[stored.name])
    at = 0
    for stored in tensors:
        start, end = spans[stored.name]
        nbytes = Entry(*stored[:3]).nbytes
        if end - start != nbytes or base + end > size:
            raise CheckpointError(
                f"{path}: tensor '{stored.name}' should take {nbytes} bytes at {base + start}, and "
                f"data_offsets are [{start}, {end}] in a file of {size} bytes; it is cut short or "
                "damaged."
            )
        if start != at:
            raise CheckpointError(
                f"{path}: data_offsets of tensor '{stored.name}' begin at {start}, where the "
                f"tensor before ends at {at}; it is damaged."
            )
        at = end
    if base + at != size:
        raise CheckpointError(
            f"{path} has {size} bytes, and its tensors end at {base + at}; it is damaged."
        )
    return Header(tensors, metadata)


class _Object(list[tuple[str, Any]]):
    """The pairs of a JSON object, in which a key can stand twice."""


def _decode(text: bytes) -> _Object:
    """JSON as the ``safetensors`` package takes it, which is less than Python's ``json`` takes."""
    table = json.loads(
        text.decode(),
        object_pairs_hook=_Object,
        parse_constant=_refuse_constant,
        parse_float=_parse_float,
        parse_int=_parse_int if b"-0" in text else None,
    )
    if not isinstance(table, _Object):
        raise ValueError("it is no JSON object")
    if sum(name == METADATA for name, _ in table) > 1:
        raise ValueError(f"{METADATA} stands in it twice")
    for name, _ in table:
        name.encode()
    return table


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")


def _parse_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _parse_int(text: str) -> int | float:
    # To that package "-0" is no integer.
    return -0.0 if text == "-0" else int(text)


def _metadata(path: Path, value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, _Object) or not all(isinstance(text, str) for _, text in value):
        raise CheckpointError(f"{path}: {METADATA} maps not only strings to strings.")
    try:
        "".join(text for pair in value for text in pair).encode()
    except UnicodeError as error:
        raise CheckpointError(f"{path}: {METADATA} holds no text: {error}.") from error
    return dict(value)


def _entry(
    path: Path, name: str, value: Any
) -> tuple[torch.dtype, tuple[int, ...], tuple[int, int]]:
    """A tensor's dtype, shape and data offsets."""
    where = f"{path}: tensor '{name}'"
    if not isinstance(value, _Object):
        raise CheckpointError(f"{where} is described by a {type(value).__name__}, not an object.")
    fields = dict(value)
    for key in ("dtype", "shape", "data_offsets"):
        count = sum(key == own for own, _ in value)
        if count != 1:
            raise CheckpointError(f"{where} has {'no' if not count else 'more than one'} {key}.")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where} has unknown dtype {str(dtype)[:40]}.")
    for key, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
            raise CheckpointError(f"{where}: {key} is {str(numbers)[:80]}, not a list of sizes.")
    if len(offsets) != 2:
        raise CheckpointError(f"{where}: data_offsets are {len(offsets)} numbers, not 2.")
    check_size(where, shape, DTYPES[dtype])
    return DTYPES[dtype], tuple(shape), (offsets[0], offsets[1])


def check_size(where: str, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Hold that torch can have a tensor of this shape, if there is memory for it.

    Raises:
        CheckpointError: it has too many dims, or its bytes or strides need more than 63 bits.
    """
    steps = math.prod(max(size, 1) for size in shape)
    if len(shape) > MAX_DIMS or steps * dtype.itemsize >= 2**63:
        raise CheckpointError(f"{where}: its shape {str(list(shape))[:80]} is too large.")
