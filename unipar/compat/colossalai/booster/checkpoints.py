"""Files of weights, optimizers and schedulers, in Colossal-AI's own formats.

A file has whole tensors under the names of the model that was boosted, and an optimizer's state by
the numbers of its parameters, as a plain optimizer's is. Directories have several such files and an
index. All ranks take part; rank 0 writes and reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from unipar.compat.accelerate.files import write
from unipar.compat.colossalai.booster.boosted import BoostedModel, BoostedOptimizer
from unipar.compat.gathering import GatheredModel, GatheredOptimizer
from unipar.errors import CheckpointError
from unipar.world import World

_WEIGHTS, _SAFE_WEIGHTS = "pytorch_model.bin", "model.safetensors"
_STATES, _GROUPS = "pytorch_optim.bin", "pytorch_optim_group.bin"


def save_model(
    model: BoostedModel, path: Path, world: World, *, shard_mb: int | None, safe: bool
) -> None:
    """Write a model's weights. Collective.

    Args:
        model: boosted.
        path: of the file, or of the directory.
        world: the joined processes.
        shard_mb: the most of a file in a directory, in MiB; ``None`` writes one file.
        safe: whether files are safetensors.
    """
    state = model.whole_state_dict()
    if world.is_main:
        names = _names_in_files(model)
        state = {names.get(name, name): one for name, one in state.items()}
        if safe:
            state = _with_own_memory(state)
        if shard_mb is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(state, path, safe=safe)
        else:
            _write_shards(state, path, _SAFE_WEIGHTS if safe else _WEIGHTS, shard_mb, {}, safe=safe)
            _write_config(model, path, state)
    world.barrier()


def load_model(model: BoostedModel, path: Path, world: World, *, strict: bool) -> None:
    """Take over weights. Collective.

    Args:
        model: boosted.
        path: of a file, of a directory, or of its index.
        world: the joined processes.
        strict: whether names have to be the model's; else those that are not are left out.

    Raises:
        CheckpointError: there is none, or names or shapes differ.
    """
    training = model.training_by
    own_names = {file: own for own, file in _names_in_files(model).items()}

    def read() -> dict[Any, Any]:
        found, _ = _read(path, _SAFE_WEIGHTS, _WEIGHTS)
        return {own_names.get(name, name): one for name, one in found.items()}

    if training is None:
        model.module.load_state_dict(read(), strict=strict)
        return
    gathered = GatheredModel(training.engine, world, rank0_only=True)
    gathered.load_state_dict(_on_main(world, read), strict=strict)


def _names_in_files(model: BoostedModel) -> dict[str, str]:
    """The names of weights in files, by those of the model: those that it has without PEFT.

    So Colossal-AI has them (0.5.0, ``interface/model.py``), and a base model's files can be read.
    """
    base = model._unipar_base()
    within = next(name for name, one in model.module.named_modules() if one is base)
    if not within:
        return {name: name for name in model.whole_shapes}
    return {
        name: name.removeprefix(f"{within}.").replace(".base_layer.", ".")
        for name in model.whole_shapes
    }


def _with_own_memory(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of which each has its own memory: tied ones are in the file by each name."""
    held: set[int] = set()
    found = {}
    for name, one in state.items():
        found[name] = one.clone() if one.data_ptr() in held else one
        held.add(one.data_ptr())
    return found


def _write_config(model: BoostedModel, directory: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Write a model's own configuration beside its weights, where it has one that is written."""
    base = model._unipar_base()
    if not hasattr(base, "can_generate"):  # As models of transformers have it, and no others.
        return
    config = base.config
    config.architectures = [model._unipar_class_name]
    dtypes = (str(one.dtype) for one in state.values() if one.is_floating_point())
    name = "dtype" if hasattr(config, "dtype") else "torch_dtype"  # Since transformers 4.56.
    setattr(config, name, next(dtypes, "torch.float32").removeprefix("torch."))
    config.save_pretrained(directory)
    if base.can_generate():
        base.generation_config.save_pretrained(directory)


def save_optimizer(
    optimizer: BoostedOptimizer, path: Path, world: World, *, shard_mb: int | None
) -> None:
    """Write an optimizer's state. Collective. See :func:`save_model`."""
    found = GatheredOptimizer(optimizer.engine, world, rank0_only=True).state_dict()
    if world.is_main:
        numbers = {name: number for number, name in enumerate(optimizer.names)}
        state = {numbers[name]: values for name, values in found["state"].items()}
        groups = [
            {**one, "params": [numbers[name] for name in one["params"]]}
            for one in found["param_groups"]
        ]
        if shard_mb is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"state": state, "param_groups": groups}, path)
        else:
            path.mkdir(parents=True, exist_ok=True)
            torch.save(groups, path / _GROUPS)
            _write_shards(state, path, _STATES, shard_mb, {"param_groups": _GROUPS}, safe=False)
    world.barrier()


def _as_torchs(values: Mapping[str, Any], of_group: Any) -> dict[str, Any]:
    """The state of a parameter with its steps in a tensor: Colossal-AI's Adams count in an int.

    Args:
        values: the state.
        of_group: the steps of its group, in which FusedAdam counts; or ``None``.
    """
    steps = values.get("step", of_group if "exp_avg" in values else None)
    counted = {"step": torch.tensor(float(steps))} if isinstance(steps, int) else {}
    return {**values, **counted}


