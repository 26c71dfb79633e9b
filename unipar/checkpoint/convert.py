"""Conversion to the Hugging Face layout and back, one tensor at a time."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import torch

from unipar.checkpoint.boxes import whole
from unipar.checkpoint.experts import (
    HUB,
    HubForm,
    Part,
    fused,
    holds_fused,
    holds_separate,
    separated,
)
from unipar.checkpoint.files import FileWriter, as_bytes
from unipar.checkpoint.huggingface import INDEX, read_directory, shard_name
from unipar.checkpoint.initial import pick_engine, read_any
from unipar.checkpoint.manifest import Manifest, TensorIndex
from unipar.checkpoint.read import ChunkReader
from unipar.checkpoint.safetensors import Entry, lay_out
from unipar.checkpoint.save import save_states
from unipar.errors import CheckpointError, ConfigError
from unipar.state import EngineState, TensorState
from unipar.strategy.registry import strategy_class
from unipar.utils.version import __version__
from unipar.world import Placement, World

logger = logging.getLogger(__name__)

DType = Literal["fp32", "bf16", "fp16"]
ExpertsIn = Literal["fused", "separate"]
ExpertsOut = HubForm | Literal["fused"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def to_safetensors(
    path: str | Path,
    output: str | Path,
    *,
    max_shard_bytes: int = 5_000_000_000,
    dtype: DType | torch.dtype | None = None,
    engine: str | None = None,
    experts: ExpertsOut | None = None,
) -> Path:
    """Write a checkpoint's weights in the Hugging Face layout.

    ``from_pretrained`` reads the directory once the model's ``config.json`` stands in it. A tied
    weight is written once. No more than one tensor is in memory.

    Args:
        path: a checkpoint, or a directory of them, of which the newest is taken.
        output: the directory to write into.
        max_shard_bytes: the most bytes of tensors in a file; a longer tensor has one to itself.
        dtype: what floating-point weights are written as; ``None`` leaves them.
        engine: which engine's weights; needed only where several were saved.
        experts: how experts are written that one tensor holds for a layer (transformers 5):
            ``"mixtral"`` and ``"qwen"`` give each of them the names that the hub has for models of
            that family; ``"fused"`` leaves them. Needed only where there are such.

    Returns:
        the directory.

    Raises:
        CheckpointError: the checkpoint is damaged, or the output cannot be written.
        ConfigError: the output holds a model already, an argument is not allowed, or one is needed
            for the form of experts.
    """
    target = _dtype(dtype)
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes={max_shard_bytes} is not above 0.")
    output = Path(output)
    if output.is_dir() and any(output.glob("*.safetensors*")):
        raise ConfigError(f"{output} holds safetensors already. Choose another directory.")
    manifest = read_any(path)
    weights = pick_engine(manifest, engine).weights
    parts = _parts(path, weights, experts)
    entries = [
        Entry(name, target if target and dtype.is_floating_point else dtype, part.shape)
        for name, part in parts.items()
        for dtype in [weights[part.stored].dtype]
    ]
    shards = _divide(entries, max_shard_bytes)
    try:
        output.mkdir(parents=True, exist_ok=True)
        with ChunkReader(manifest) as reader:
            for number, shard in enumerate(shards, 1):
                _write_shard(
                    output / shard_name(number, len(shards)), shard, parts, weights, reader
                )
        if len(shards) > 1:
            _write_index(output, shards)
    except OSError as error:
        where = error.filename or output
        raise CheckpointError(f"Cannot write {where}: {error.strerror or error}.") from error
    return output


def _dtype(dtype: DType | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype '{dtype}' is unknown; it is one of {', '.join(_DTYPES)}.")
    return _DTYPES[dtype]


def _divide(entries: Sequence[Entry], max_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return shards


def _parts(
    path: str | Path, weights: Mapping[str, TensorIndex], experts: ExpertsOut | None
) -> Mapping[str, Part]:
    """What to write under which name."""
    if experts not in (None, "fused", *HUB):
        raise ConfigError(f"experts='{experts}' is unknown; it is one of fused, {', '.join(HUB)}.")
    if experts is None and holds_fused(weights):
        raise ConfigError(
            f"{path} holds all experts of a layer in one tensor (mlp.experts.gate_up_proj), and "
            "models of the hub have a tensor of each, whose names depend on the model. Say which: "
            "experts mixtral (block_sparse_moe.experts.0.w1, …), qwen (mlp.experts.0.gate_proj, …, "
            "as most others have), or fused to leave them as they are."
        )
    if experts is None or experts == "fused":
        return {n: Part(n, whole(index.shape), index.shape) for n, index in weights.items()}
    if not holds_fused(weights):
        raise ConfigError(
            f"experts='{experts}' was given, and {path} holds no tensor of all experts of a layer "
            "(mlp.experts.gate_up_proj). Leave experts out."
        )
    return separated(weights, experts)


def _write_shard(
    path: Path,
    shard: Sequence[Entry],
    parts: Mapping[str, Part],
    weights: Mapping[str, TensorIndex],
    reader: ChunkReader,
) -> None:
    layout = lay_out(shard, {"format": "pt"})
    with FileWriter(path, layout.header) as file:
        for entry, start in zip(shard, layout.starts, strict=True):
            part = parts[entry.name]
            tensor = torch.empty(part.box.sizes, dtype=entry.dtype)
            reader.fill(part.stored, weights[part.stored], part.box, tensor)
            file.write(as_bytes(tensor), start)


def _write_index(output: Path, shards: Sequence[Sequence[Entry]]) -> None:
    index = {
        "metadata": {"total_size": sum(entry.nbytes for shard in shards for entry in shard)},
        "weight_map": {
            entry.name: shard_name(number, len(shards))
            for number, shard in enumerate(shards, 1)
            for entry in shard
        },
    }
    (output / INDEX).write_text(json.dumps(index, indent=2) + "\n")


@dataclass(frozen=True, eq=False)
class _Stored(TensorState):
    """A tensor that lies in a file until it is asked for."""

    index: TensorIndex
    reader: ChunkReader

    def read(self) -> Sequence[torch.Tensor]:
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.reader.fill(self.name, self.index, whole(self.shape), tensor)
        return (tensor,)

    def write(self, tensors: Sequence[torch.Tensor]) -> None:
        raise CheckpointError(f"Tensor '{self.name}' is being converted and cannot be written to.")


def from_safetensors(
    source: str | Path,
    output: str | Path,
    *,
    engine: str = "model",
    experts: ExpertsIn | None = None,
) -> Path:
    """Write a checkpoint of the weights in a Hugging Face directory; training can start from it.

    Args:
        source: a safetensors file, or a directory of them.
        output: the directory of checkpoints that takes it, as step 0.
        engine: the name of the engine that is to load it.
        experts: how experts are stored that have tensors of their own, by the hub's names:
            ``"fused"``, all of a layer in one, as transformers 5 has them, or ``"separate"``, as
            they are. Needed only where there are such.

    Returns:
        the checkpoint's path, ``output/step-00000000``.

    Raises:
        CheckpointError: the source is missing or damaged, or the output cannot be written.
        ConfigError: ``experts`` is needed, or means nothing.
    """
    source = Path(source)
    if not source.exists():
        raise CheckpointError(f"{source} does not exist.")
    found = read_directory(source)
    stored = found.engines["model"].weights
    if experts not in (None, "fused", "separate"):
        raise ConfigError(f"experts='{experts}' is unknown; it is fused or separate.")
    if holds_separate(stored) != (experts is not None):
        raise ConfigError(
            f"{source} holds tensors of each expert, by the hub's names. Say what training starts "
            "from: experts fused, as models of transformers 5 have them (mlp.experts.gate_up_proj, "
            "mlp.experts.down_proj), or separate, as they are."
            if experts is None
            else f"experts='{experts}' was given, and {source} holds no tensor of a single expert "
            "by the hub's names. Leave experts out."
        )
    if experts == "fused":
        stored = fused(stored)
    manifest = _manifest(output, step=0, strategy="", weights_only=True)
    with ChunkReader(found) as reader:
        weights = [
            _Stored(name, index.shape, index.dtype, (whole(index.shape),), index, reader)
            for name, index in stored.items()
        ]
        return save_states(manifest, {engine: EngineState(weights)}, World(Placement()), None)


@runtime_checkable
class CheckpointImporter(Protocol):
    """A strategy class that reads what its framework itself saves; ``unipar convert --from``."""

    @classmethod
    def read_checkpoint(cls, path: Path) -> EngineState:
        """Describe a checkpoint of the framework's own, to be read tensor by tensor.

        The state's ``extra`` has ``num_steps``, the training steps taken. A state without moments
        holds weights alone.

        Args:
            path: what the framework's own users would load from.

        Raises:
            ConfigError: it is no checkpoint of the framework's.
            CheckpointError: it is damaged, or holds what cannot be converted.
        """
        ...

    @classmethod
    def keep_beside(cls, path: Path, converted: Path) -> None:
        """Put beside what trains what else scripts of the framework find in a checkpoint.

        Args:
            path: what :meth:`read_checkpoint` was given.
            converted: the checkpoint that was made of it.

        Raises:
            CheckpointError: something of it cannot be taken over.
        """
        ...


def from_framework(
    name: str, source: str | Path, output: str | Path, *, engine: str = "model"
) -> Path:
    """Write a checkpoint of what a framework itself has saved; training goes on from it.

    Args:
        name: the strategy whose framework wrote the source.
        source: what that framework's own users would load from.
        output: the directory of checkpoints that takes it.
        engine: the name of the engine that is to load it.

    Returns:
        the checkpoint's path, ``output/step-…``.

    Raises:
        CheckpointError: the source is missing or damaged, or the output cannot be written.
        ConfigError: that strategy reads no such checkpoint.
    """
    source = Path(source)
    if not source.exists():
        raise CheckpointError(f"{source} does not exist.")
    strategy = strategy_class(name)
    if not issubclass(strategy, CheckpointImporter):
        raise ConfigError(
            f"strategy '{name}' reads no checkpoints of a framework's own. unipar convert "
            "reads unipar's checkpoints and safetensors: leave --from out."
        )
    state = strategy.read_checkpoint(source)
    moments = list(state.optimizer)
    state.optimizer = moments
    if not moments:
        logger.warning(
            "%s says of no optimizer state whose it is: only weights are taken over, and the "
            "optimizer starts over.",
            source,
        )
    step = int(state.extra["num_steps"])
    manifest = _manifest(output, step=step, strategy=name, weights_only=not moments)
    path = save_states(manifest, {engine: state}, World(Placement()), None)
    strategy.keep_beside(source, path)
    return path


def _manifest(output: str | Path, *, step: int, strategy: str, weights_only: bool) -> Manifest:
    return Manifest(
        path=Path(output).absolute(),
        step=step,
        strategy=strategy,
        world_size=1,
        engines={},
        files={},
        weights_only=weights_only,
        unipar_version=__version__,
        torch_version=str(torch.__version__),
    )
