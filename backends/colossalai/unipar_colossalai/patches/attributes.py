"""Gemini does not gather a parameter that an attribute or a reflected operator computes from."""

from __future__ import annotations

import torch

from unipar_colossalai.patches.patch import Patch, Undo

_COMPUTING = {
    *(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH")),
    *(
        getattr(torch.Tensor, f"__{name}__")
        for name in ("rsub", "rdiv", "rpow", "rmod", "rmatmul", "rfloordiv")
    ),
}
"""What begins with two underscores (an attribute is its ``__get__``), and reads the values."""


def _apply() -> Undo:
    from colossalai.tensor.colo_parameter import (  # pyright: ignore[reportMissingImports]
        WHITE_LIST_FUNCS,
    )

    added = _COMPUTING - WHITE_LIST_FUNCS
    WHITE_LIST_FUNCS.update(added)

    def undo() -> None:
        WHITE_LIST_FUNCS.difference_update(added)

    return undo


PATCH = Patch(
    name="attributes-that-compute",
    target="colossalai.tensor.colo_parameter:is_no_hook_op",
    source="53f220ec180ae7cbefddbd32762d2ef64f97aa8bae71bfd2a0516cd6e9b2faef",
    reason="colossalai/tensor/colo_parameter.py, is_no_hook_op: every function whose name begins "
    "with two underscores is taken not to read the parameter, so x @ a.T or 1 - a computes with "
    "weights that are not there, and ends in 'Some unsupported torch function is operated upon'",
    device_types=frozenset({"cpu", "cuda"}),
    plugins=frozenset({"gemini"}),
    apply=_apply,
)
