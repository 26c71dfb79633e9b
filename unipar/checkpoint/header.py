"""Holding a file's own header against the manifest: two accounts of the same tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from unipar.checkpoint.boxes import volume
from unipar.checkpoint.division import Chunk, Place
from unipar.checkpoint.files import FileReader, num_pieces
from unipar.checkpoint.manifest import MANIFEST, Manifest, TensorIndex
from unipar.checkpoint.safetensors import CHECKSUMS, NO_DIGEST, SHARDING, in_file, parse_header
from unipar.errors import CheckpointError
from unipar.utils.garbage_collection import no_collection


class _Saved(BaseModel):
    model_config = ConfigDict(strict=True)
    saved_offsets: tuple[int, ...]


_Sharding = TypeAdapter(dict[str, _Saved])


_Told = Sequence[tuple[str, TensorIndex, Chunk]]
_DIGESTS = re.compile(rf"(?:[0-9a-f]{{{len(NO_DIGEST)}}})*")


def check_header(reader: FileReader, manifest: Manifest, file: str) -> Mapping[str, Place]:
    """Hold that a file's header names the tensors, dtypes and boxes that the manifest does.

    Returns:
        where each tensor stands in the file.

    Raises:
        CheckpointError: its checksum differs, it is damaged, or the two disagree on a tensor.
    """
    info, path = manifest.files[file], reader.path
    head = reader.header(info.header_bytes, info.header_digest)
    if int.from_bytes(head[:8], "little") != len(head) - 8:
        raise CheckpointError(f"{path} is no safetensors file, or its header is cut short.")
    with no_collection():
        tensors, metadata = parse_header(path, head[8:], info.header_bytes, info.size)
    try:
        sharding = _Sharding.validate_json(metadata.get(SHARDING, ""))
    except ValidationError as error:
        raise CheckpointError(f"{path} has a damaged safetensors header: {SHARDING}.") from error
    own = {stored.name: stored for stored in tensors}
    told = manifest.chunks_of(file)
    places = _places(path, told, info.header_bytes, metadata)
    for (name, index, chunk), place in zip(told, places, strict=True):
        stored, saved = own.get(name), sharding.get(name)
        if stored is None or saved is None:
            raise CheckpointError(f"{path} holds no tensor '{name}', which {MANIFEST} has there.")
        seen = (stored.dtype, stored.shape, saved.saved_offsets, stored.start)
        wanted = (index.dtype, chunk.box.sizes, chunk.box.offsets, place.start)
        if seen != wanted:
            what = ("dtype", "sizes", "offsets", "start")
            differing = [
                f"{field} {a} and {b}"
                for field, a, b in zip(what, seen, wanted, strict=True)
                if a != b
            ]
            raise CheckpointError(
                f"{path} and {MANIFEST} differ on tensor '{name}': {'; '.join(differing)}."
            )
        # What is left is in the file alone; what is no longer there, the manifest has twice.
        del own[name]
    if own:
        raise CheckpointError(
            f"{path} holds tensor '{next(iter(own))}', which {MANIFEST} does not have there."
        )
    return {name: place for (name, _, _), place in zip(told, places, strict=True)}


def _places(path: Path, told: _Told, header_bytes: int, metadata: Mapping[str, str]) -> list[Place]:
    """Where the manifest has each part in the file: it says so, or its tensors' order does."""
    if told and all(chunk.place for _, _, chunk in told):
        return [chunk.place for _, _, chunk in told if chunk.place]
    lengths = [volume(chunk.box) * index.dtype.itemsize for _, index, chunk in told]
    digests = metadata.get(CHECKSUMS, "")
    if len(digests) != len(NO_DIGEST) * sum(map(num_pieces, lengths)) or not _DIGESTS.fullmatch(
        digests
    ):
        raise CheckpointError(
            f"{path} has a damaged safetensors header: {CHECKSUMS} are no checksums of its pieces."
        )
    each = iter(re.findall(_DIGESTS.pattern.rstrip("*"), digests))
    found = [Place(0, ())] * len(told)
    at = header_bytes
    for own in in_file([index.dtype for _, index, _ in told]):
        found[own] = Place(at, tuple(next(each) for _ in range(num_pieces(lengths[own]))))
        at += lengths[own]
    return found
