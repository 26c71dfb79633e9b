"""The checkpoints of a directory, without torch: by their names, their files and manifests."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import xxhash

MANIFEST = "manifest.json"
TEMPORARY = ".tmp-"
"""Before the name of one that is being written, or removed."""
REPLACED = ".old-"
"""Before the name of one in whose place another of the same step is put."""
MAX_MANIFEST_BYTES = 1 << 30
"""The longest manifest."""
_NAME = re.compile(r"step-(\d{8,})", re.ASCII)
_BEGIN = b'{"checksum":"'


def named_step(name: str) -> int | None:
    """The step that a directory is named after; ``None`` where it is no checkpoint's name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


class Scored(Protocol):
    """What is chosen by :func:`kept`."""

    @property
    def path(self) -> Path: ...
    @property
    def step(self) -> int: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...


_T = TypeVar("_T", bound=Scored)


def kept(
    found: Sequence[_T], keep_last: int | None, bests: Iterable[tuple[str, str]]
) -> dict[Path, str]:
    """Which whole checkpoints a rule keeps, and why.

    Args:
        found: the newest first.
        keep_last: how many of the newest; ``None`` keeps all.
        bests: metrics, and whether their ``"min"`` or ``"max"`` is best: of equals the newest.
    """
    why = dict.fromkeys((one.path for one in found[:keep_last]), "last")
    for metric, mode in bests:
        sign = 1 if mode == "max" else -1
        scored = [
            (sign * value, one.step, one.path)
            for one in found
            if math.isfinite(value := one.metrics.get(metric, math.nan))
        ]
        if scored:
            path = max(scored)[2]
            why[path] = ", ".join(filter(None, (why.get(path), f"best {metric}")))
    return why


@dataclass
class Listed:
    """A checkpoint, by what its manifest and the sizes of its files say.

    Attributes:
        path: its directory.
        step: training steps taken, by its name.
        written: when its manifest was, in seconds since the epoch.
        num_bytes: of its files, apart from the manifest.
        num_files: how many these are.
        strategy: the strategy that wrote it.
        ranks: how many processes wrote it.
        metrics: metrics at this step.
        problem: why it is not whole; ``None`` where it is. Checksums of data are not looked at.
    """

    path: Path
    step: int
    written: float = 0.0
    num_bytes: int = 0
    num_files: int = 0
    strategy: str = ""
    ranks: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    problem: str | None = None


def list_checkpoints(directory: Path) -> list[Listed]:
    """The checkpoints of a directory, by step, the newest last; what is being written too.

    Raises:
        OSError: the directory cannot be read.
    """
    found = []
    for path in directory.iterdir():
        plain = path.name.removeprefix(REPLACED).removeprefix(TEMPORARY)
        step = named_step(plain.removesuffix("-removed"))
        if step is not None and path.is_dir():
            found.append(read(path, step))
    return sorted(found, key=lambda one: (one.step, not one.path.name.startswith(".")))


def read(path: Path, step: int) -> Listed:
    """What the manifest of one says, and whether its files have their sizes."""
    one = Listed(path, step)
    if path.name.startswith(TEMPORARY):
        one.problem = "being written, or left by a save that was cut off"
        return one
    try:
        found = os.stat(path / MANIFEST)
        about = _manifest(path / MANIFEST, (found.st_ino, found.st_mtime_ns, found.st_size))
        one.written, one.strategy, one.ranks = found.st_mtime, about.strategy, about.ranks
        one.num_files, one.num_bytes = len(about.files), sum(about.files.values())
        one.metrics = dict(about.metrics)
        one.problem = next(_wrong_sizes(path, about.files), None)
        if about.step != step:
            one.problem = f"step is {about.step}, and the directory is named {path.name}"
    except OSError as error:
        one.problem = f"{MANIFEST}: {error.strerror}"
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        one.problem = f"{MANIFEST} is damaged"
    return one


class _About(NamedTuple):
    """What is taken from a manifest; the sizes of files by path."""

    files: Mapping[str, int]
    step: int
    strategy: str
    ranks: int
    metrics: Mapping[str, float]


# A run asks after each save, while it trains, for checkpoints that it mostly knows.
@functools.lru_cache(maxsize=64)
def _manifest(file: Path, identity: tuple[int, int, int]) -> _About:
    """Read a manifest; one that is written again has another ``identity``."""
    # Not blocking: a pipe of this name would wait for a writer.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_MANIFEST_BYTES:
            raise ValueError(file)
        data = opened.read()
    first, _, rest = data.partition(b"\n")
    told = xxhash.xxh3_64_hexdigest(rest).encode()
    if not first.startswith(_BEGIN + told):
        raise ValueError(file)
    body = json.loads(data)
    return _About(
        {str(entry["path"]): int(entry["size"]) for entry in body["files"]},
        int(body["step"]),
        str(body["strategy"]),
        int(body["world_size"]),
        {str(name): float(value) for name, value in body["metrics"].items()},
    )


def _wrong_sizes(path: Path, files: Mapping[str, int]) -> Iterator[str]:
    for name, size in files.items():
        try:
            found = os.stat(path / name)
        except OSError as error:
            yield f"{name}: {error.strerror}"
            continue
        if not stat.S_ISREG(found.st_mode):
            yield f"{name} is no regular file"
        elif found.st_size != size:
            yield f"{name} has {found.st_size} bytes and should have {size}"
