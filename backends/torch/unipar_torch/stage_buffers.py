"""Buffers outside of blocks: every stage has them, and those of one are written into checkpoints.

Each stage runs what comes before its blocks, so it changes what changes there (counters, statistics
of inputs), just as the stage does that owns it. What changes after the blocks changes on the last
stage alone, and stages of one rank share what they both have. Both would be wrong in a checkpoint,
so changes are counted in the first batch of training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from unipar.errors import ConfigError
from unipar.world import World
from unipar_torch.stage_modules import Stage


class BufferChanges:
    """Counts how often each stage changes buffers outside of blocks."""

    def __init__(self) -> None:
        self._counts: dict[int, Counter[str]] = {}
        self._stored: set[str] = set()

    @contextmanager
    def counting(self, stage: Stage) -> Iterator[None]:
        """Around the forward pass of a stage for one micro-batch, and the loss."""
        before = {name: (buffer, buffer._version) for name, buffer in _buffers(stage)}
        # A state dict may leave out a wrapper's name (torch's checkpoint_wrapper), and a hook may
        # have put another tensor into it.
        kept = stage.module.state_dict(keep_vars=True)
        ids = {id(value) for value in kept.values()}
        stored = {n for n, (buffer, _) in before.items() if n in kept or id(buffer) in ids}
        self._stored |= stored
        runs = stage.runs
        yield
        runs = stage.runs - runs
        counts = self._counts.setdefault(stage.index, Counter())
        for name, buffer in _buffers(stage):
            if name not in before:
                continue
            was, version = before[name]
            if buffer is was:
                # A pass that is checked is several.
                counts[name] += -(-(buffer._version - version) // runs)
            elif name in stored:
                counts[name] += 1

    def check(self, stage: Stage, ranks: Sequence[int], schedule: str, world: World) -> None:
        """Compare the counts of all stages. Collective.

        Args:
            stage: any one.
            ranks: of all stages.
            schedule: by name.
            world: the joined processes.

        Raises:
            ConfigError: on every rank, if a buffer changes where that is lost, or counts twice.
        """
        counts = {s: found for one in world.gather(self._counts) for s, found in one.items()}
        for name in sorted({name for found in counts.values() for name in found}):
            changing = [s for s in sorted(counts) if counts[s][name]]
            on = Counter(ranks[s] for s in changing)
            if any(number > 1 for number in on.values()):
                raise ConfigError(
                    f"mesh: buffer '{name}' changes in the forward passes of stages "
                    f"{', '.join(map(str, changing))}, and schedule='{schedule}' puts several of "
                    "these on one rank, which has it once: it would change several times. Set "
                    "schedule='1f1b', or use dp_shard, which divides any model."
                )
            owners = stage.plan.owners[name]
            most = max(counts, key=lambda s: counts[s][name])
            for owner in owners if name in self._stored else ():
                if counts[owner][name] < counts[most][name]:
                    raise ConfigError(
                        f"mesh: buffer '{name}' changes on stage {most} "
                        f"({counts[most][name]} times in a batch) and not as often on stage "
                        f"{owner} ({counts[owner][name]} times), which writes it into checkpoints. "
                        f"Name it, or its module, on stage {most} alone by stages=[[…], […]], or "
                        "use dp_shard, which divides any model."
                    )


def _buffers(stage: Stage) -> list[tuple[str, torch.Tensor]]:
    within = tuple(f"{block}." for block in stage.plan.chain)
    named = stage.module.named_buffers(remove_duplicate=False)
    return [(name, buffer) for name, buffer in named if not name.startswith(within)]
