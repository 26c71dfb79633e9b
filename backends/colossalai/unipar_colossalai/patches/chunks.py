"""Gemini's chunks ask for an accelerator's memory beside the host's, and on a CPU there is none."""

from __future__ import annotations

from typing import Any

from unipar_colossalai.patches.patch import Patch, Undo


def _apply() -> Undo:
    from colossalai.zero.gemini.chunk.chunk import (  # pyright: ignore[reportMissingImports]
        Chunk,
    )

    replaced = {name: vars(Chunk)[name] for name in ("close_chunk", "shard_move", "device_type")}

    def close_chunk(self: Any) -> None:
        replaced["close_chunk"](self)
        if self.cuda_shard is None and not self.keep_gathered:
            self.cuda_shard, self.cpu_shard = self.cpu_shard, None

    def shard_move(
        self: Any, device: Any, force_copy: bool = False, non_blocking: bool = False
    ) -> None:
        """There is one memory, and the shard is in it."""

    Chunk.close_chunk = close_chunk
    Chunk.shard_move = shard_move
    # What it compares with to know whether a shard can be gathered where it is.
    Chunk.device_type = property(lambda self: "cuda")

    def undo() -> None:
        for name, original in replaced.items():
            setattr(Chunk, name, original)

    return undo


PATCH = Patch(
    name="chunks-on-cpu",
    target="colossalai.zero.gemini.chunk.chunk:Chunk",
    source="7afc94a92d1b0b23477562cd38be08466949254c4fc94053f526e969a1e166bc",
    reason="colossalai/zero/gemini/chunk/chunk.py, Chunk: what is on a CPU counts as offloaded, "
    "and is moved to itself and lost before it is gathered",
    device_types=frozenset({"cpu"}),
    plugins=frozenset({"gemini"}),
    apply=_apply,
)
