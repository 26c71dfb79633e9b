"""What is read of a checkpoint of DeepSpeed's, held to be of the kinds that it must be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from unipar.checkpoint.safetensors import check_size
from unipar.errors import CheckpointError

_LOOSE = ConfigDict(strict=True, extra="ignore", arbitrary_types_allowed=True)
MAX_DEPTH, MAX_VALUES = 64, 5_000_000


def _tensor(value: Any) -> torch.Tensor:
    """Hold that a tensor is dense, here, and no larger than what is stored of it."""
    if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise ValueError("is no tensor")
    if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
        raise ValueError("is no dense tensor")
    value = value.detach()
    if value.numel() * value.itemsize > value.untyped_storage().nbytes():
        raise ValueError("has more elements than are stored")
    return value


def _tensor_or_not(value: Any) -> Any:
    return _tensor(value) if isinstance(value, torch.Tensor) else value


def _flat(value: torch.Tensor) -> torch.Tensor:
    if value.dim() != 1 or not value.is_floating_point():
        raise ValueError("is no flat partition of numbers")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError("is no shape")
    try:
        check_size("it", value, torch.float32)
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    return tuple(value)


_Count = Annotated[int, Field(ge=0, le=2**53)]
_Tensor = Annotated[Any, AfterValidator(_tensor)]
_Value = Annotated[Any, AfterValidator(_tensor_or_not)]
_Flat = Annotated[_Tensor, AfterValidator(_flat)]
_Shapes = dict[str, Annotated[tuple[int, ...], BeforeValidator(_shape)]]


class Model(BaseModel):
    """A file of the model.

    Attributes:
        module: weights; those that are divided among the optimizer's files are empty here.
        global_steps: steps taken.
        global_samples: samples seen.
        skipped_steps: steps left out.
        param_shapes: of each of the optimizer's groups, the shapes by name in the group's order.
        shared_params: further names of tied weights.
        frozen_param_shapes: shapes of what is not trained.
        frozen_param_fragments: this rank's part of what is not trained.
        buffer_names: names of what is no parameter.
        lr_scheduler: the scheduler's state.
    """

    model_config = _LOOSE
    module: dict[str, _Tensor]
    global_steps: _Count
    global_samples: _Count | None = None
    skipped_steps: _Count = 0
    param_shapes: list[_Shapes] | None = None
    shared_params: dict[str, str] | None = None
    frozen_param_shapes: _Shapes | None = None
    frozen_param_fragments: dict[str, _Tensor] | None = None
    buffer_names: list[str] = []
    lr_scheduler: Any = None


class Base(BaseModel):
    """PyTorch's state dict of the optimizer over flat partitions."""

    model_config = _LOOSE
    state: dict[_Count, dict[str, _Value]]
    param_groups: list[dict[str, _Value]]


class Partitioned(BaseModel):
    """An optimizer of stages 1 and 2.

    Attributes:
        group_paddings: how many elements the last rank's part of each group is filled up by.
    """

    model_config = _LOOSE
    single_partition_of_fp32_groups: list[_Flat]
    group_paddings: list[_Count] | None = None
    base_optimizer_state: Base | list[Any]
    partition_count: _Count | list[_Count]
    param_alignment_paddings: list[list[_Count]] | None = None


class Sharded(BaseModel):
    """An optimizer of stage 3."""

    model_config = _LOOSE
    fp32_flat_groups: list[_Flat]
    optimizer_state_dict: Base
    partition_count: _Count | list[_Count]


class _Optimizer(BaseModel):
    model_config = _LOOSE
    optimizer_state_dict: Mapping[str, Any]


def model(contents: Any, file: Path) -> Model:
    """A file of the model.

    Raises:
        CheckpointError: a field is missing, or holds something else.
    """
    return _validated(Model, contents, file)


def optimizer(contents: Any, file: Path) -> Partitioned | Sharded:
    """A file of the optimizer.

    Raises:
        CheckpointError: a field is missing, or holds something else.
    """
    state = _validated(_Optimizer, contents, file).optimizer_state_dict
    kind = Sharded if "fp32_flat_groups" in state else Partitioned
    return _validated(kind, dict(state), file)


def _validated(kind: type[Any], contents: Any, file: Path) -> Any:
    _check_extent(contents, file)
    try:
        return kind.model_validate(contents)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"])) or "it"
        raise CheckpointError(f"{file} is damaged: {field}: {first['msg']}.") from error


def _check_extent(contents: Any, file: Path) -> None:
    """Hold that walking through all values ends, and that the file has room for each tensor.

    In a pickle one list can stand in many places, or in itself.
    """
    level, count, size = [contents], 0, file.stat().st_size
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                below += [*value, *value.values()]
            elif isinstance(value, (list, tuple, set)):
                below += value
            elif isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() > size:
                raise CheckpointError(f"{file} is damaged: a tensor is larger than the file.")
            count += 1
            if count + len(below) > MAX_VALUES:
                raise CheckpointError(f"{file} holds more than {MAX_VALUES} values.")
        if not below:
            return
        level = below
    raise CheckpointError(f"{file} holds values more than {MAX_DEPTH} deep in one another.")


def number(value: Any) -> float | None:
    """A finite number, given as such or as a tensor of one element; ``None`` for all else."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
        value = value.item()
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if known and math.isfinite(value) and abs(value) < 2**63 else None
