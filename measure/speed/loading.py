"""What a batch costs to load beside ``DataLoader``: tiny samples, one process, no workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from time import perf_counter

import torch
from torch.utils.data import DataLoader, TensorDataset

import unipar
from measure.report import Row, microseconds
from measure.speed.timing import BASELINE, in_turns

BATCH, BATCHES = 32, 100


def measure(*, quick: bool) -> list[Row]:
    """An epoch of each a turn, in a new order each."""
    turns = 2 if quick else 40
    torch.set_num_threads(1)
    samples = BATCH * BATCHES
    data = TensorDataset(torch.randn(samples, 32), torch.randint(0, 10, (samples,)))
    with unipar.Session(strategy="single", device="cpu") as session:
        ours = session.loader(data, global_batch_size=BATCH)
        plain = DataLoader(data, batch_size=BATCH, shuffle=True)
        measured = in_turns({"ours": lambda: _epoch(ours), BASELINE: lambda: _epoch(plain)}, turns)
    return [
        Row.timed(
            f"a batch of {BATCH} tiny samples: `session.loader` beside `DataLoader`",
            measured["ours"],
            measured[BASELINE],
            microseconds,
        )
    ]


def _epoch(loader: Iterable[object]) -> float:
    """Seconds for each batch of an epoch."""
    began = perf_counter()
    deque(loader, maxlen=0)
    return (perf_counter() - began) / BATCHES
