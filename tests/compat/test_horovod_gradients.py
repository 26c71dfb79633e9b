"""Gradients that Horovod leaves to each rank, and when it averages them.

Every script is run without unipar, too, by the rule of Horovod 0.28.1 written out with PyTorch's
own calls: ``synchronize()`` averages what is in ``p.grad``, with zeros where there is nothing, and
so does each step that is not within ``skip_synchronize()``; until then it is each rank's own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faces import under
from plain_scripts import Heads, plainly
from torch import nn

from unipar.compat.horovod import torch as hvd
from unipar.compat.native.calls import clip_grad_norm_
from unipar.compat.native.scaling import GradScaler
from unipar.compat.run import current

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
DATA = torch.randn(8, 2, 4, 4, generator=torch.Generator().manual_seed(0))
"""Of each pass and rank four samples."""


class ByHand:
    """What Horovod makes of an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, sums: bool) -> None:
        self.optimizer, self.sums = optimizer, sums
        self.updated = [p for group in optimizer.param_groups for p in group["params"]]

    def synchronize(self) -> None:
        for p in self.updated:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            if not self.sums:
                p.grad /= dist.get_world_size()

    def step(self) -> None:
        self.synchronize()
        self.optimizer.step()


class Script:
    """Trains by Horovod's face, or by :class:`ByHand`."""

    def __init__(
        self, face: str, model: nn.Module, part: nn.Module, passes: int, *, sums: bool = False
    ) -> None:
        self.face, self.model, self.rank = face, model, current.placement().rank
        self.found: list[float] = []
        optimizer: Any = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        self.optimizer = optimizer
        if face == "native":
            current.world()
            self.averaging: Any = ByHand(optimizer, sums=sums)
            return
        hvd.init()
        self.averaging = hvd.DistributedOptimizer(
            optimizer,
            part.named_parameters(),
            backward_passes_per_step=passes,
            op=hvd.Sum if sums else hvd.Average,
        )

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def loss(self, number: int, head: int = 0) -> torch.Tensor:
        x = DATA[number, self.rank]
        return (self.model(x, head) - x.sum(1, keepdim=True)).square().mean()

    def note(self) -> None:
        """Note what is in ``p.grad``, and where nothing is."""
        self.found += [-1.0 if p.grad is None else p.grad.norm().item() for p in self.parameters]

    def scale(self) -> None:
        """Change gradients otherwise on each rank."""
        for p in self.parameters:
            if p.grad is not None:
                p.grad *= 1 + self.rank

    def clip(self) -> None:
        clip = nn.utils.clip_grad_norm_ if self.face == "native" else clip_grad_norm_
        self.found.append(float(clip(self.parameters, 0.2)))

    def step(self) -> None:
        with warnings.catch_warnings():
            # Horovod warns of a step that synchronizes again.
            warnings.simplefilter("ignore")
            self.averaging.step()

    def step_alone(self) -> None:
        if self.face == "native":
            self.optimizer.step()
            return
        with self.averaging.skip_synchronize():
            self.averaging.step()


def synchronized_again(script: Script) -> None:
    for number in range(3):
        script.optimizer.zero_grad()
        script.loss(number).backward()
        script.averaging.synchronize()
        script.scale()
        script.step()
        script.note()


def synchronized_once(script: Script) -> None:
    """The ranks drift apart."""
    for number in range(3):
        script.optimizer.zero_grad()
        script.loss(number).backward()
        script.averaging.synchronize()
        script.scale()
        script.step_alone()
        script.found += [p.sum().item() for p in script.parameters]


def added_after(script: Script) -> None:
    """A pass adds to what is averaged, and changed on each rank since."""
    for number in range(0, 6, 2):
        script.optimizer.zero_grad()
        script.loss(number).backward()
        script.averaging.synchronize()
        script.scale()
        script.loss(number + 1, head=1).backward()
        script.averaging.synchronize()
        script.note()
        script.step_alone()


def local(script: Script) -> None:
    """Local SGD: weights are averaged at times."""
    for number in range(6):
        script.model.zero_grad()
        script.loss(number, head=number % 2).backward()
        script.step_alone()
        script.found += [p.sum().item() for p in script.parameters]
        if number % 3 == 2:
            with torch.no_grad():
                for p in script.parameters:
                    dist.all_reduce(p)
                    p /= 2


