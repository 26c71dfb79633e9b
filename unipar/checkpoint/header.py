"""Holding a file's own header against the manifest: two accounts of the same tensors."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from unipar.checkpoint.files import FileReader
from unipar.checkpoint.manifest import MANIFEST, Manifest
from unipar.checkpoint.safetensors import SHARDING, parse_header
from unipar.errors import CheckpointError
from unipar.utils.garbage_collection import no_collection


class _Saved(BaseModel):
    model_config = ConfigDict(strict=True)
    saved_offsets: tuple[int, ...]


_Sharding = TypeAdapter(dict[str, _Saved])


def check_header(reader: FileReader, manifest: Manifest, file: str) -> None:
    """Hold that a file's header names the tensors, dtypes and boxes that the manifest does.

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
    for name, index, chunk in told:
        stored, saved = own.get(name), sharding.get(name)
        if stored is None or saved is None:
            raise CheckpointError(f"{path} holds no tensor '{name}', which {MANIFEST} has there.")
        seen = (stored.dtype, stored.shape, saved.saved_offsets, stored.start)
        wanted = (index.dtype, chunk.box.sizes, chunk.box.offsets, chunk.start)
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
