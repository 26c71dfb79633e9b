"""Gradients that scripts of DistributedDataParallel put into ``p.grad`` themselves, or find there.

Ranks have equal shares, so that a step is as that of one process on all samples.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from faces import under
from plain_scripts import Heads, check, plainly
from torch import nn

from unipar.compat.accelerate import Accelerator
from unipar.compat.native.calls import clip_grad_norm_
from unipar.compat.native.wrappers import DistributedDataParallel
from unipar.compat.run import current

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
DATA = torch.randn(6, 2, 4, 4, generator=torch.Generator().manual_seed(0))
"""Of each step and rank four samples."""


class Script:
    """Has the samples of its rank, or those of all without unipar."""

    def __init__(self, *, wraps: bool) -> None:
        self.wraps, layers = wraps, Heads(4)
        self.optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
        find = {"find_unused_parameters": True}
        self.model: Any = DistributedDataParallel(layers, **find) if wraps else layers

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def loss(self, step: int, head: int = 0) -> torch.Tensor:
        shares = DATA[step]
        x = shares[current.placement().rank] if self.wraps else shares.flatten(0, 1)
        return (self.model(x, head) - x.sum(1, keepdim=True)).square().mean()

    def gradients(self, step: int) -> list[torch.Tensor]:
        grads = torch.autograd.grad(self.loss(step), self.parameters[:2])
        for grad in grads if self.wraps else ():
            torch.distributed.all_reduce(grad)
            grad /= 2
        return list(grads)

    def clip(self) -> torch.Tensor:
        clip = clip_grad_norm_ if self.wraps else nn.utils.clip_grad_norm_
        return clip(self.parameters, 0.5)


def by_hand(script: Script) -> list[float]:
    for step in range(3):
        for p, grad in zip(script.parameters, script.gradients(step), strict=False):
            p.grad = grad
        script.optimizer.step()
    return []


def accumulated(script: Script) -> list[float]:
    """Of two passes, clipped."""
    found = []
    for step in (0, 2, 4):
        script.optimizer.zero_grad()
        for pair in (step, step + 1):
            for p, grad in zip(script.parameters, script.gradients(pair), strict=False):
                p.grad = grad if p.grad is None else p.grad + grad
        found.append(float(script.clip()))
        script.optimizer.step()
    return found


def in_turn(script: Script) -> list[float]:
    """By hand, by a loss, and once more by what that has left."""
    for step in range(4):
        script.optimizer.zero_grad()
        if step % 2:
            script.loss(step).backward()
        else:
            for p, grad in zip(script.parameters, script.gradients(step), strict=False):
                p.grad = grad
        script.optimizer.step()
        if step == 3:
            script.optimizer.step()
    return []


def zeros(script: Script) -> list[float]:
    """They are seen, and move what a step leaves out, also where none follows."""
    found = []
    for step in range(5):
        script.loss(step, step % 2).backward()
        script.optimizer.step()
        script.optimizer.zero_grad(set_to_none=False)
        found += [-1 if p.grad is None else p.grad.abs().sum().item() for p in script.parameters]
        if step == 3:
            script.optimizer.step()
    return found


def zeros_after_the_pass(script: Script) -> list[float]:
    found = []
    for step in range(5):
        loss = script.loss(step, step % 2)
        (script.optimizer if step % 2 else script.model).zero_grad(set_to_none=False)
        found += [-1 if p.grad is None else p.grad.abs().sum().item() for p in script.parameters]
        loss.backward()
        found += [0 if p.grad is None else p.grad.sum().item() for p in script.parameters]
        script.optimizer.step()
    return found


def zeros_before_two_passes(script: Script) -> list[float]:
    """The second pass of a step leaves them as they were, too."""
    for step in range(4):
        script.optimizer.zero_grad(set_to_none=False)
        with script.model.no_sync() if script.wraps else nullcontext():
            (script.loss(step, step == 0) / 2).backward()
        (script.loss(step + 1, step == 0) / 2).backward()
        script.optimizer.step()
    return []


def put_before(script: Script, *, at: str) -> list[float]:
    """Something is there when a loss comes: DDP would average it with its gradients."""
    for step in range(2):
        script.optimizer.zero_grad(set_to_none=at != "zeros")
        if at == "first":
            script.parameters[0].grad = torch.ones(1, 4)
        loss = script.loss(step)
        if at == "between":
            script.parameters[0].grad = torch.ones(1, 4)
        if at == "zeros" and script.parameters[0].grad is not None:
            script.parameters[0].grad += 1
        loss.backward()
        script.optimizer.step()
    return []


def run(act: Callable[[Script], list[float]], *, wraps: bool = True) -> list[float]:
    script = Script(wraps=wraps)
    found = act(script)
    return [*found, *(x for p in script.parameters for x in p.detach().flatten().tolist())]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("horovod", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "act",
    [
        by_hand,
        accumulated,
        in_turn,
        zeros,
        zeros_after_the_pass,
        zeros_before_two_passes,
        *(partial(put_before, at=at) for at in ("first", "between", "zeros")),
    ],
)
def test_they_are_as_in_pytorch_where_they_are_whole(
    world_pool: Any, act: Any, strategy: str
) -> None:
    expected = run(act, wraps=False)
    for found in world_pool(2).run(plainly, strategy, partial(run, act)):
        assert found == (pytest.approx(expected, rel=1e-4, abs=1e-6), []), found


def test_a_step_by_hand_is_by_the_state_of_the_others(world_pool: Any) -> None:
    act = partial(run, in_turn, wraps=False)
    check(world_pool(2).run(plainly, "ddp:shard_optimizer=true", act), act)


def of_each_rank(script: Script) -> list[float]:
    for step in range(3):
        grads = torch.autograd.grad(script.loss(step), script.parameters[:2])
        for p, grad in zip(script.parameters, grads, strict=False):
            p.grad = grad
        script.optimizer.step()
    return []


def test_each_rank_steps_by_its_own_as_under_ddp(world_pool: Any) -> None:
    for rank, (found, _) in enumerate(
        world_pool(2).run(plainly, "ddp", partial(run, of_each_rank))
    ):
        script = Script(wraps=False)
        for step in range(3):
            x = DATA[step, rank]
            loss = (script.model(x, 0) - x.sum(1, keepdim=True)).square().mean()
            script.optimizer.zero_grad()
            loss.backward()
            script.optimizer.step()
        expected = [x for p in script.parameters for x in p.detach().flatten().tolist()]
        assert found == pytest.approx(expected, rel=1e-4)


def used_between(script: Script) -> list[float]:
    script.loss(0).backward()
    script.clip()
    script.loss(1).backward()
    return []


def nothing(script: Script) -> list[float]:
    script.loss(0)
    script.optimizer.step()
    return []


@pytest.mark.parametrize(
    ("act", "strategy", "said"),
    [
        (nothing, "ddp", "loss.backward() was not called since the last step."),
        (by_hand, "ddp:shard_optimizer=true", "use ddp, without shard_optimizer."),
        (
            partial(put_before, at="first"),
            "ddp:shard_optimizer=true",
            "or use a strategy that leaves gradients and optimizers whole, such as ddp.",
        ),
        (
            used_between,
            "ddp:shard_optimizer=true",
            "or use a strategy that leaves gradients and optimizers whole, such as ddp.",
        ),
        (by_hand, "zero2", "or without the engine's own backward pass"),
        (by_hand, "fsdp", "torch.autograd.grad was asked for the gradient of parameter"),
    ],
)
def test_a_step_without_any_is_refused(world_pool: Any, act: Any, strategy: str, said: str) -> None:
    for one in world_pool(2).run(plainly, strategy, partial(run, act)):
        assert said in one
        assert one.endswith(said) or strategy in ("zero2", "fsdp")


def behind_accelerate() -> list[float]:
    """Zeros that are left before a loss, and between a pass and the loss of it."""
    accelerator = Accelerator()
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    found = []
    for step, shares in enumerate(DATA):
        if step % 2:
            optimizer.zero_grad(set_to_none=False)
        loss = model(shares[current.placement().rank]).square().mean()
        if not step % 2:
            optimizer.zero_grad(set_to_none=False)
        if step:
            found += [p.grad.abs().sum().item() for p in model.parameters()]
        accelerator.backward(loss)
        optimizer.step()
    return found


def test_zeros_are_seen_behind_other_faces(world_pool: Any) -> None:
    for found in world_pool(2).run(under, "ddp", behind_accelerate):
        assert found == [0.0] * 10
