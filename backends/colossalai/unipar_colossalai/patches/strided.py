"""Gemini lets PyTorch read gradients whose storage it has freed, if they are laid out otherwise."""

from __future__ import annotations

from typing import Any

import torch

from unipar_colossalai.patches.patch import Patch, Undo


def _apply() -> Undo:
    from colossalai.zero.gemini.gemini_ddp import (  # pyright: ignore[reportMissingImports]
        GeminiDDP,
    )

    original, handle = vars(GeminiDDP)["grad_handle"], GeminiDDP.grad_handle

    def grad_handle(grad: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return handle(grad.contiguous(), *args, **kwargs)

    GeminiDDP.grad_handle = staticmethod(grad_handle)

    def undo() -> None:
        GeminiDDP.grad_handle = original

    return undo


PATCH = Patch(
    name="strided-gradients",
    target="colossalai.zero.gemini.gemini_ddp:GeminiDDP.grad_handle",
    source="b2925f495bdb945fc7fd2456c18bf14402492782216127461e9a9a5f60d5d100",
    reason="colossalai/zero/gemini/gemini_ddp.py, GeminiDDP.grad_handle: what it gives back is "
    "strided as the gradient and has no storage; where the parameter is not strided so, as after "
    "weight.t() or an einsum, AccumulateGrad (torch 2.13, accumulate_grad.h) copies it, and reads "
    "memory that is gone: the process ends by SIGSEGV",
    device_types=frozenset({"cpu", "cuda"}),
    plugins=frozenset({"gemini"}),
    apply=_apply,
)
