"""``unipar.yaml``: how a migrated script runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, Field

from unipar.config import validate
from unipar.config.merging import merge
from unipar.config.settings import ENV_PREFIX, read_environment
from unipar.strategy import LossScale, OnNaN, Precision, SelfTest
from unipar.utils.devices import DeviceChoice
from unipar.utils.documents import Document, read_document

FILE = "unipar.yaml"
_Config = TypeVar("_Config", bound=BaseModel)


class ScriptConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """The contents of ``unipar.yaml`` for a migrated script."""

    strategy: str | dict[str, Any] = "auto"
    """Which framework runs it: a name, `name:option=value,…`, a mapping with `name`, or `auto`."""
    precision: Precision = "fp32"
    """Compute dtype; weights and reductions stay fp32."""
    loss_scale: LossScale | None = None
    """How the scale of losses in precision fp16 begins and changes; left out: as the script has it,
    or as PyTorch's does."""
    device: DeviceChoice = "auto"
    """What to train on; auto takes the accelerator if there is one."""
    timeout: float = Field(default=1800.0, gt=0)
    """Seconds that a collective waits for a missing rank."""
    on_nan: OnNaN = "raise"
    """What a step with a non-finite loss does."""
    self_test: SelfTest = "auto"
    """Whether a few steps of a tiny model under the strategy are compared with a plain loop first,
    once for a machine and its versions; auto does so on GPUs."""
    divide_batches: bool = True
    """Whether models of a script that knows nothing of ranks compute parts of batches, where parts
    make the whole; else each rank computes the whole."""


def asked_scale(**fields: Any) -> dict[str, LossScale | None]:
    """The setting ``loss_scale`` that a script asks for by its framework's own arguments.

    Raises:
        ConfigError: no scale can begin or change so.
    """
    return {"loss_scale": validate(ScriptConfig, {"loss_scale": fields}).loss_scale}


def file_beside_script() -> Path:
    """Where the settings of the running script are; in a notebook, the current directory."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return (Path(main).resolve().parent if main else Path.cwd()) / FILE


def read_config(file: Path) -> ScriptConfig:
    """Read the file and the environment of a migrated script; defaults without a file.

    Raises:
        ConfigError: every wrong key and value, with file and line.
    """
    return read_settings(ScriptConfig, file)


def read_settings(kind: type[_Config], file: Path) -> _Config:
    """Read a file and the environment; defaults where there is no such file.

    Args:
        kind: the settings that there are.
        file: what to read; variables of the form ``UNIPAR_STRATEGY`` win over it.

    Raises:
        ConfigError: every wrong key and value, with file and line.
    """
    document = read_document(file) if file.is_file() else Document(file, {}, {})
    own = {f"{ENV_PREFIX}{name.upper()}" for name in kind.model_fields}
    layer = read_environment({k: v for k, v in os.environ.items() if k.split("__")[0] in own})
    return validate(
        kind,
        merge(document.data, layer.values),
        where=lambda key: layer.where(key) or document.where(key),
    )
