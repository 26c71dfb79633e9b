"""Methods that a script's own classes have in the place of torch's run under every face."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from faces import under
from plain_scripts import batches, check, plainly
from torch import nn

from unipar.compat.accelerate import Accelerator
from unipar.compat.fabric import Fabric

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Summing(torch.optim.SGD):
    """Steps by what it has summed up since it was cleared last."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.sums = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]
        self.seen = 0

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.seen += 1
        with torch.no_grad():
            for group in self.param_groups:
                for p, one in zip(group["params"], self.sums, strict=True):
                    p.sub_(one.add_(p.grad), alpha=group["lr"] / self.seen)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.seen = 0
        for one in self.sums:
            one.zero_()
        super().zero_grad(set_to_none)


class Forgetting(torch.optim.SGD):
    """Clears as those do that were written before torch's took ``set_to_none``."""

    def zero_grad(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


class Seldom(torch.optim.SGD):
    """Adds up what the step before has left, in every other step."""

    asked = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.asked += 1
        if self.asked % 2:
            super().zero_grad(set_to_none)


class Counting(torch.optim.SGD):
    """Says in its state how often it has stepped."""

    seen = 0

    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.seen += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "seen"})


class Placing(torch.optim.SGD):
    """Puts state in its place as those do that keep it in dtypes of their own."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = [
            {**stored, "params": own["params"]}
            for own, stored in zip(self.param_groups, state_dict["param_groups"], strict=True)
        ]
        held = [p for group in groups for p in group["params"]]
        state = {held[number]: dict(one) for number, one in state_dict["state"].items()}
        self.__setstate__({"state": state, "param_groups": groups})


class Writing(torch.optim.SGD):
    """Names its state otherwise."""

    def state_dict(self) -> dict[str, Any]:
        return {"moments": [one["momentum_buffer"] for one in self.state.values()]}


class Net(nn.Sequential):
    """Has something of its own to clear."""

    cleared = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.cleared += 1
        super().zero_grad(set_to_none)


def net() -> Net:
    torch.manual_seed(1)
    return Net(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def cleared(kind: Any) -> list[float]:
    model = net()
    optimizer, found = kind(model.parameters(), lr=0.1), []
    for x in batches(8, 7, 8, 8):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), getattr(optimizer, "seen", 0)]
    return found


def saved() -> list[float]:
    model = net()
    optimizer, found = Counting(model.parameters(), lr=0.1, momentum=0.9), []
    for x in batches(8, 8):
        model.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    state = optimizer.state_dict()
    found += [state["seen"], model.cleared]
    for group in optimizer.param_groups:
        group["lr"] = 0.2
    optimizer.seen = 0
    optimizer.load_state_dict(state)
    model.zero_grad()
    model(batches(8)[0]).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        return [*found, optimizer.seen, *model(batches(2)[0]).flatten().tolist()]


def restored() -> list[float]:
    """Steps after a state was loaded into an optimizer that has stepped."""
    model = net()
    optimizer, found = Placing(model.parameters(), lr=0.1, momentum=0.9), []

    def step(x: torch.Tensor) -> None:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())

    first, *rest = batches(8, 8, 8, 8)
    step(first)
    stored = copy.deepcopy(optimizer.state_dict())
    for one in stored["state"].values():
        one["momentum_buffer"].mul_(-2)
    stored["param_groups"][0]["lr"] = 0.3
    optimizer.load_state_dict(stored)
    assert optimizer.param_groups[0]["lr"] == 0.3
    for x in rest:
        step(x)
    return found


def written() -> list[float]:
    model = net()
    optimizer = Writing(model.parameters(), lr=0.1, momentum=0.9)
    model(batches(8)[0]).square().mean().backward()
    optimizer.step()
    return [len(optimizer.state_dict()["moments"])]


@pytest.mark.parametrize("kind", [Summing, Forgetting, Seldom])
def test_an_optimizer_clears_as_its_class_does(world_pool: Any, kind: Any) -> None:
    check(world_pool(2).run(plainly, "ddp", cleared, kind), lambda: cleared(kind))
    check(world_pool(1).run(plainly, "single", cleared, kind), lambda: cleared(kind))


def test_so_it_does_where_ranks_divide_gradients(world_pool: Any) -> None:
    check(world_pool(2).run(plainly, "fsdp", cleared, Forgetting), lambda: cleared(Forgetting))
    for said in world_pool(2).run(plainly, "fsdp", cleared, Seldom):
        assert "gradients were not cleared since" in said


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_state_is_saved_as_its_class_does(world_pool: Any, strategy: str) -> None:
    check(world_pool(2).run(plainly, strategy, saved), saved)


def test_state_that_a_class_puts_in_its_place_is_stepped_by(world_pool: Any) -> None:
    check(world_pool(2).run(plainly, "ddp", restored), restored)
    check(world_pool(1).run(plainly, "single", restored), restored)


@pytest.mark.parametrize(
    ("act", "call"), [(restored, "Placing.load_state_dict()"), (written, "Writing.state_dict()")]
)
def test_what_would_be_of_one_ranks_part_is_refused(world_pool: Any, act: Any, call: str) -> None:
    for said in world_pool(2).run(plainly, "fsdp", act):
        assert f"{call} does not call super()" in said
    if act is written:
        check(world_pool(2).run(plainly, "ddp", act), act)


def by_accelerate(kind: Any) -> tuple[Any, Any, Callable[[Any], None]]:
    accelerator, model = Accelerator(), net()
    return *accelerator.prepare(model, kind(model.parameters(), lr=0.1)), accelerator.backward


def by_fabric(kind: Any) -> tuple[Any, Any, Callable[[Any], None]]:
    fabric, model = Fabric(), net()
    return *fabric.setup(model, kind(model.parameters(), lr=0.1)), fabric.backward


def by_a_face(prepare: Any, kind: Any) -> list[float]:
    model, optimizer, backward = prepare(kind)
    found = []
    for x in batches(8, 7, 8, 8):
        loss = model(x).square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), getattr(optimizer.optimizer, "seen", 0)]
    return found


@pytest.mark.parametrize("kind", [Summing, Forgetting])
@pytest.mark.parametrize("prepare", [by_accelerate, by_fabric])
def test_other_faces_clear_so_too(world_pool: Any, prepare: Any, kind: Any) -> None:
    for found in world_pool(2).run(under, "ddp", by_a_face, prepare, kind):
        assert found == pytest.approx(cleared(kind), rel=1e-4)
