"""The Hugging Face layout: ``model.safetensors``, or shards and an index that names them."""

from __future__ import annotations

import json
from pathlib import Path

from unipar.checkpoint.boxes import whole
from unipar.checkpoint.manifest import MANIFEST, Chunk, EngineIndex, FileInfo, Manifest, TensorIndex
from unipar.checkpoint.safetensors import read_header
from unipar.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def shard_name(number: int, count: int) -> str:
    """The name of shard ``number`` (from 1) of ``count``."""
    return SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def holds_safetensors(path: Path) -> bool:
    """Whether ``path`` is a safetensors file, or a directory of them and no checkpoint."""
    if path.is_file():
        return path.suffix == ".safetensors"
    return not (path / MANIFEST).exists() and any(path.glob("*.safetensors"))


def read_directory(path: Path) -> Manifest:
    """Describe a safetensors file, or a directory in the Hugging Face layout, as a manifest.

    The files carry no checksums, so only their headers and sizes are checked.

    Raises:
        CheckpointError: no safetensors are there, a file is missing or damaged, or a tensor is in
            two files.
    """
    if path.is_file():
        root, files = path.parent, [path.name]
    else:
        root, files = path, _files(path)
    infos: dict[str, FileInfo] = {}
    weights: dict[str, TensorIndex] = {}
    for file in files:
        for stored in read_header(root / file):
            if stored.name in weights:
                other = weights[stored.name].chunks[0].file
                raise CheckpointError(f"Tensor '{stored.name}' is in {root / other} and {file}.")
            chunk = Chunk(whole(stored.shape), file, stored.start, None)
            weights[stored.name] = TensorIndex(stored.shape, stored.dtype, (chunk,))
        infos[file] = FileInfo((root / file).stat().st_size, 0, "")
    return Manifest(
        path=root,
        step=0,
        strategy="",
        world_size=1,
        engines={"model": EngineIndex(weights)},
        files=infos,
        weights_only=True,
    )


def _files(directory: Path) -> list[str]:
    index = directory / INDEX
    if index.exists():
        try:
            return sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{index} is damaged: {error!r}.") from error
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    if SINGLE in files:
        return [SINGLE]
    if files:
        return files
    pickled = [path.name for path in (*directory.glob("*.bin"), *directory.glob("*.pt*"))]
    hint = (
        f" It holds {', '.join(sorted(pickled)[:4])}: pickles, which are not read. Save the model "
        "with save_pretrained(…, safe_serialization=True) first."
        if pickled
        else ""
    )
    raise CheckpointError(f"{directory} holds no safetensors files.{hint}")
