"""Models that keep something of a batch elsewhere than in what they give, on two ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from plain_scripts import batches, check, plainly, train
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Meter:
    def __init__(self) -> None:
        self.total, self.number = 0.0, 0

    def __call__(self, x: torch.Tensor) -> None:
        self.total += x.detach().sum().item()
        self.number += len(x)


class Slots:
    __slots__ = ("last",)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)


class Keeping(Base):
    """It keeps something of what it computes, which for one kind is a factor of that."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.factor = 0, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        output = self.linear(x) * self.factor
        self.keep(output.detach())
        return output

    def keep(self, x: torch.Tensor) -> None:
        raise NotImplementedError

    def told(self) -> list[float]:
        return []


class Seen(Keeping):
    """It is trained by how many samples it has seen."""

    def keep(self, x: torch.Tensor) -> None:
        self.factor = min(2.0, self.factor + len(x) / 32)


class Last(Keeping):
    """A number of each batch, which may be the same by chance at first."""

    last = 0.0

    def keep(self, x: torch.Tensor) -> None:
        self.last = (x > 1 / self.calls - 0.4).float().mean().item()

    def told(self) -> list[float]:
        return [self.last]


class Pair(Keeping):
    last = (0.0, 0)

    def keep(self, x: torch.Tensor) -> None:
        self.last = (round(x.mean().item(), 4), len(x))

    def told(self) -> list[float]:
        return [*self.last]


