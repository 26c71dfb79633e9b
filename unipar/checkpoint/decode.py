"""Reading a manifest, from whomever it comes: what it says is held to be possible, and whole.

The checksums tell damage from what was written. They do not tell who wrote it, so all that follows
from a manifest (what is allocated, opened and read) is checked before it is used.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, ValidationError

from unipar.checkpoint.boxes import check_cover, check_division, volume
from unipar.checkpoint.division import Chunk, Division, Place
from unipar.checkpoint.files import digest, num_pieces
from unipar.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    VERSION,
    EngineIndex,
    FileInfo,
    Manifest,
    TensorIndex,
)
from unipar.checkpoint.names import GENERATORS, REPLACED, named_step, rng_path
from unipar.checkpoint.paths import inside, is_plain, read_bytes, size_of
from unipar.checkpoint.runs import fault, length
from unipar.checkpoint.safetensors import DTYPES, MAX_HEADER_BYTES, check_size
from unipar.errors import CheckpointError
from unipar.state import Box, GroupState
from unipar.utils.garbage_collection import no_collection

_STRICT = ConfigDict(strict=True, extra="forbid")
_MAX_COUNT = 2**53
"""The largest step, epoch or index: what JSON readers agree on."""
_MAX_RANKS = 2**24
_MIN_ENTRY_BYTES = 16
"""Less than a tensor takes in a header: there are no more parts than headers can name."""
_BEGIN = b'{"checksum":"'


def _plain(name: str) -> str:
    if not is_plain(name) or name == MANIFEST:
        raise ValueError("is no relative path of a file inside the checkpoint")
    return name


_Digest = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
_Count = Annotated[int, Field(ge=0, le=_MAX_COUNT)]
_Size = Annotated[int, Field(ge=0, lt=2**63)]
_Path = Annotated[str, AfterValidator(_plain)]
# One fault is enough: with each a million long, listing all takes far more room than the file.
_Sizes = Annotated[tuple[_Size, ...], FailFast()]
_Digests = Annotated[tuple[_Digest, ...], FailFast()]
_Runs = Annotated[tuple[Annotated[int, Field(gt=-(2**63), lt=2**63)], ...], FailFast()]


class _File(BaseModel):
    model_config = _STRICT
    path: _Path
    size: _Size
    header_bytes: Annotated[int, Field(ge=0, le=MAX_HEADER_BYTES + 8)]
    header_digest: _Digest


class _Chunk(BaseModel):
    model_config = _STRICT
    file: _Size
    start: _Size
    offsets: _Sizes
    sizes: _Sizes
    xxh3: _Digests


class _Tensor(BaseModel):
    model_config = _STRICT
    shape: _Sizes
    dtype: Literal[tuple(DTYPES)]  # pyright: ignore[reportInvalidTypeForm]


class _Listed(_Tensor):
    """Of version 1."""

    chunks: Annotated[list[_Chunk], FailFast()]


class _Divided(_Tensor):
    files: _Runs
    offsets: Annotated[tuple[_Runs, ...], FailFast()]
    sizes: Annotated[tuple[_Runs, ...], FailFast()]


class _Group(BaseModel):
    model_config = _STRICT
    params: Annotated[tuple[str, ...], FailFast()]
    hyperparameters: dict[str, Any]


class _Extra(BaseModel):
    """Of what an engine keeps besides, the keys that the core knows."""

    model_config = ConfigDict(strict=True, extra="allow")
    num_steps: _Count = 0
    items_per_sample: Annotated[float, Field(gt=2**-64, lt=2**64)] = 1.0
    lr_scheduler: dict[str, Any] = {}
    scaler: dict[str, Any] = {}
    scalars: dict[str, dict[str, Any]] = {}


class _Engine(BaseModel):
    model_config = _STRICT
    groups: Annotated[list[_Group], FailFast()]
    extra: _Extra
    aliases: dict[str, str]


class _EngineListed(_Engine):
    weights: dict[str, _Listed]
    optimizer: dict[str, _Listed]


class _EngineDivided(_Engine):
    weights: dict[str, _Divided]
    optimizer: dict[str, _Divided]


class _Position(BaseModel):
    """A loader's place in the data."""

    model_config = ConfigDict(strict=True, extra="allow")
    epoch: _Count
    index: _Count
    num_samples: _Count | None = None
    global_batch_size: Annotated[int, Field(ge=1, le=_MAX_COUNT)] | None = None
    seed: int | None = None
    shuffle: bool | None = None
    drop_last: bool | None = None