def perturbed(script: Script) -> None:
    """Sharpness-aware: each rank perturbs the weights by its own gradient."""
    for number in range(0, 4, 2):
        script.model.zero_grad()
        script.loss(number).backward()
        script.note()
        moved = [(p, 0.5 * p.grad.clone()) for p in script.parameters if p.grad is not None]
        with torch.no_grad():
            for p, by in moved:
                p.add_(by)
        script.model.zero_grad()
        script.loss(number + 1).backward()
        script.averaging.synchronize()
        script.note()
        with torch.no_grad():
            for p, by in moved:
                p.sub_(by)
        script.step_alone()


def changed(script: Script) -> None:
    """Gradients of the first of two passes are read, clipped and changed on each rank."""
    for number in range(0, 6, 2):
        script.optimizer.zero_grad()
        script.loss(number).backward()
        script.note()
        script.clip()
        script.scale()
        if number == 2:
            script.parameters[0].grad = None
        script.loss(number + 1).backward()
        script.step()
        script.note()


def fewer(script: Script) -> None:
    """A step comes before its last pass; one comes without any gradient on a rank."""
    for number in range(4):
        if number != 2 or script.rank == 0:
            script.loss(number).backward()
        script.step()
        script.optimizer.zero_grad()


def left_out(script: Script) -> None:
    """What is set to None after it was averaged is out of the step; what nobody used is zero."""
    for number in range(4):
        script.optimizer.zero_grad()
        script.loss(number, head=0 if number % 2 else script.rank).backward()
        script.averaging.synchronize()
        script.note()
        if number % 2:
            script.parameters[0].grad = None
        script.step_alone()
        script.note()


def left_out_again(script: Script) -> None:
    """Averaged again, it is zero."""
    for number in range(3):
        script.optimizer.zero_grad()
        script.loss(number).backward()
        script.averaging.synchronize()
        script.parameters[number % 2].grad = None
        script.step()
        script.note()


def own(script: Script) -> None:
    """Each rank's own are put there: averaged by the step, or by hand before it, or not cleared."""
    for number in range(4):
        grads = torch.autograd.grad(script.loss(number), script.parameters[:2])
        for p, grad in zip(script.parameters, grads, strict=False):
            p.grad = grad
        if number == 1:
            script.clip()
        if number == 2:
            for p in script.parameters[:2]:
                dist.all_reduce(p.grad)
        (script.step_alone if number == 2 else script.step)()
        script.note()
        if number == 3:
            script.loss(number + 1).backward()
            script.step()


def beside_another(script: Script) -> None:
    """A penalty of the weights, while another model was called, and stepped by hand."""
    net = nn.Linear(4, 1)
    other = Script(script.face, net, net, 1)
    for number in range(2):
        for p, grad in zip(
            other.parameters,
            torch.autograd.grad(net(DATA[number, script.rank]).sum(), other.parameters),
            strict=True,
        ):
            p.grad = grad
        other.step()
        script.optimizer.zero_grad()
        script.parameters[0].square().sum().backward()
        script.loss(number).backward()
        script.step()


def put_before(script: Script) -> None:
    """A loss, or a penalty of weights, adds to what is there."""
    for number in range(3):
        script.optimizer.zero_grad()
        script.parameters[0].grad = torch.ones(1, 4) * script.rank
        if number:
            (script.parameters[1].square().sum() * (1 + script.rank)).backward()
        script.loss(number).backward()
        if number == 2:
            (script.parameters[1].square().sum() * (1 + script.rank)).backward()
        script.step()
        script.note()


def partly(script: Script) -> None:
    """The optimizer has one head, and the whole model is clipped: no hook is on the rest."""
    for number in range(3):
        script.optimizer.zero_grad()
        (script.loss(number) + script.loss(number, head=1)).backward()
        script.averaging.synchronize()
        script.note()
        script.clip()
        script.step_alone()


PASSES: dict[Any, int] = {local: 100, perturbed: 2, changed: 2, fewer: 3, put_before: 3,
                           beside_another: 2}  # fmt: skip


def run(act: Callable[[Script], None], face: str, *, sums: bool = False) -> list[float]:
    model = Heads(4)
    part = model.heads[0] if act is partly else model
    script = Script(face, model, part, PASSES.get(act, 1), sums=sums)
    act(script)
    return [*script.found, *(x for p in script.parameters for x in p.detach().flatten().tolist())]


ACTS = [
    synchronized_again, synchronized_once, added_after, local, perturbed, changed, fewer, left_out,
    left_out_again, own, put_before, beside_another, partly,
]  # fmt: skip


