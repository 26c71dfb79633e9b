"""An optimizer is tried on parts of tensors, and what it would do wrong with them is told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from unipar.combined import CombinedOptimizer
from unipar.engine import ByTensor, Division, Flat, Sliced, check_divisible, divisible
from unipar.errors import ConfigError
from unipar.testing.optimizers import adafactor, layerwise
from unipar.world import Placement, World

ALONE = World(Placement())


class Own(optim.Optimizer):
    """One of a user's: Adam without its refinements, changed by ``change(update, p, group)``."""

    def __init__(self, params: Any, change: Callable[..., torch.Tensor], lr: float = 1e-3) -> None:
        self.change, self.lock, self.num_steps = change, threading.Lock(), 0
        super().__init__(params, {"lr": lr, "scale": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.num_steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["first"], state["second"] = torch.zeros_like(p), torch.zeros_like(p)
                state["first"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["second"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                update = state["first"] / (state["second"].sqrt() + 1e-8)
                p.sub_(self.change(update, p, group) * group["lr"])


def plainly(update: torch.Tensor, p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    return update


def clipped(update: torch.Tensor, p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    assert p.grad is not None
    return update / (p.grad.norm() / 1e-3).clamp(min=1.0)


def unlike_vectors(update: torch.Tensor, p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    return update + p if p.ndim > 1 else update


def by_rows(update: torch.Tensor, p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    return update / update.norm(dim=-1, keepdim=True) if p.ndim > 1 else update


def over_all(update: torch.Tensor, p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """A number that all tensors of a group have in common, as Prodigy estimates one."""
    length = sum(float(one.grad.abs().sum()) for one in group["params"])
    group["scale"] = max(group["scale"], length)
    return update * group["scale"]


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 300), nn.LayerNorm(300), nn.Linear(300, 1), nn.Conv1d(3, 4, 2)
    )


def own(change: Callable[..., torch.Tensor]) -> Callable[[Any], optim.Optimizer]:
    return lambda named: Own([p for _, p in named], change)


def muon(named: Any) -> optim.Optimizer:
    return optim.Muon([p for _, p in named if p.ndim == 2], lr=1e-2)


def adamw(named: Any) -> optim.Optimizer:
    return optim.AdamW([p for _, p in named], lr=0.0)


NEEDS_MUON = pytest.mark.skipif(not hasattr(optim, "Muon"), reason="torch 2.9 brings Muon")
FLAT, ROWS, COLUMNS, TENSORS = Flat(), Sliced(0), Sliced(-1), ByTensor()
REBUILT = ByTensor(rebuilt=True)


@pytest.mark.parametrize(
    ("build", "refused"),
    [
        (adamw, []),
        (own(plainly), [REBUILT]),
        (own(clipped), [FLAT, ROWS, COLUMNS, REBUILT]),
        (own(unlike_vectors), [FLAT, REBUILT]),
        (own(by_rows), [FLAT, COLUMNS, REBUILT]),
        (own(over_all), [FLAT, ROWS, COLUMNS, TENSORS, REBUILT]),
        (layerwise, [FLAT, ROWS, COLUMNS]),
        (adafactor, [FLAT, ROWS, COLUMNS]),
        pytest.param(muon, [FLAT, ROWS, COLUMNS], marks=[pytest.mark.extra, NEEDS_MUON]),
        (lambda named: optim.Rprop([p for _, p in named]), []),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_would_go_wrong_is_refused_and_nothing_else(
    build: Callable[[Any], optim.Optimizer], refused: list[Division]
) -> None:
    for division in (FLAT, ROWS, COLUMNS, TENSORS, REBUILT):
        optimizer = build(model().named_parameters())
        assert bool(refusal(optimizer, division)) is (division in refused), division


def beside_adamw(kind: Callable[..., optim.Optimizer]) -> optim.Optimizer:
    named = list(model().named_parameters())
    matrices = [p for _, p in named if p.ndim == 2]
    others = optim.AdamW([p for _, p in named if p.ndim != 2], lr=0.1)
    return CombinedOptimizer({"rest": others, "matrices": kind(matrices, lr=0.1)})


@pytest.mark.extra
@NEEDS_MUON
def test_of_several_each_is_tried_on_what_it_gets() -> None:
    for division in (FLAT, ROWS, COLUMNS):
        said = refusal(beside_adamw(optim.Muon), division)
        assert said.startswith("mine: the optimizer Muon of group 'matrices' cannot be used")
    for division in (TENSORS, REBUILT):
        assert not refusal(beside_adamw(optim.Muon), division)
    for division in (FLAT, ROWS, COLUMNS, TENSORS, REBUILT):
        assert not refusal(beside_adamw(optim.SGD), division)


def test_what_a_constructor_makes_is_missed_among_several(monkeypatch: pytest.MonkeyPatch) -> None:
    # DeepSpeed makes Adagrad's sums once more for its flat parts, and sees no Adagrad in several.
    class Begun(optim.SGD):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr)
            for p in self.param_groups[0]["params"]:
                self.state[p]["sum"] = torch.ones_like(p)

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # pyright: ignore
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad / self.state[p]["sum"])

    monkeypatch.setattr(divisible, "ELEMENTWISE", divisible.ELEMENTWISE | {Begun})
    said = refusal(beside_adamw(Begun), FLAT)
    assert "it raised KeyError ('sum')" in said
    assert "Begun" not in said.partition("element alone, like")[2]
    assert not refusal(beside_adamw(Begun), Flat(comes_first=True))


def test_a_scheduler_does_not_hide_what_is_tried() -> None:
    optimizer = layerwise(model().named_parameters())
    optim.lr_scheduler.StepLR(optimizer, 2)
    assert "% off" in refusal(optimizer, FLAT)


def test_adamw_itself_is_elementwise() -> None:
    # What is in the list is not tried in a run; here it is.
    for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta", "ASGD"):
        tried = type(name, (getattr(optim, name),), {})
        assert not refusal(tried(model().parameters(), lr=0.1), FLAT), name


def test_the_refusal_says_what_was_seen_and_what_keeps_tensors_whole() -> None:
    said = refusal(layerwise(model().named_parameters()), FLAT)
    assert said.startswith("mine: the optimizer Layerwise cannot be used where ranks divide")
    assert "the update of tensor 0 was" in said
    assert "% off from that of the whole" in said
    assert "Use a strategy that keeps tensors whole (" in said
    for name in ("ddp", "single"):
        assert name in said.partition("whole (")[2].partition(")")[0].split(", ")
    assert "fsdp" not in said
    assert "AdamW" in said


def test_the_optimizer_and_the_random_numbers_are_left_as_they_are() -> None:
    net = model()
    optimizer = Own(net.parameters(), plainly)
    before = [p.detach().clone() for p in net.parameters()]
    random = torch.random.get_rng_state()
    assert not refusal(optimizer, FLAT)
    assert optimizer.num_steps == 0
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert torch.equal(torch.random.get_rng_state(), random)
    for parameter, old in zip(net.parameters(), before, strict=True):
        assert parameter.grad is None
        assert torch.equal(parameter, old)


def test_what_cannot_be_tried_is_refused() -> None:
    said = refusal(optim.LBFGS(model().parameters()), FLAT)
    assert "it could not be tried at all, since it raised TypeError" in said


def test_what_a_constructor_makes_is_there_only_where_its_tensors_stay() -> None:
    class Ready(optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})
            for p in self.param_groups[0]["params"]:
                self.state[p]["sum"] = torch.full_like(p, 0.5)

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # pyright: ignore
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad / self.state[p]["sum"].add_(p.grad.abs()) * group["lr"])

    assert not refusal(Ready(model().parameters()), Flat(comes_first=True))
    # ZeRO puts other tensors in the places of those that there is state for.
    assert "it raised KeyError ('sum')" in refusal(Ready(model().parameters()), FLAT)


def test_a_hook_is_a_part_of_the_step() -> None:
    def centralize(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad.sub_(p.grad.mean())

    optimizer = optim.SGD(model().parameters(), lr=0.1)
    assert not refusal(optimizer, FLAT)
    optimizer.register_step_pre_hook(centralize)
    assert refusal(optimizer, FLAT)


def test_what_a_class_lets_go_of_is_not_let_go_of_by_a_copy() -> None:
    freed: list[str] = []

    class Owning(optim.SGD):
        def __del__(self) -> None:
            freed.append("handle")

    optimizer = Owning(model().parameters(), lr=0.1)
    assert not refusal(optimizer, FLAT)
    assert not freed
    del optimizer
    assert freed == ["handle"]


def refusal(optimizer: optim.Optimizer, division: Division) -> str:
    try:
        check_divisible(optimizer, "mine", ALONE, division)
    except ConfigError as error:
        return str(error)
    return ""
