"""What a script sets on a model's modules between passes, by which it may compute otherwise."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from unipar.compat.dividing.batch_norms import OVER
from unipar.compat.dividing.cutting import PLAIN

_NO_ROWS = vars(nn.Module()).keys() - {"_buffers"}


class Settings:
    """Numbers, texts, and tensors of rows that modules hold, but for weights.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._objects: list[int] = []
        self._numbers: list[Any] = []
        self._with_rows: list[tuple[int, str, dict[str, Any]]] = []
        self._rows: set[tuple[int, str, int]] | None = None

    def look(self, samples: int) -> tuple[bool, bool]:
        """What is another than when this was last called.

        Args:
            samples: of the batch.

        Returns:
            Whether numbers or texts are, and whether there is a tensor of so many rows.
        """
        modules = list(self._module.modules())
        # Before each pass, so what nobody has touched is seen at once. The numbers are kept, so
        # that no other one has the identity of one that is gone.
        objects = list(map(id, modules))
        objects += [id(value) for one in modules for value in vars(one).values()]
        changed = False
        if objects != self._objects:
            self._objects = objects
            owners = [(at, key, vars(one)) for at, one in enumerate(modules) for key in vars(one)]
            numbers = [
                own[key] for _, key, own in owners
                if type(own[key]) in PLAIN and key not in ("training", OVER)
            ]  # fmt: skip
            changed = bool(self._numbers) and self._numbers != numbers
            self._numbers = numbers
            self._with_rows = [
                one for one in owners
                if one[1] not in _NO_ROWS
                and isinstance(one[2][one[1]], (torch.Tensor, dict, list, tuple))
            ]  # fmt: skip
        known, found = self._rows, self._rows_now()
        self._rows = found | (known or set())
        has_rows = known is not None and any(rows == samples for *_, rows in found - known)
        return changed, has_rows

    def _rows_now(self) -> set[tuple[int, str, int]]:
        return {
            (at, key, len(one))
            for at, key, own in self._with_rows
            for one in _items(own.get(key))
            if isinstance(one, torch.Tensor) and one.dim()
        }


def attributes_of(module: nn.Module) -> set[str]:
    """Names of the attributes that modules have."""
    return {
        f"{name}.{key}".lstrip(".") for name, one in module.named_modules() for key in vars(one)
    }


def _items(value: Any) -> Collection[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else (value,)
