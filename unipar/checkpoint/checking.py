"""Whether a checkpoint is whole: every header, and every byte, against the checksums."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from unipar.checkpoint.boxes import volume
from unipar.checkpoint.decode import open_checkpoint
from unipar.checkpoint.directory import find
from unipar.checkpoint.files import PIECE_BYTES
from unipar.checkpoint.load import read_generators
from unipar.checkpoint.manifest import Manifest
from unipar.checkpoint.names import rng_path
from unipar.checkpoint.read import opened
from unipar.errors import CheckpointError

THREADS = 8
"""Reading is waiting: more than cores, so that a network file system has enough to do."""
_SHOWN = 10


def verify(
    path: str | Path,
    *,
    quick: bool = False,
    progress: Callable[[int], object] = lambda num_bytes: None,
) -> Manifest:
    """Read every byte of a checkpoint and hold it against the checksums, several files at a time.

    Args:
        path: a checkpoint, or a directory of them, of which the newest is taken.
        quick: whether to read no more than sizes, headers and random generators.
        progress: called with the number of bytes that were looked at since; from any thread.

    Raises:
        CheckpointError: something is missing or damaged; lists what.
    """
    manifest = open_checkpoint(find(path))
    ranks = range(manifest.world_size if rng_path(0) in manifest.files else 0)
    generators = {rng_path(rank): rank for rank in ranks}

    def check(file: str) -> list[str]:
        if file not in generators:
            return _check(manifest, file, quick, progress)
        try:
            read_generators(manifest, generators[file])
        except CheckpointError as error:
            return [str(error)]
        progress(manifest.files[file].size)
        return []

    # Made once, before any thread looks a file up.
    manifest.chunks_of("")
    pool = ThreadPoolExecutor(THREADS)
    try:
        problems = [text for found in pool.map(check, manifest.files) for text in found]
    finally:
        pool.shutdown(cancel_futures=True)
    if problems:
        more = [f"… and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise CheckpointError("\n".join(problems[:_SHOWN] + more))
    return manifest


def _check(
    manifest: Manifest, file: str, quick: bool, progress: Callable[[int], object]
) -> list[str]:
    """What is wrong with a file of tensors, a line for each tensor."""
    chunks = manifest.chunks_of(file)
    try:
        reader, places = opened(manifest, file)
    except CheckpointError as error:
        return [f"Cannot read tensor '{chunks[0][0]}': {error}" if chunks else str(error)]
    progress(manifest.files[file].header_bytes)
    problems: list[str] = []
    with reader:
        scratch = bytearray(PIECE_BYTES)
        for name, index, chunk in () if quick else chunks:
            length = volume(chunk.box) * index.dtype.itemsize
            start, digests = places[chunk.key]
            what = f"tensor '{name}'".__str__
            try:
                for begin in range(0, length, PIECE_BYTES):
                    piece = memoryview(scratch)[: min(PIECE_BYTES, length - begin)]
                    reader.read(piece, start, begin, length, digests, what)
                    progress(len(piece))
            except CheckpointError as error:
                problems.append(str(error))
    return problems
