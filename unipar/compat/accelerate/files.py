"""Files of a script that its run writes: once, and never a part of what ranks divide."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from unipar.compat.models import PreparedModel
from unipar.errors import ConfigError
from unipar.state import is_dtensor

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def check_whole(obj: Any, models: Iterable[PreparedModel]) -> None:
    """Refuse what holds a rank's part of a tensor.

    Raises:
        ConfigError: it does.
    """
    found = list(_named(obj))
    shapes = {
        name: shape
        for model in models
        if model.training_by is not None
        for name, shape in model.whole_shapes.items()
    }
    for name, tensor in found:
        known = shapes.get(name.rpartition("module.")[2] or name)
        emptied = known is not None and tensor.shape != known and not tensor.numel()
        if is_dtensor(tensor) or emptied:
            raise ConfigError(
                f"'{name}' is only a part here: the strategy divides the model among ranks. Save "
                "accelerator.get_state_dict(model), which all ranks call, or use "
                "accelerator.save_model(model, directory)."
            )


def _named(obj: Any, name: str = "") -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(obj, torch.Tensor):
        yield name, obj
    elif isinstance(obj, Mapping):
        for key, value in obj.items():
            yield from _named(value, str(key))
    elif isinstance(obj, (list, tuple)):
        for value in obj:
            yield from _named(value, name)


def write(obj: Any, f: Any, *, safe: bool) -> None:
    """Write an object, or tensors by name as safetensors."""
    if not safe:
        torch.save(obj, f)
        return
    from safetensors.torch import save_file

    tensors = {name: one.detach().contiguous() for name, one in _untied(obj).items()}
    save_file(tensors, f, metadata={"format": "pt"})


def _untied(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by name, of those that are tied the first alone."""
    held: dict[int, str] = {}
    return {
        name: one
        for name, one in state.items()
        if held.setdefault(id(one) if not one.numel() else one.data_ptr(), name) == name
    }


def write_model(
    state: Mapping[str, torch.Tensor], directory: Path, max_shard_size: int | str, *, safe: bool
) -> None:
    """Write weights into one file, or into several with an index where they are larger.

    Args:
        state: weights by name.
        directory: is made.
        max_shard_size: the most bytes of a file, as a number or as ``10GB``.
        safe: as safetensors.
    """
    directory.mkdir(parents=True, exist_ok=True)
    stem, ending = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    # An index names what its files hold.
    state = _untied(state) if safe else state
    shards: list[dict[str, torch.Tensor]] = [{}]
    size, limit = 0, num_bytes(max_shard_size)
    for name, tensor in state.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    pattern = re.compile(rf"{stem}-\d{{5}}-of-\d{{5}}\.{ending}")
    for old in directory.iterdir():
        if pattern.fullmatch(old.name):
            old.unlink()
    if len(shards) == 1:
        write(shards[0], directory / f"{stem}.{ending}", safe=safe)
        return
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"{stem}-{number:05}-of-{len(shards):05}.{ending}"
        write(shard, directory / file, safe=safe)
        files |= dict.fromkeys(shard, file)
    index = {
        "metadata": {"total_size": sum(one.nbytes for one in state.values())},
        "weight_map": files,
    }
    (directory / f"{stem}.{ending}.index.json").write_text(json.dumps(index, indent=2) + "\n")


def num_bytes(size: int | str) -> int:
    """A number of bytes, such as ``5GB`` or ``512MiB``.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(size, int):
        return size
    found = re.fullmatch(r"(\d+)\s*([KMG]?I?)B", size.upper())
    if found is None or found[2] not in _UNITS:
        raise ConfigError(f"max_shard_size={size!r} is no size. Write 10GB or 512MiB.")
    return int(found[1]) * _UNITS[found[2]]
