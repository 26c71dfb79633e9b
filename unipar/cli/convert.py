"""``unipar convert``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, get_args

from cyclopts import Parameter

from unipar.errors import ConfigError

Format = Literal["unipar", "safetensors"]
DType = Literal["fp32", "bf16", "fp16"]
Experts = Literal["mixtral", "qwen", "fused", "separate"]

_UNITS = {"": 1, "B": 1}
for _power, _prefix in enumerate("KMGT", 1):
    _UNITS[f"{_prefix}B"] = 1000**_power
    _UNITS[f"{_prefix}IB"] = 1024**_power


def convert(
    checkpoint: Path,
    output: Path,
    *,
    from_: Annotated[str | None, Parameter(name="--from")] = None,
    to: Format | None = None,
    max_shard_size: str = "5GB",
    dtype: DType | None = None,
    experts: Experts | None = None,
) -> None:
    """Turn a checkpoint into Hugging Face safetensors, or back, or take over a framework's own.

    Args:
        checkpoint: a checkpoint of unipar (or the directory of a run's checkpoints, of which the
            newest is taken), a directory or file of safetensors, or what a framework has saved.
        output: the directory to write.
        from_: what the checkpoint is: unipar, safetensors, or the strategy whose framework wrote
            it, such as deepspeed; left out: what it looks like.
        to: what to write; left out: the other format.
        max_shard_size: the most bytes of one safetensors file, such as 5GB or 500MiB.
        dtype: what to store weights as in safetensors; left out: as they are.
        experts: the form of a mixture's experts; needed only where there are any. To safetensors:
            mixtral or qwen, by the hub's names for each expert, or fused, as transformers 5 has
            them. From safetensors: fused or separate.
    """
    given = from_ or _look(checkpoint)
    wanted = to or ("safetensors" if given == "unipar" else "unipar")
    foreign = given not in get_args(Format)
    if foreign and wanted != "unipar":
        raise ConfigError(
            f"--from {given} makes a checkpoint of unipar. Leave --to out, and convert what comes "
            f"of it to {wanted} afterwards."
        )
    if given == wanted:
        raise ConfigError(
            f"{checkpoint} is {given} already, and --to {wanted} was given. Leave --to out for the "
            "other format."
        )
    limit = parse_size(max_shard_size)
    if wanted == "unipar" and dtype is not None:
        raise ConfigError("--dtype is for safetensors: a checkpoint of unipar is always fp32.")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} exists and is not an empty directory; choose another output.")

    from unipar import checkpoint as formats

    if foreign:
        if experts is not None:
            raise ConfigError("--experts is for safetensors. Leave it out.")
        written = formats.from_framework(given, checkpoint, output)
    elif wanted == "unipar":
        if experts not in (None, "fused", "separate"):
            raise ConfigError(f"--experts {experts} is for safetensors. Say fused or separate.")
        written = formats.from_safetensors(checkpoint, output, experts=experts)
    else:
        if experts == "separate":
            raise ConfigError("--experts separate has no names. Say mixtral, qwen or fused.")
        written = formats.to_safetensors(
            _complete(checkpoint), output, max_shard_bytes=limit, dtype=dtype, experts=experts
        )
    print(f"wrote {written or output}")


def parse_size(text: str) -> int:
    """Bytes of ``"5GB"`` (powers of 1000) or ``"500MiB"`` (powers of 1024).

    Raises:
        ConfigError: the text is no size.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = match[2].upper() if match else None
    if match is None or unit not in _UNITS or float(match[1]) <= 0:
        raise ConfigError(
            f"--max-shard-size {text} is not a size above 0. Write it like 5GB or 500MiB."
        )
    return int(float(match[1]) * _UNITS[unit])


def _look(path: Path) -> Format:
    if not path.exists():
        raise ConfigError(f"there is no checkpoint {path}.")
    if path.suffix == ".safetensors":
        return "safetensors"
    if path.is_dir():
        if _complete_or_none(path) is not None:
            return "unipar"
        if any(path.glob("*.safetensors")):
            return "safetensors"
    raise ConfigError(
        f"{path} looks neither like a checkpoint of unipar nor like safetensors. "
        "Give the directory that holds it, or say what it is with --from."
    )


def _complete(path: Path) -> Path:
    found = _complete_or_none(path)
    return path if found is None else found


def _complete_or_none(path: Path) -> Path | None:
    from unipar.checkpoint import newest
    from unipar.checkpoint.manifest import MANIFEST

    return path if (path / MANIFEST).is_file() else newest(path)
