"""The files of a checkpoint of DeepSpeed's: where they are, and what is in them."""

from __future__ import annotations

import os
import pickle
import pickletools
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from unipar.checkpoint.paths import inside, is_plain, open_regular, read_bytes
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


_PLAIN = frozenset(
    {
        "_codecs.encode",
        "builtins.complex",
        "builtins.getattr",
        "builtins.set",
        "collections.Counter",
        "collections.OrderedDict",
        "torch.Size",
        "torch.Tensor",
        "torch._tensor._rebuild_from_type_v2",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_tensor_v2",
        "torch.device",
        "torch.nn.parameter.Parameter",
        "torch.serialization._get_layout",
        *_STAND_INS,
        *(str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)),
        *(
            f"torch.{name}"
            for name in dir(torch)
            if re.fullmatch(r"(?!Un|Ty)[A-Z]\w+Storage", name)
        ),
    }
)
"""What a file may name. PyTorch allows more, such as ``bytearray`` and storages, with which a few
bytes allocate as many as they like."""
MAX_PICKLE_BYTES = 256 << 20


def step_directory(path: Path) -> Path:
    """The directory of one step: ``path``, or the latest of those in it.

    Raises:
        ConfigError: it holds no checkpoint of DeepSpeed's.
        CheckpointError: it is of a model that is not whole in each data-parallel rank.
    """
    latest = path / "latest"
    directory = path
    if latest.is_file():
        name = read_bytes(latest, 4096).decode(errors="replace").strip()
        if not is_plain(name):
            raise CheckpointError(
                f"{latest} has {name[:200]!r}, which is no relative path of a directory in {path}."
            )
        directory = inside(path, name)
    if not any(directory.glob("*mp_rank_*_model_states.pt")):
        if directory != path:
            raise CheckpointError(f"{latest} names {directory}, which holds no checkpoint.")
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
    return _by_rank(directory, "zero_pp_rank_*_mp_rank_00_model_states.pt")


def of_optimizer(directory: Path) -> list[Path]:
    """The files of the optimizer, in the order of ranks; none at stage 0."""
    return _by_rank(directory, "*zero_pp_rank_*_mp_rank_00_optim_states.pt")


def _by_rank(directory: Path, pattern: str) -> list[Path]:
    found: dict[int, Path] = {}
    for file in sorted(directory.glob(pattern)):
        match = re.search("zero_pp_rank_([0-9]{1,9})_", file.name)
        if match is None or int(match[1]) in found:
            raise CheckpointError(f"{file} is of no rank, or of one that has a file already.")
        found[int(match[1])] = file
    return [found[rank] for rank in sorted(found)]


def load(file: Path) -> dict[str, Any]:
    """A file's contents, mapped from the disk; only tensors and plain values are unpickled.

    Raises:
        CheckpointError: it is damaged, no regular file, or holds other objects.
    """
    inside(file.parent, file.name)
    named = _check_archive(file)
    stand_ins: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
        (_stand_in(name), name) for name in _STAND_INS
    ]
    # How Python 3.11 to 3.11.3 stores a member of an enumeration.
    stand_ins.append((_member, "builtins.getattr"))
    try:
        with torch.serialization.safe_globals(stand_ins):
            contents = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        told = "builtins.getattr" if "builtins.getattr" in named else str(error)
        raise _not_plain(file, told) from error
    except Exception as error:
        # What an unpickler raises over a pickle that no pickler wrote can be anything.
        told = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{file} is damaged: {told}.") from error
    if not isinstance(contents, dict):
        raise CheckpointError(f"{file} is damaged: it holds a {type(contents).__name__}.")
    return contents


def _not_plain(file: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{file} holds objects that are not unpickled, since that runs what the file says: "
        f"{what}. Save it again with plain values alone in client_state."
    )


def _check_archive(file: Path) -> set[str]:
    """Hold that a file is as ``torch.save`` writes it, and names nothing but plain values.

    Nothing in it may be compressed: that is how a small file becomes a large one in memory.

    Returns:
        what it names.
    """
    with os.fdopen(open_regular(file), "rb") as opened:
        try:
            with zipfile.ZipFile(opened) as archive:
                entries = archive.infolist()
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                    raise CheckpointError(f"{file} is damaged: parts of it are compressed.")
                pickles = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
                if len(pickles) != 1 or pickles[0].file_size > MAX_PICKLE_BYTES:
                    raise CheckpointError(f"{file} is damaged: data.pkl is missing or too long.")
                data = archive.read(pickles[0])
            named = {
                str(argument).replace(" ", ".").replace("__builtin__.", "builtins.")
                for opcode, argument, _ in pickletools.genops(data)
                if opcode.name == "GLOBAL"
            }
        except CheckpointError:
            raise
        except Exception as error:
            told = (str(error) or type(error).__name__).splitlines()[0]
            raise CheckpointError(f"{file} is damaged: {told}.") from error
    if named - _PLAIN:
        raise _not_plain(file, ", ".join(sorted(named - _PLAIN)[:4]))
    return named


def _member(kind: Any, name: str) -> _Opaque:
    """What ``getattr`` gives in a file: a member of one of the stand-ins, and nothing else."""
    if not (isinstance(kind, type) and issubclass(kind, _Opaque)):
        raise pickle.UnpicklingError(f"an attribute '{name}' of an object")
    return kind(name)


def _stand_in(name: str) -> type[_Opaque]:
    return type(name.rpartition(".")[2], (_Opaque,), {})
