"""What scripts have written into checkpoints, which are read without running code of a file."""

from __future__ import annotations

import io
from typing import Any

import torch

from unipar.errors import ConfigError


def check_readable(value: Any, what: str) -> None:
    """Refuse what could be written, and not read again.

    Args:
        value: what is to be written.
        what: the call, and what of it this is.

    Raises:
        ConfigError: it holds other objects than plain values and tensors.
    """
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except Exception as error:
        raise ConfigError(
            f"{what} holds objects that a checkpoint is not read with. Give plain values and "
            "tensors, as vars(args) instead of args, and tolist() of an array."
        ) from error