def check(world_pool: Any, strategy: str, act: Any, **how: Any) -> None:
    expected = world_pool(2).run(under, "ddp", partial(run, act, "native", **how))
    found = world_pool(2).run(plainly, strategy, partial(run, act, "horovod", **how))
    for one, by_hand in zip(found, expected, strict=True):
        assert one == (pytest.approx(by_hand, rel=1e-5, abs=1e-6), []), one


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("horovod", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("act", ACTS)
def test_each_rank_has_what_horovod_leaves_it(world_pool: Any, act: Any, strategy: str) -> None:
    check(world_pool, strategy, act)


@pytest.mark.parametrize("act", [synchronized_again, changed, own])
def test_a_sum_is_one_of_what_is_there(world_pool: Any, act: Any) -> None:
    check(world_pool, "ddp", act, sums=True)


@pytest.mark.parametrize("act", [synchronized_again, changed, fewer, left_out_again, put_before])
def test_where_the_state_of_optimizers_is_divided_steps_are_by_averages(
    world_pool: Any, act: Any
) -> None:
    check(world_pool, "ddp:shard_optimizer=true", act)


def told(act: Callable[[Script], None], passes: int, *, sums: bool = False) -> list[float]:
    model = Heads(4)
    act(Script("horovod", model, model.heads[0] if act is partly else model, passes, sums=sums))
    return []


def one_pass(script: Script) -> None:
    script.loss(0).backward()
    script.step_alone()


def by_hand_alone(script: Script) -> None:
    script.loss(0)
    script.parameters[0].grad = torch.ones(1, 4)
    script.step_alone()


def synchronized(script: Script) -> None:
    script.loss(0).backward()
    script.averaging.synchronize()
    script.step()


@pytest.mark.parametrize(
    ("act", "passes", "strategy", "said"),
    [
        (one_pass, 2, "fsdp", "strategy 'fsdp' steps by the mean over ranks. Call optimizer.sync"),
        (one_pass, 1, "fsdp", ""),
        (synchronized, 2, "fsdp", ""),
        (partly, 1, "ddp:shard_optimizer=true", "Horovod leaves gradients of these to each rank"),
    ],
)
def test_what_a_strategy_does_otherwise_is_said(
    world_pool: Any, act: Any, passes: int, strategy: str, said: str
) -> None:
    (_, first), (_, second) = world_pool(2).run(plainly, strategy, told, act, passes)
    assert len(first) == bool(said)
    assert said in "".join(first)
    assert not second


@pytest.mark.parametrize(
    ("act", "strategy", "said"),
    [
        (by_hand_alone, "ddp:shard_optimizer=true", "Step out of skip_synchronize(), which"),
        (own, "fsdp", "torch.autograd.grad was asked for the gradient of parameter"),
        (synchronized, "fsdp", "Horovod sums gradients over ranks twice then"),
    ],
)
def test_what_no_strategy_could_do_is_refused(
    world_pool: Any, act: Any, strategy: str, said: str
) -> None:
    for one in world_pool(2).run(plainly, strategy, partial(told, sums=True), act, 1):
        assert said in one


def stepping_again() -> list[float]:
    script = Script("horovod", model := Heads(4), model, 1)
    script.loss(0).backward()
    script.averaging.synchronize()
    with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
        script.averaging.step()
    script.loss(1).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        script.averaging.step()
    return []


def test_a_step_that_averages_again_warns_as_there(world_pool: Any) -> None:
    assert world_pool(2).run(plainly, "ddp", stepping_again) == [([], [])] * 2


def scaled(again: bool) -> list[float]:
    """Two of the steps overflow."""
    script = Script("horovod", model := Heads(4), model, 1)
    scaler = GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-19, growth_interval=3)
    for number in range(6):
        script.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = script.model(DATA[number, script.rank], 0)
        scaler.scale(out.float().square().mean()).backward()
        script.averaging.synchronize()
        scaler.unscale_(script.averaging)
        script.clip()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with nullcontext() if again else script.averaging.skip_synchronize():
                scaler.step(script.averaging)
        scaler.update()
        script.found.append(scaler.get_scale())
    return [*script.found, *(p.sum().item() for p in script.parameters)]


def test_a_scale_is_as_if_gradients_were_averaged_once(world_pool: Any) -> None:
    once, again = (world_pool(2).run(plainly, "ddp", scaled, again) for again in (False, True))
    assert once[0][0][1] < 2.0**40
    for (found, told), (other, _) in zip(again, once, strict=True):
        assert (found, told) == (pytest.approx(other, rel=1e-5, nan_ok=True), [])