def load_optimizer(optimizer: BoostedOptimizer, path: Path, world: World) -> None:
    """Take over an optimizer's state. Collective.

    Raises:
        CheckpointError: there is none, or parameters or shapes differ.
    """
    names = optimizer.names

    def read() -> dict[str, Any]:
        found, told = _read(path, _STATES)
        if any("." in str(name) for name in found):
            raise CheckpointError(
                f"{path} was written with use_async=True, in a form of Colossal-AI's own. Write "
                "it there by save_optimizer without use_async."
            )
        if "state" in found:
            state, groups = found["state"], found["param_groups"]
        else:
            state = {int(number): values for number, values in found.items()}
            file = _directory(path) / told["param_groups"]
            groups = torch.load(file, map_location="cpu", weights_only=True)
        held = sum(len(one["params"]) for one in groups)
        if held != len(names):
            raise CheckpointError(
                f"{path} is of an optimizer of {held} parameters, and this one has {len(names)}. "
                "Files of LowLevelZeroPlugin number those alone that are trained: build the "
                "optimizer over these, as HybridAdam(p for p in model.parameters() if "
                "p.requires_grad)."
            )
        steps = {number: one.get("step") for one in groups for number in one["params"]}
        return {
            "state": {
                names[number]: _as_torchs(values, steps.get(number))
                for number, values in state.items()
            },
            "param_groups": [
                {**one, "params": [names[number] for number in one["params"]]} for one in groups
            ],
        }

    gathered = GatheredOptimizer(optimizer.engine, world, rank0_only=True)
    gathered.load_state_dict(_on_main(world, read))


def save_scheduler(scheduler: Any, path: Path, world: World) -> None:
    """Write a scheduler's state into one file. Collective."""
    if world.is_main:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(scheduler.state_dict(), path)
    world.barrier()


def load_scheduler(scheduler: Any, path: Path) -> None:
    """Take over what :func:`save_scheduler` has written."""
    scheduler.load_state_dict(_read(path)[0])


def _on_main(world: World, read: Any) -> Any:
    """What rank 0 reads, and nothing elsewhere; its error on all ranks."""
    found: Any = {}
    error = None
    if world.is_main:
        try:
            found = read()
        except (CheckpointError, OSError) as failed:
            error = str(failed)
    error = world.broadcast(error)
    if error is not None:
        raise CheckpointError(error)
    return found


def _write_shards(
    values: Mapping[Any, Any],
    directory: Path,
    name: str,
    shard_mb: int,
    told: Mapping[str, Any],
    *,
    safe: bool,
) -> None:
    """Write values into files of a size, with an index beside them."""
    directory.mkdir(parents=True, exist_ok=True)
    stem, _, ending = name.rpartition(".")
    for old in directory.glob(f"{stem}-[0-9]*.{ending}"):
        old.unlink()
    total, places = 0, {}
    for number, shard in enumerate(_shards(values, shard_mb * 2**20), 1):
        file = f"{stem}-{number:05}.{ending}"
        write(shard, directory / file, safe=safe)
        total += sum(map(_bytes, shard.values()))
        places |= dict.fromkeys(map(str, shard), file)
    index = {"metadata": {"total_size": total, **told}, "weight_map": places}
    (directory / f"{name}.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _shards(values: Mapping[Any, Any], limit: int) -> Iterator[dict[Any, Any]]:
    shard: dict[Any, Any] = {}
    size = 0
    for key, value in values.items():
        if shard and size + _bytes(value) > limit:
            yield shard
            shard, size = {}, 0
        shard[key] = value
        size += _bytes(value)
    if shard:
        yield shard


def _bytes(value: Any) -> int:
    return sum(one.nbytes for one in tree_leaves(value) if isinstance(one, torch.Tensor))


def _read(path: Path, *names: str) -> tuple[dict[Any, Any], dict[str, Any]]:
    """What a file, or the files of a directory, hold; and what the index says beside."""
    if path.is_dir():
        indexes = sorted(path.glob("*.index.json"))
        if len(indexes) > 1:
            raise CheckpointError(
                f"{path} has several indexes: {', '.join(one.name for one in indexes)}. Pass the "
                "path of one of them, or write weights and optimizers into directories of their "
                "own."
            )
        found = [*indexes, *(path / name for name in names if (path / name).is_file())]
        if not found:
            raise CheckpointError(f"{path} has no index, and none of {', '.join(names)}.")
        path = found[0]
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}.")
    if not path.name.endswith(".index.json"):
        return _loaded(path), {}
    index = json.loads(path.read_text())
    values: dict[Any, Any] = {}
    for file in dict.fromkeys(index["weight_map"].values()):
        values |= _loaded(path.parent / file)
    return values, index["metadata"]


def _directory(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _loaded(file: Path) -> dict[Any, Any]:
    with file.open("rb") as opened:
        begins = opened.read(9)
    if begins[8:] == b"{":  # Behind the length of its header, whatever it is called.
        from safetensors.torch import load_file

        return dict(load_file(file))
    return torch.load(file, map_location="cpu", weights_only=True)
