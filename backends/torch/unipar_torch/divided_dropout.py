"""Dropout where each rank has a part of what an undivided run drops elements of.

Ranks along ``cp`` share one stream of random numbers, so that what a model draws for a whole sample
(layers to pass by, noise levels) is the same on all of them. Elements of their parts are to be
dropped independently of each other, so dropout draws from another stream: seeded from the shared
one and the rank, for each call. So it has no state of its own: checkpoints and recomputed
activations restore it with the shared stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from unipar.data.order import mixed_seed

_BY_ELEMENT = ("dropout", "alpha_dropout")
"""Functions of ``torch.nn.functional`` that drop each element by itself, and not whole channels."""


@contextlib.contextmanager
def dropping_apart(device: torch.device, part: int) -> Iterator[None]:
    """Have dropout of a module's activations draw for this rank's part alone.

    Args:
        device: whose generator dropout draws from.
        part: which part this rank has.
    """
    originals = {name: getattr(functional, name) for name in _BY_ELEMENT}
    for name, original in originals.items():
        setattr(functional, name, _apart(original, device, part))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(functional, name, original)


def _apart(original: Callable[..., Any], device: torch.device, part: int) -> Callable[..., Any]:
    def dropout(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not (training and p):
            return original(input, p, training, inplace)
        with own_stream(device, part):
            return original(input, p, training, inplace)

    # As functional.dropout has it; alpha_dropout does not train unless it is asked to.
    dropout.__defaults__ = original.__defaults__
    return dropout


@contextlib.contextmanager
def own_stream(device: torch.device, part: int) -> Iterator[None]:
    """Draw other random numbers than the ranks that have other parts."""
    # By the host's generator, which all of them have alike, also where the device is another.
    shared = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    if device.type == "cuda":
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
    else:
        generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(mixed_seed(shared, part))
    try:
        yield
    finally:
        generator.set_state(before)
