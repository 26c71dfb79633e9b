"""The files of a checkpoint of DeepSpeed's: where they are, and what is in them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from unipar.errors import CheckpointError, ConfigError


class _Opaque:
    """Stands for an object of DeepSpeed's in a file, with none of its code."""

    def __init__(self, *args: Any) -> None:
        self.args = args


_STAND_INS = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


def step_directory(path: Path) -> Path:
    """The directory of one step: ``path``, or the latest of those in it.

    Raises:
        ConfigError: it holds no checkpoint of DeepSpeed's.
        CheckpointError: it is of a model that is not whole in each data-parallel rank.
    """
    latest = path / "latest"
    directory = path / latest.read_text().strip() if latest.is_file() else path
    if not any(directory.glob("*mp_rank_*_model_states.pt")):
        raise ConfigError(
            f"{directory} holds no checkpoint of DeepSpeed's (*mp_rank_00_model_states.pt). Give "
            "the directory that save_checkpoint was given, or one of the global_step… in it."
        )
    _refuse_parallel(directory)
    return directory


def _refuse_parallel(directory: Path) -> None:
    parts = {
        "*mp_rank_01_*": "tensor-parallel",
        "layer_*-model_*": "pipeline-parallel",
        "*expert_*": "mixture-of-experts",
    }
    for pattern, kind in parts.items():
        if any(directory.glob(pattern)):
            raise CheckpointError(
                f"{directory} is of a {kind} model, whose parts are not put together here. "
                "Make a universal checkpoint of it with DeepSpeed's own tools."
            )


def of_model(directory: Path) -> list[Path]:
    """The files of the model: one; at stage 3 one of each rank, in their order."""
    whole_model = directory / "mp_rank_00_model_states.pt"
    if whole_model.is_file():
        return [whole_model]
    return sorted(directory.glob("zero_pp_rank_*_mp_rank_00_model_states.pt"), key=_rank_in)


def of_optimizer(directory: Path) -> list[Path]:
    """The files of the optimizer, in the order of ranks; none at stage 0."""
    return sorted(directory.glob("*zero_pp_rank_*_mp_rank_00_optim_states.pt"), key=_rank_in)


def _rank_in(file: Path) -> int:
    return int(file.name.split("zero_pp_rank_")[1].split("_")[0])


def load(file: Path) -> dict[str, Any]:
    """A file's contents, mapped from the disk; only tensors and plain values are unpickled.

    Raises:
        CheckpointError: it is damaged, or holds other objects.
    """
    stand_ins: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
        (_stand_in(name), name) for name in _STAND_INS
    ]
    # How Python 3.11 to 3.11.3 stores a member of an enumeration.
    stand_ins.append((_member, "builtins.getattr"))
    try:
        with torch.serialization.safe_globals(stand_ins):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        unknown = ", ".join(
            set(torch.serialization.get_unsafe_globals_in_checkpoint(file)) - set(_STAND_INS)
        )
        raise CheckpointError(
            f"{file} holds objects that are not unpickled, since that runs what the file says: "
            f"{unknown or error}. Save it anew with plain values alone in client_state."
        ) from error
    except (OSError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{file} is damaged: {str(error).splitlines()[0]}.") from error


def _member(kind: Any, name: str) -> _Opaque:
    """What ``getattr`` gives in a file: a member of one of the stand-ins, and nothing else."""
    if not (isinstance(kind, type) and issubclass(kind, _Opaque)):
        raise pickle.UnpicklingError(f"an attribute '{name}' of an object")
    return kind(name)


def _stand_in(name: str) -> type[_Opaque]:
    return type(name.rpartition(".")[2], (_Opaque,), {})
