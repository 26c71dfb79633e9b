"""Manifests as earlier versions of the format have them, and edits that their checksums fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unipar.checkpoint import read_manifest
from unipar.checkpoint.division import Chunk, Place
from unipar.checkpoint.files import FileReader, digest
from unipar.checkpoint.header import check_header


def unsealed(data: bytes) -> dict[str, Any]:
    """What a manifest says, to be edited."""
    body = json.loads(data)
    del body["checksum"]
    return body


def seal(body: Mapping[str, Any]) -> bytes:
    """A manifest that says so, with the checksum that it needs."""
    rest = json.dumps(body, separators=(",", ":"))[1:].encode() + b"\n"
    return f'{{"checksum":"{digest(rest)}",\n'.encode() + rest


def sealed(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the manifest of a checkpoint, and make its checksum fit."""
    file = path / "manifest.json"
    body = unsealed(file.read_bytes())
    change(body)
    file.write_bytes(seal(body))


def as_version_1(path: Path) -> None:
    """Write the manifest of a checkpoint as the first version of the format has it.

    There every position and checksum stands in the manifest.
    """
    manifest = read_manifest(path)
    numbers = {name: number for number, name in enumerate(manifest.files)}
    places: dict[str, Mapping[str, Place]] = {}
    for name, info in manifest.files.items():
        if name.endswith(".safetensors"):
            with FileReader(path / name, info.size) as reader:
                places[name] = check_header(reader, manifest, name)

    def listed(chunk: Chunk) -> dict[str, Any]:
        start, digests = places[chunk.file][chunk.key]
        return {
            "file": numbers[chunk.file],
            "start": start,
            "offsets": chunk.box.offsets,
            "sizes": chunk.box.sizes,
            "xxh3": digests,
        }

    def change(body: Any) -> None:
        body["version"] = 1
        for name, engine in body["engines"].items():
            for kind in ("weights", "optimizer"):
                stored = getattr(manifest.engines[name], kind)
                for key, tensor in engine[kind].items():
                    for column in ("files", "offsets", "sizes"):
                        del tensor[column]
                    tensor["chunks"] = [listed(chunk) for chunk in stored[key].chunks]

    sealed(path, change)
