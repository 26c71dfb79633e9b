"""Whether ranks have the same of what each has whole: a look at a module in some of its steps.

What a model keeps of its batches, as BatchNorm, a codebook that moves, or a queue do, is that of a
rank's part of them. What is written into weights by hand, each rank by itself, makes other models
of replicas; where each rank steps a part of them, a step leaves one that is put together of such
parts. No loss shows it.
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Iterable

import torch
from torch import nn

from unipar.engine.doubling import Doubling
from unipar.errors import ConfigError, first_few
from unipar.utils.host_copy import HostCopy
from unipar.world import World

log = logging.getLogger("unipar")

_Marks = dict[str, float]
_ROUNDING = 1e-5
"""Relative difference up to which unlike devices may have come to unlike weights."""


class Replicas:
    """Looks at a module in the first, second, fourth, eighth, … step.

    What ranks have goes into the number that they compare with each loss, so nobody waits for
    another one where it is the same.

    Args:
        module: the user's, whose buffers each rank has whole.
        world: the joined processes, each of which has other samples.
        weights: whether each rank has its parameters whole, too.
        in_parts: whether each rank steps a part of them, which others are given. They are then
            alike after each step, so that steps are also looked at before which they were written.
    """

    def __init__(
        self, module: nn.Module, world: World, *, weights: bool, in_parts: bool = False
    ) -> None:
        self._module, self._world, self._weights = module, world, weights
        self._in_parts = weights and in_parts
        # To go through all modules takes longer than what is done with them.
        self._parameters = list(module.parameters()) if self._in_parts else []
        self._looks = Doubling()
        self._told = self._of_script = self._wrote = False
        self._kinds: dict[str, _Marks] = {}
        self._counts: list[int] | None = None
        self._late: _Copied | None = None

    @classmethod
    def of(
        cls, module: nn.Module, world: World, *, weights: bool, in_parts: bool
    ) -> Replicas | None:
        """Those of a module; ``None`` where ranks hold other parts of it, or are given the same."""
        if world.data_size != world.size or world.size == 1 or world.layout.ep > 1:
            return None
        return cls(module, world, weights=weights, in_parts=in_parts)

    def of_script(self) -> Replicas | None:
        """What is looked at where a script itself says what ranks do with parts of its data.

        They may differ, but where the strategy does not let each rank keep its own.
        """
        self._told = self._of_script = True
        return self if self._in_parts else None

    def note_step(self) -> None:
        """The optimizer has changed the weights, on all ranks alike."""
        if self._in_parts:
            self._counts = self._count()

    def _count(self) -> list[int]:
        # Of a class of tensors with functions of its own, each would be asked. What is frozen, as
        # a momentum encoder, is no part of a step.
        with torch._C.DisableTorchFunctionSubclass():
            return [one._version for one in self._parameters if one.requires_grad]

    def take(self, steps: int) -> int:
        """Look, if this step is to be looked at; a number that is the same on ranks that are alike.

        Args:
            steps: how many were taken before this one, of which the forward passes are done.
        """
        self._kinds = {}
        if self._late is not None:
            # The device has come past that step by now.
            self._kinds["weights before"], self._late = self._late.read(), None
        self._wrote = False
        if self._looks.is_due(steps):
            if self._weights:
                self._kinds["weights"] = _marks_of(self._weights_of(), self._world)
            if not self._told:
                self._kinds["buffers"] = _marks_of(self._module.named_buffers(), self._world)
        elif self._in_parts and self._counts not in (None, self._count()):
            self._wrote, self._late = True, _Copied(self._weights_of(), self._world)
        if not self._kinds:
            return int(self._wrote)
        values = [one for marks in self._kinds.values() for one in marks.values()]
        return zlib.crc32(struct.pack(f"<{len(values)}d", *values), int(self._wrote))

    def _weights_of(self) -> Iterable[tuple[str, nn.Parameter]]:
        named = self._module.named_parameters()
        # Each rank keeps what is frozen.
        return [one for one in named if one[1].requires_grad] if self._of_script else named

    def explain(self) -> bool:
        """Say what ranks do not have in common; whether there was anything to look at. Collective.

        Raises:
            ConfigError: they have other weights.
        """
        told, self._kinds = self._world.gather((self._kinds, self._wrote)), {}
        found, wrote = zip(*told, strict=True)
        if not any(found) and not any(wrote):
            return False
        changed = _unlike([one.get("weights", {}) for one in found])
        changed = changed or _unlike([one.get("weights before", {}) for one in found])
        if not changed and not all(wrote):
            # What the others have not looked at, the next step would not find.
            self._late = None
            changed = unlike(self._weights_of(), self._world) if any(wrote) else []
        if changed:
            instead = ""
            if self._of_script:
                instead = (
                    " Or use a strategy that leaves the optimizer whole, such as ddp without "
                    "shard_optimizer, under which each rank keeps what it has changed."
                )
            raise ConfigError(
                f"the ranks have unlike weights {first_few(changed)}: something other than the "
                "optimizer has changed them on each rank by itself, by random numbers or by what "
                "it has of a batch, as nn.Embedding(max_norm=…) does. Change them in place under "
                "torch.no_grad(), not through weight.data, by values that all ranks have "
                "(world.broadcast(…), torch.distributed.all_reduce(…)); in a script that knows "
                f"nothing of ranks those of rank 0 are taken then.{instead}"
            )
        buffers = _unlike([one.get("buffers", {}) for one in found])
        self._told |= bool(buffers)
        if buffers and self._world.is_main:
            log.warning(
                "the model keeps what it computes of samples in buffers (%s), and each of %d ranks "
                "has a part of a batch, so losses depend on how many ranks there are. BatchNorm is "
                "that of all ranks with sync_batchnorm, where a strategy has it; others can sum "
                "what they need by torch.distributed.all_reduce.",
                first_few(buffers),
                self._world.data_size,
            )
        return True


def unlike(named: Iterable[tuple[str, torch.Tensor]], world: World) -> list[str]:
    """The names of tensors that are others on another rank. Collective; waits for the device.

    Args:
        named: those of a module. What is not held whole, by values, is left out.
        world: the joined processes.
    """
    return _unlike(world.gather(_marks_of(named, world)))


def _marks_of(named: Iterable[tuple[str, torch.Tensor]], world: World) -> _Marks:
    return _Copied(named, world).read()


class _Copied:
    """Marks of tensors as they are now, which are read when the device has them."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]], world: World) -> None:
        held = {name: one.detach() for name, one in named if _is_plain(one)}
        marks = [_mark(one).to(world.device) for one in held.values()]
        self._names = [*held]
        self._marks = HostCopy(torch.stack(marks)) if marks else None

    def read(self) -> _Marks:
        marks = [] if self._marks is None else self._marks.read()
        return dict(zip(self._names, marks, strict=True))


def _unlike(found: list[_Marks]) -> list[str]:
    first, *others = found
    return [
        name
        for name, value in first.items()
        if any(_apart(value, other[name]) for other in others if name in other)
    ]


def _is_plain(tensor: torch.Tensor) -> bool:
    # Not of a class that holds it otherwise, as in parts.
    plain = type(tensor) in (torch.Tensor, nn.Parameter)
    return plain and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


def _mark(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point() and not tensor.is_complex():
        return tensor.sum(dtype=torch.float64)
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return torch.linalg.vector_norm(tensor, dtype=wide)


def _apart(one: float, other: float) -> bool:
    if one == other or (one != one and other != other):
        return False
    return not abs(one - other) <= _ROUNDING * max(abs(one), abs(other))