class _Progress(BaseModel):
    """Of the loop's position, the keys that the core knows."""

    model_config = ConfigDict(strict=True, extra="allow")
    seed: int | None = None
    global_batch_size: Annotated[int, Field(ge=1, le=_MAX_COUNT)] | None = None
    loader: _Position | None = None
    metrics: dict[str, float] = {}
    streams: Annotated[list[_Count], Field(max_length=_MAX_RANKS), FailFast()] = []


class _Body(BaseModel):
    model_config = _STRICT
    checksum: _Digest
    format: Literal["unipar-checkpoint"]
    version: Literal[1, 2]
    unipar: str
    torch: str
    strategy: str
    world_size: Annotated[int, Field(ge=1, le=_MAX_RANKS)]
    step: _Count
    weights_only: bool
    progress: _Progress
    metrics: dict[str, float]
    files: Annotated[list[_File], FailFast()]


class _BodyListed(_Body):
    engines: dict[str, _EngineListed]


class _BodyDivided(_Body):
    engines: dict[str, _EngineDivided]


class _Head(BaseModel):
    """The fields that every version has; the others' fields may be others."""

    model_config = ConfigDict(strict=True)
    format: str
    version: int
    unipar: str = "of an unknown version"


def open_checkpoint(path: Path) -> Manifest:
    """Read the manifest of the checkpoint at ``path``, and hold that its files are there.

    Raises:
        CheckpointError: as :func:`read_manifest` and :func:`check_files`.
    """
    manifest = read_manifest(path)
    check_files(manifest)
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint at ``path``.

    Raises:
        CheckpointError: it is missing or damaged, contradicts itself, or a newer unipar wrote it.
    """
    file = path / MANIFEST
    try:
        data = read_bytes(inside(path, MANIFEST), MAX_MANIFEST_BYTES)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is no complete checkpoint: {error}") from error
    first, _, rest = data.partition(b"\n")
    if not first.startswith(_BEGIN) or first[13:29].decode("ascii", "replace") != digest(rest):
        raise CheckpointError(f"{file} is damaged: its checksum differs.")
    with no_collection():
        return decode(path, data)


def decode(path: Path, data: bytes) -> Manifest:
    """The manifest of the checkpoint at ``path``, whose checksum is right.

    Raises:
        CheckpointError: it contradicts itself, or a newer unipar wrote it.
    """
    file = path / MANIFEST
    kind = _BodyListed if _version(data, file) == 1 else _BodyDivided
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        raise _refused(error, file) from error
    try:
        return _manifest(path, body)
    except CheckpointError as error:
        raise CheckpointError(f"{file} is damaged or was edited: {error}") from error


def _version(data: bytes, file: Path) -> int:
    """The version of the format: what is of another kind, or a newer one, is no damage."""
    try:
        head = _Head.model_validate_json(data)
    except ValidationError as error:
        raise _refused(error, file) from error
    if head.format != FORMAT:
        raise CheckpointError(f"{file} is no checkpoint of unipar.")
    if head.version > VERSION:
        raise CheckpointError(
            f"{file} has format version {head.version}, written by unipar {head.unipar}; "
            f"this unipar reads versions up to {VERSION}. Upgrade unipar to read it."
        )
    return head.version


def check_files(manifest: Manifest) -> None:
    """Hold that every file of a checkpoint is there and has its size.

    Raises:
        CheckpointError: one is not; it is named.
    """
    folders: dict[str, bool] = {}
    for name, info in manifest.files.items():
        if _is_plainly_there(manifest.path, name, info.size, folders):
            continue
        try:
            path = inside(manifest.path, name)
            size = size_of(path)
            if size != info.size:
                raise CheckpointError(
                    f"{path} is damaged: it has {size} bytes and should have {info.size}."
                )
        except CheckpointError as error:
            tensor = next((own for own, _, _ in manifest.chunks_of(name)), None)
            if tensor is None:
                raise
            raise CheckpointError(f"Cannot read tensor '{tensor}': {error}") from error


def _is_plainly_there(root: Path, name: str, size: int, folders: dict[str, bool]) -> bool:
    """Whether a file is no link, nor behind one, and has its size: mostly all there is to know.

    Of each folder it is asked once; to follow every file takes ten times as long.
    """
    folder = name.rpartition("/")[0]
    try:
        if folder not in folders:
            folders[folder] = os.path.realpath(root / folder) == os.path.join(
                os.path.realpath(root), folder
            ).rstrip("/")
        found = os.lstat(f"{root}/{name}")
    except (OSError, ValueError):
        return False
    return folders[folder] and stat.S_ISREG(found.st_mode) and found.st_size == size


def _refused(error: ValidationError, file: Path) -> CheckpointError:
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"])) or "it"
    given = "" if first["type"] in ("missing", "json_invalid") else f" {first['input']!r:.60}:"
    return CheckpointError(f"{file} is damaged or was edited: {field}:{given} {first['msg']}.")


def _manifest(path: Path, body: _BodyListed | _BodyDivided) -> Manifest:
    names = [entry.path for entry in body.files]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise CheckpointError(f"files lists {twice} twice.")
    divisions = _Divisions(body.files)
    manifest = Manifest(
        path=path,
        step=body.step,
        strategy=body.strategy,
        world_size=body.world_size,
        engines={name: _engine(name, engine, divisions) for name, engine in body.engines.items()},
        files={
            entry.path: FileInfo(entry.size, entry.header_bytes, entry.header_digest)
            for entry in body.files
        },
        progress=body.progress.model_dump(exclude_unset=True),
        metrics=body.metrics,
        weights_only=body.weights_only,
        unipar_version=body.unipar,
        torch_version=body.torch,
    )
    _check_step(manifest)
    if isinstance(body, _BodyListed):
        _check_spans(manifest)
    else:
        divisions.check_ends()
    _check_training_state(manifest)
    return manifest


def _engine(
    name: str, engine: _EngineListed | _EngineDivided, divisions: _Divisions
) -> EngineIndex:
    weights, optimizer = (
        {
            key: divisions.read(f"engines.{name}.{kind}.{key}", key, tensor)
            for key, tensor in tensors.items()
        }
        for kind, tensors in (("weights", engine.weights), ("optimizer", engine.optimizer))
    )
    found = EngineIndex(
        weights=weights,
        optimizer=optimizer,
        groups=tuple(GroupState(each.params, each.hyperparameters) for each in engine.groups),
        extra=engine.extra.model_dump(exclude_unset=True),
        aliases=engine.aliases,
    )
    for alias, target in found.aliases.items():
        if target not in found.weights or alias in found.weights:
            raise CheckpointError(
                f"engines.{name}.aliases has '{alias}' for '{target}', and an alias is another "
                "name of a stored weight."
            )
    grouped = Counter(param for group in found.groups for param in group.params)
    if grouped and max(grouped.values()) > 1:
        raise CheckpointError(
            f"engines.{name}.groups has '{grouped.most_common(1)[0][0]}' more than once."
        )
    return found


class _Divisions:
    """The parts of all tensors, as they are read: in each file no more than it holds.

    Args:
        files: of the checkpoint.
    """

    def __init__(self, files: Sequence[_File]) -> None:
        self._paths = [entry.path for entry in files]
        # Unsigned: two sizes of 63 bits are added before the sum is refused.
        self._sizes = np.array([entry.size for entry in files], np.uint64)
        self._ends = np.array([entry.header_bytes for entry in files], np.uint64)
        self._left = sum(entry.header_bytes for entry in files) // _MIN_ENTRY_BYTES

    def read(self, where: str, name: str, tensor: _Listed | _Divided) -> TensorIndex:
        dtype = DTYPES[tensor.dtype]
        check_size(where, tensor.shape, dtype)
        if isinstance(tensor, _Listed):
            chunks: Sequence[Chunk] = self._listed(where, name, tensor, dtype)
        else:
            chunks = self._divided(where, name, tensor, dtype)
        return TensorIndex(tensor.shape, dtype, chunks)

    def _listed(
        self, where: str, name: str, tensor: _Listed, dtype: torch.dtype
    ) -> tuple[Chunk, ...]:
        boxes = [Box(chunk.offsets, chunk.sizes) for chunk in tensor.chunks]
        check_cover(name, tensor.shape, boxes)
        if len(boxes) != 1 and not (boxes and all(map(volume, boxes))):
            raise CheckpointError(f"{where}.chunks has none, or one of no elements.")
        return tuple(
            self._chunk(f"{where}.chunks.{number}", name, chunk, box, dtype)
            for number, (chunk, box) in enumerate(zip(tensor.chunks, boxes, strict=True))
        )

    def _chunk(self, where: str, name: str, chunk: _Chunk, box: Box, dtype: torch.dtype) -> Chunk:
        if chunk.file >= len(self._paths):
            raise CheckpointError(
                f"{where}.file is {chunk.file}, and there are {len(self._paths)} files."
            )
        pieces = num_pieces(volume(box) * dtype.itemsize)
        if len(chunk.xxh3) != pieces:
            raise CheckpointError(
                f"{where}.xxh3 has {len(chunk.xxh3)} checksums, and its bytes have {pieces} pieces."
            )
        return Chunk(box, self._paths[chunk.file], name, Place(chunk.start, chunk.xxh3))

    def _divided(self, where: str, name: str, tensor: _Divided, dtype: torch.dtype) -> Division:
        num = length(tensor.files)
        if not 1 <= num <= self._left:
            raise CheckpointError(
                f"{where}.files has {num} parts, and the headers of all files have room for "
                f"{self._left} more."
            )
        self._left -= num
        columns = [("files", tensor.files)]
        for side, runs in (("offsets", tensor.offsets), ("sizes", tensor.sizes)):
            if len(runs) != len(tensor.shape):
                raise CheckpointError(
                    f"{where}.{side} has {len(runs)} columns, and the tensor "
                    f"{len(tensor.shape)} dims."
                )
            columns += [(f"{side}.{dim}", column) for dim, column in enumerate(runs)]
        for column, runs in columns:
            if told := fault(runs, num):
                raise CheckpointError(f"{where}.{column}: {told}.")
        division = Division(name, tensor.files, tensor.offsets, tensor.sizes, self._paths)
        files, offsets, sizes = division.parts()
        if int(files.max()) >= len(self._paths):
            raise CheckpointError(
                f"{where}.files has {files.max()}, and there are {len(self._paths)} files."
            )
        if len(np.unique(files)) != num:
            raise CheckpointError(f"{where}.files has a file more than once.")
        check_division(name, tensor.shape, offsets, sizes)
        if num > 1 and not sizes.all():
            raise CheckpointError(f"{where}.sizes has a part of no elements.")
        self._ends[files] += (sizes.prod(axis=1) * dtype.itemsize).astype(np.uint64)
        self._refuse(self._ends > self._sizes)
        return division

    def check_ends(self) -> None:
        """Hold that the tensors of each file take all of it, with its header."""
        self._refuse(self._ends != self._sizes)

    def _refuse(self, wrong: NDArray[np.bool_]) -> None:
        for number in np.flatnonzero(wrong)[:1].tolist():
            raise CheckpointError(
                f"files gives {self._paths[number]} {self._sizes[number]} bytes, and its tensors "
                f"end at {self._ends[number]}."
            )


def _check_step(manifest: Manifest) -> None:
    """Hold that the directory is named after the step, if it is named after any."""
    named = named_step(manifest.path.name.removeprefix(REPLACED))
    if named not in (None, manifest.step):
        raise CheckpointError(
            f"step is {manifest.step}, and the directory is named {manifest.path.name}."
        )


def _check_spans(manifest: Manifest) -> None:
    """Hold that the tensors of each file lie end to end, from its header to its end (version 1)."""
    for name, info in manifest.files.items():
        spans = sorted(
            (place.start, place.start + volume(box) * index.dtype.itemsize, tensor)
            for tensor, index, (box, _, _, place) in manifest.chunks_of(name)
            if place
        )
        at, before = info.header_bytes, "the header"
        for start, end, tensor in spans:
            if start != at:
                raise CheckpointError(
                    f"start of tensor '{tensor}' is {start} in {name}, where {before} ends at {at}."
                )
            at, before = end, f"tensor '{tensor}'"
        if at != info.size:
            raise CheckpointError(
                f"files gives {name} {info.size} bytes, and {before} ends at {at}."
            )


def _check_training_state(manifest: Manifest) -> None:
    """Hold that what belongs together for going on with a run is there together."""
    generators = {name for name in manifest.files if PurePosixPath(name).parts[0] == GENERATORS}
    if generators and not (
        len(generators) == manifest.world_size
        and all(rng_path(rank) in generators for rank in range(len(generators)))
    ):
        raise CheckpointError(
            f"files has {', '.join(sorted(generators)[:4])} for a world_size of "
            f"{manifest.world_size}: random generators are of every rank, or of none."
        )
    held = next((name for name, own in manifest.engines.items() if own.optimizer), None)
    if manifest.weights_only and (generators or held is not None):
        raise CheckpointError("weights_only is true, and there is training state.")
    progress = manifest.progress
    # Either is written by ``fit`` alone; the former in older checkpoints.
    if "global_batch_size" in progress or "metrics" in progress:
        for key in ("seed", "loader"):
            if progress.get(key) is None:
                raise CheckpointError(
                    f"progress.{key} is missing, and the place in the data with it."
                )
        size, own = progress.get("global_batch_size"), progress["loader"].get("global_batch_size")
        if None not in (size, own) and own != size:
            raise CheckpointError(
                f"progress.global_batch_size is {size}, and that of progress.loader {own}."
            )