class Nested(Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.log: dict[str, list[float]] = {"mean": []}

    def keep(self, x: torch.Tensor) -> None:
        self.log["mean"].append(x.mean().item())

    def told(self) -> list[float]:
        return [*self.log["mean"], len(self.log["mean"])]


class Meters(Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.meters = [Meter()]

    def keep(self, x: torch.Tensor) -> None:
        self.meters[0](x)

    def told(self) -> list[float]:
        return [self.meters[0].total, self.meters[0].number]


class Metric(Meters):
    def __init__(self) -> None:
        super().__init__()
        self.meter = self.meters.pop()

    def keep(self, x: torch.Tensor) -> None:
        self.meter(x)

    def told(self) -> list[float]:
        return [self.meter.total, self.meter.number]


class Slotted(Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.held = {"slots": Slots()}

    def keep(self, x: torch.Tensor) -> None:
        self.held["slots"].last = x.mean().item()

    def told(self) -> list[float]:
        return [self.held["slots"].last]


class Tensor(Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.counts = torch.zeros(3)

    def keep(self, x: torch.Tensor) -> None:
        self.counts.index_add_(0, x.argmax(1), torch.ones(len(x)))

    def told(self) -> list[float]:
        return self.counts.tolist()


class Array(Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.counts = np.zeros(3)

    def keep(self, x: torch.Tensor) -> None:
        np.add.at(self.counts, x.argmax(1).numpy(), 1)

    def told(self) -> list[float]:
        return self.counts.tolist()


class Unregistered(Keeping):
    """A module that it does not call its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = [nn.BatchNorm1d(3)]

    def keep(self, x: torch.Tensor) -> None:
        self.norms[0](x)

    def told(self) -> list[float]:
        return [one.double().sum().item() for one in self.norms[0].buffers()]


WHOLE: list[tuple[type[Keeping], str]] = [
    (Seen, "factor"),
    (Last, "last"),
    (Pair, "last"),
    (Nested, "log['mean']"),
    (Meters, "meters[0].total, meters[0].number"),
    (Metric, "meter.total, meter.number"),
    (Slotted, "held['slots'].last"),
    (Tensor, "counts"),
    (Array, "counts"),
    (Unregistered, "norms[0]._buffers['num_batches_tracked']"),
]


def whole() -> list[float]:
    found = []
    for kind, _ in WHOLE:
        torch.manual_seed(1)
        model = kind()
        found += train(model, lambda model, x: model(x).square().mean(), batches(8, 8, 8, 6, 8))
        found += [*model.told(), model.calls]
    return found


def test_what_is_kept_of_a_batch_is_of_the_whole_and_named(world_pool: Any) -> None:
    found, expected = world_pool(2).run(plainly, "ddp", whole), whole()
    for one in found:
        assert isinstance(one, tuple), one
        assert one[0] == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert len(found[0][1]) == len(WHOLE), found[0][1]
    for line, (kind, path) in zip(found[0][1], WHOLE, strict=True):
        assert f"computes all of every batch by {kind.__name__}: it keeps what it " in line
        assert f"in attributes ({path})" in line


# -- what a model is given -----------------------------------------------------------------------


class Measured(Base):
    def forward(self, x: torch.Tensor, meter: Meter) -> torch.Tensor:
        output = self.linear(x)
        meter(output)
        return output


def measured() -> list[float]:
    torch.manual_seed(1)
    meter = Meter()
    found = train(Measured(), lambda model, x: model(x, meter).square().mean(), batches(8, 8, 6))
    return [*found, meter.total, meter.number]


@dataclass
class Batch:
    x: torch.Tensor
    hidden: torch.Tensor | None = None


class Written(Base):
    def forward(self, batch: Batch) -> torch.Tensor:
        hidden = batch.hidden = self.linear(batch.x)
        return hidden.tanh()


def written() -> list[float]:
    torch.manual_seed(1)

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        batch = Batch(x)
        output = model(batch)
        hidden = torch.zeros(()) if batch.hidden is None else batch.hidden
        return output.square().mean() + hidden.square().mean()

    return train(Written(), loss_of, batches(8, 8, 6))


@pytest.mark.parametrize("act", [measured, written], ids=lambda one: one.__name__)
def test_what_a_model_writes_into_what_it_is_given_is_of_the_whole(
    world_pool: Any, act: Callable[[], list[float]]
) -> None:
    told = "it fills lists, dicts or other objects that it is given"
    check(world_pool(2).run(plainly, "ddp", act), act, told)


# -- what tells nothing of a batch ---------------------------------------------------------------


class Counting(Keeping):
    """It counts calls, keeps times and a rate, and caches what is the same of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stats: dict[str, Any] = {"calls": Meter(), "times": [], "names": set[str]()}
        self.rate, self.steps = 1.0, np.zeros(1)
        self.table: dict[int, torch.Tensor] = {}

    def keep(self, x: torch.Tensor) -> None:
        self.stats["calls"].number += 1
        self.stats["times"].append((time.perf_counter(), time.time()))
        self.stats["names"].add(f"{x.shape[1]}")
        self.stats["took"] = time.perf_counter() - self.stats["times"][-1][0]
        self.rate *= 0.9
        self.steps += 1
        self.table.setdefault(x.shape[1], torch.ones(x.shape[1]))


def counting() -> list[float]:
    torch.manual_seed(1)
    model = Counting()
    found = train(model, lambda model, x: model(x).square().mean(), batches(8, 8, 6, 8, 8))
    stats = [model.stats["calls"].number, len(model.stats["times"]), len(model.stats["names"])]
    return [*found, *stats, model.calls, model.rate, float(model.steps[0]), len(model.table)]


def test_counts_of_calls_times_and_caches_leave_a_batch_divided(world_pool: Any) -> None:
    check(world_pool(2).run(plainly, "ddp", counting), counting)


class Turning(Counting):
    """It compares samples from the sixth call on, which is computed in parts before it is tried.

    Of its buffers one is changed in place, and another has a new tensor each time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("changed", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        self.changed += 1
        self.replaced = self.replaced + 1
        return output - output.mean(0) if self.calls > 5 else output


def turning() -> list[float]:
    torch.manual_seed(1)
    model = Turning()
    found = train(model, lambda model, x: model(x).square().mean(), batches(8, 8, 6, 8, 8, 8, 8))
    stats = [model.stats["calls"].number, len(model.stats["times"]), float(model.steps[0])]
    return [*found, *stats, *map(float, model.buffers())]


def test_a_pass_in_parts_that_is_computed_once_more_leaves_no_trace(world_pool: Any) -> None:
    told = "it sets the samples of a batch in relation to each other"
    check(world_pool(2).run(plainly, "ddp", turning), turning, told)


# -- what a script does later --------------------------------------------------------------------


class Masked(nn.Module):
    mask: torch.Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x if self.mask is None else x * self.mask


def masked() -> list[float]:
    """A mask with a row for each sample."""
    torch.manual_seed(1)
    model, calls = Masked(), 0

    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > 2:
            model.mask = torch.arange(8.0).view(8, 1) / calls
        return model(x).square().mean()

    return train(model, loss_of, batches(8, 8, 8, 8, 8))


def test_a_mask_of_samples_that_is_set_later_has_the_whole_computed(world_pool: Any) -> None:
    told = "each of 2 ranks computes all of every batch by Masked: it fails where parts are tried"
    check(world_pool(2).run(plainly, "ddp", masked), masked, told)


def hooking(late: bool) -> list[float]:
    torch.manual_seed(1)
    model, seen = nn.Linear(6, 3), list[float]()

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        seen.append(output.detach().mean().item())

    handle = None if late else register_module_forward_hook(hook)
    found = train(model, lambda model, x: model(x).square().mean(), batches(8))
    handle = register_module_forward_hook(hook) if handle is None else handle
    try:
        found += train(model, lambda model, x: model(x).square().mean(), batches(8, 6))
    finally:
        handle.remove()
    return [*found, *seen, len(seen)]


def hooked() -> list[float]:
    return hooking(late=False)


def hooked_later() -> list[float]:
    return hooking(late=True)


@pytest.mark.parametrize("act", [hooked, hooked_later], ids=lambda one: one.__name__)
def test_hooks_of_all_modules_see_whole_batches(
    world_pool: Any, act: Callable[[], list[float]]
) -> None:
    check(world_pool(2).run(plainly, "ddp", act), act, "hooks in it are to see whole batches")
