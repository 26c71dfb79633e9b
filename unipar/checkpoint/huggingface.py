"""The Hugging Face layout: ``model.safetensors``, or shards and an index that names them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from unipar.checkpoint.boxes import whole
from unipar.checkpoint.division import Chunk, Place
from unipar.checkpoint.manifest import MANIFEST, EngineIndex, FileInfo, Manifest, TensorIndex
from unipar.checkpoint.paths import is_plain, read_bytes, size_of
from unipar.checkpoint.safetensors import MAX_HEADER_BYTES, read_header
from unipar.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors", re.ASCII)


class _Index(BaseModel):
    model_config = ConfigDict(strict=True)
    weight_map: dict[str, str]


def shard_name(number: int, count: int) -> str:
    """The name of shard ``number`` (from 1) of ``count``."""
    return SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def holds_safetensors(path: Path) -> bool:
    """Return whether ``path`` is a safetensors file, or a directory of them and no checkpoint."""
    if path.is_file():
        return path.suffix == ".safetensors"
    return not (path / MANIFEST).exists() and any(path.glob("*.safetensors"))


def read_directory(path: Path) -> Manifest:
    """Describe a safetensors file, or a directory in the Hugging Face layout, as a manifest.

    The files carry no checksums, so only their headers and sizes are checked. They may be links
    that lead elsewhere: in Hugging Face's cache all are.

    Raises:
        CheckpointError: no safetensors are there, a file is missing or damaged, a tensor is in
            two files, or not in the one that the index names.
    """
    if path.is_file():
        root, files, weight_map = path.parent, [path.name], {}
    else:
        weight_map = _weight_map(path)
        root, files = path, sorted(set(weight_map.values())) or _files(path)
        _check_shards(path, files)
    infos: dict[str, FileInfo] = {}
    weights: dict[str, TensorIndex] = {}
    for file in files:
        for stored in read_header(root / file).tensors:
            if stored.name in weights:
                other = weights[stored.name].chunks[0].file
                raise CheckpointError(f"Tensor '{stored.name}' is in {root / other} and {file}.")
            chunk = Chunk(whole(stored.shape), file, stored.name, Place(stored.start, None))
            weights[stored.name] = TensorIndex(stored.shape, stored.dtype, (chunk,))
        infos[file] = FileInfo(size_of(root / file), 0, "")
    for name, file in weight_map.items():
        if name not in weights or weights[name].chunks[0].file != file:
            raise CheckpointError(
                f"{root / INDEX}: weight_map has tensor '{name}' in {file}, which does not hold it."
            )
    return Manifest(
        path=root,
        step=0,
        strategy="",
        world_size=1,
        engines={"model": EngineIndex(weights)},
        files=infos,
        weights_only=True,
    )


def _weight_map(directory: Path) -> Mapping[str, str]:
    """The file of each tensor, as the index has it; empty where there is no index."""
    index = directory / INDEX
    if not index.exists():
        return {}
    try:
        weight_map = _Index.model_validate_json(read_bytes(index, MAX_HEADER_BYTES)).weight_map
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "it"
        raise CheckpointError(f"{index} is damaged: {field}: {first['msg']}.") from error
    for name, file in weight_map.items():
        if not is_plain(file):
            raise CheckpointError(
                f"{index}: weight_map has tensor '{name}' in {file[:200]!r}, which is no relative "
                "path of a file in its directory."
            )
    if not weight_map:
        raise CheckpointError(f"{index}: weight_map is empty.")
    return weight_map


def _check_shards(directory: Path, files: Sequence[str]) -> None:
    """Hold that of shards that say how many they are, all are there."""
    there = frozenset(files)
    for file in files:
        if match := _SHARD.fullmatch(file):
            missing = next(
                (
                    name
                    for number in range(1, int(match[3]) + 1)
                    if (name := f"{match[1]}-{number:05d}-of-{match[3]}.safetensors") not in there
                ),
                None,
            )
            if missing is not None:
                raise CheckpointError(f"{directory} has {file}, and lacks {missing}.")


def _files(directory: Path) -> list[str]:
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
