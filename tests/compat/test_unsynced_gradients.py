"""Gradients that DistributedDataParallel leaves to each rank, as a script finds and uses them.

Every script is run by PyTorch's own DDP, too, and both give each rank the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faces import under
from plain_scripts import Heads, plainly
from torch import nn

from unipar.compat import colossalai
from unipar.compat.accelerate import Accelerator
from unipar.compat.accelerate.utils import DistributedDataParallelKwargs
from unipar.compat.adopting import adoption
from unipar.compat.colossalai.booster import Booster
from unipar.compat.colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
from unipar.compat.fabric import Fabric
from unipar.compat.native.calls import clip_grad_norm_
from unipar.compat.native.wrappers import DistributedDataParallel
from unipar.compat.run import current
from unipar.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
DATA = torch.randn(8, 2, 4, 4, generator=torch.Generator().manual_seed(0))
"""Of each pass and rank four samples."""


class Script:
    """Trains by DDP, of PyTorch's own (``native``) or of a face's."""

    def __init__(
        self, face: str, model: nn.Module, updated: nn.Module, beside: Script | None = None
    ) -> None:
        self.face, self.rank = face, current.placement().rank
        self.found: list[float] = []
        optimizer = torch.optim.SGD(updated.parameters(), lr=0.1, momentum=0.9)
        self.optimizer: Any = optimizer
        self.backward: Callable[[torch.Tensor], None] = lambda loss: loss.backward()
        self.clip_by: Callable[..., Any] = nn.utils.clip_grad_norm_
        if face == "native":
            current.world()
            self.model: Any = nn.parallel.DistributedDataParallel(
                model, find_unused_parameters=True
            )
        elif face == "ddp":
            adoption.note_aware()
            self.model = DistributedDataParallel(model, find_unused_parameters=True)
            self.clip_by = clip_grad_norm_
        elif face == "accelerate":
            unused = DistributedDataParallelKwargs(find_unused_parameters=True)
            accelerator = beside.accelerator if beside else Accelerator(kwargs_handlers=[unused])
            self.accelerator: Any = accelerator
            self.model, self.optimizer = accelerator.prepare(model, optimizer)
            self.backward, self.clip_by = accelerator.backward, accelerator.clip_grad_norm_
            self._no_sync = lambda: accelerator.no_sync(self.model)
        elif face == "colossalai":
            colossalai.launch_from_torch(verbose=False)
            booster = Booster(plugin=TorchDDPPlugin(find_unused_parameters=True))
            self.model, self.optimizer, *_ = booster.boost(model, optimizer)
            self.backward = lambda loss: booster.backward(loss, self.optimizer)
            self.clip_by = lambda _, norm: self.optimizer.clip_grad_by_norm(norm)
            self._no_sync = lambda: booster.no_sync(self.model, self.optimizer)
        else:
            fabric = Fabric(strategy="ddp_find_unused_parameters_true", devices=2)
            self.model, self.optimizer = fabric.setup(model, optimizer)
            self.backward = fabric.backward
            self.clip_by = lambda _, norm: fabric.clip_gradients(
                self.model, self.optimizer, max_norm=norm
            )
            self._no_sync = lambda: fabric.no_backward_sync(self.model)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.model.no_sync() if self.face in ("native", "ddp") else self._no_sync()

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def loss(self, number: int, head: int = 0, *, around: bool = False) -> torch.Tensor:
        x = DATA[number, self.rank]
        model = self.model.module if around else self.model
        return (model(x, head) - x.sum(1, keepdim=True)).square().mean()

    def local(self, number: int, **how: Any) -> None:
        with self.no_sync():
            self.backward(self.loss(number, **how))

    def note(self) -> None:
        """Note what is in ``p.grad``."""
        self.found += [0.0 if p.grad is None else p.grad.norm().item() for p in self.parameters]

    def clip(self) -> None:
        self.found.append(float(self.clip_by(self.parameters, 0.5)))

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def perturbed(script: Script) -> None:
    """Sharpness-aware: each rank perturbs the weights by its own gradient."""
    for number in range(0, 6, 2):
        script.local(number)
        moved = [(p, 0.5 * p.grad.clone()) for p in script.parameters if p.grad is not None]
        script.note()
        with torch.no_grad():
            for p, by in moved:
                p.add_(by)
        script.optimizer.zero_grad()
        loss = script.loss(number)
        script.found.append(loss.item())
        script.backward(loss)
        with torch.no_grad():
            for p, by in moved:
                p.sub_(by)
        script.step()


def averaged(script: Script) -> None:
    """Clipped on each rank, and averaged by hand then."""
    for number in range(3):
        script.local(number)
        script.clip()
        for p in script.parameters:
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= 2
        script.step()


def drifting(script: Script) -> None:
    """Ranks step on their own, by one pass or two."""
    for number in range(0, 6, 2):
        script.local(number)
        if number:
            script.local(number + 1, head=number // 2 % 2)
        script.step()
        script.found += [p.sum().item() for p in script.parameters]


def changed(script: Script) -> None:
    """What a script has changed between passes is summed with what comes after."""
    for number in range(0, 6, 2):
        script.local(number)
        script.note()
        for p in script.parameters:
            if p.grad is not None:
                p.grad *= 1 + script.rank
        script.backward(script.loss(number + 1))
        script.note()
        script.step()


def added(script: Script) -> None:
    """A pass of each rank's own, and a penalty of weights, come to what is averaged."""
    for number in range(0, 6, 2):
        script.loss(number).backward()
        script.model.module.heads[0].weight.square().sum().backward()
        script.local(number + 1)
        script.note()
        if number:
            script.loss(number).backward()
            script.note()
        script.step()


def penalized(script: Script) -> None:
    """A penalty that comes first, of another size on each rank, is averaged with the loss."""
    for number in range(3):
        penalty = script.parameters[0].square().sum() * (1 + script.rank)
        penalty.backward()
        script.backward(script.loss(number))
        script.note()
        script.step()


def uncleared(script: Script) -> None:
    """Gradients of a step are there for the next, unless p.grad is None, and are added to."""
    for number in range(5):
        script.backward(script.loss(number))
        if number != 3:
            script.note()
        script.optimizer.step()
        if number == 1:
            for p in script.parameters:
                p.grad = None


def outside(script: Script) -> None:
    """What the optimizer has not adds up from step to step, and is clipped with the rest."""
    clip = script.clip_by if script.face == "ddp" else nn.utils.clip_grad_norm_
    for number in range(3):
        script.local(number, head=1)
        script.backward(script.loss(number))
        script.found.append(float(clip(script.parameters, 0.5)))
        script.note()
        script.step()


def kept(script: Script) -> None:
    """What a step of each rank's own leaves is averaged with the next pass."""
    for number in range(0, 6, 2):
        script.local(number)
        script.optimizer.step()
        script.loss(number + 1).backward()
        script.note()
        script.step()


def passed_backward(script: Script) -> None:
    """It is the forward pass that is within the block, or is not."""
    for number in range(4):
        with script.no_sync() if number % 2 else nullcontext():
            loss = script.loss(number)
        with nullcontext() if number % 2 else script.no_sync():
            script.backward(loss)
        script.note()
        script.step()


def around(script: Script) -> None:
    """Passes around the wrapper are each rank's own; a forward pass is what counts."""
    for number in range(4):
        if number % 2:
            script.loss(number, around=True).backward()
        else:
            loss = script.loss(number)
            with script.model.no_sync():
                loss.backward()
        script.note()
        script.step()


def test_gradients_that_are_not_cleared_are_missed_where_they_are_divided(world_pool: Any) -> None:
    for said in world_pool(2).run(under, "zero2", refused, stepping, "accelerate", True):
        assert said.startswith("optimizer.zero_grad() was not called since the last step")


def stepping(script: Script) -> None:
    for number in range(2):
        script.backward(script.loss(number))
        script.optimizer.step()


def refused(act: Callable[[Any], None], face: str, one: bool = False) -> str:
    with pytest.raises(ConfigError) as refusal:
        run(act, face, one)
    return str(refusal.value)


@pytest.mark.parametrize("face", ["accelerate", "fabric"])
def test_what_is_there_is_refused_where_frameworks_have_others_in_groups(
    world_pool: Any, face: str
) -> None:
    for said in world_pool(2).run(under, "zero2", refused, penalized, face):
        assert said.startswith("there are gradients in p.grad before the first backward pass")


def unsynced_by_zero() -> str:
    colossalai.launch_from_torch(verbose=False)
    booster, net = Booster(plugin=LowLevelZeroPlugin(precision="fp32")), nn.Linear(4, 1)
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with booster.no_sync(model, optimizer):
        booster.backward(model(DATA[0, 0]).sum(), optimizer)
    with pytest.raises(ConfigError) as refusal:
        optimizer.step()
    return str(refusal.value)


def test_a_plugin_that_would_step_by_nothing_is_refused(world_pool: Any) -> None:
    for said in world_pool(2).run(under, "ddp", unsynced_by_zero):
        assert "LowLevelZeroPlugin would step without what it has left" in said


class OneHead(nn.Linear):
    """Uses all of its parameters, so that ranks may sum a gradient while others are computed."""

    def forward(self, input: torch.Tensor, head: int = 0) -> torch.Tensor:
        assert head == 0
        return super().forward(input)


def run(act: Callable[[Script], None], face: str, one: bool = False) -> list[float]:
    model: Any = OneHead(4, 1) if one else Heads(4)
    script = Script(face, model, model.heads[0] if act is outside else model)
    act(script)
    return [*script.found, *(x for p in script.parameters for x in p.detach().flatten().tolist())]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("horovod", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "act",
    [perturbed, averaged, drifting, changed, added, kept, around, penalized, uncleared, outside],
)
def test_each_rank_has_what_ddp_leaves_it(world_pool: Any, act: Any, strategy: str) -> None:
    expected = world_pool(2).run(under, "ddp", run, act, "native")
    found = world_pool(2).run(plainly, strategy, partial(run, act, "ddp"))
    for one, own in zip(found, expected, strict=True):
        assert one == (pytest.approx(own, rel=1e-5, abs=1e-6), []), one


def left(first: bool) -> list[float]:
    script = Script("ddp", model := Heads(4), model)
    if first:
        script.loss(0).backward()
    script.local(1)
    script.optimizer.step()
    return []


@pytest.mark.parametrize("first", [False, True])
def test_a_strategy_that_sums_them_all_the_same_says_so(world_pool: Any, first: bool) -> None:
    (_, told), (_, others) = world_pool(2).run(plainly, "fsdp", left, first)
    assert len(told) == 1
    assert not others
    assert "last backward pass of a step was within no_sync()" in told[0]
    assert "strategy 'fsdp' steps by the mean over ranks" in told[0]


@pytest.mark.parametrize("face", ["accelerate", "colossalai", "fabric"])
@pytest.mark.parametrize(
    "act", [perturbed, averaged, drifting, changed, passed_backward, penalized, uncleared, outside]
)
def test_so_it_has_behind_other_faces(world_pool: Any, act: Any, face: str) -> None:
    expected = world_pool(2).run(under, "ddp", run, act, "native")
    for one, own in zip(world_pool(2).run(under, "ddp", run, act, face), expected, strict=True):
        assert one == pytest.approx(own, rel=1e-5, abs=1e-6)


def behind(world_pool: Any, face: str, act: Callable[[], list[float]]) -> list[list[float]]:
    """What each rank finds under ddp."""
    if face == "ddp":
        return [one[0] for one in world_pool(2).run(plainly, "ddp", act)]
    return world_pool(2).run(under, "ddp", act)


@pytest.mark.parametrize("face", ["ddp", "accelerate", "colossalai", "fabric"])
def test_so_it_is_where_gradients_are_summed_as_they_come(world_pool: Any, face: str) -> None:
    expected = world_pool(2).run(under, "ddp", run, passed_backward, "native", True)
    found = behind(world_pool, face, partial(run, passed_backward, face, True))
    for one, own in zip(found, expected, strict=True):
        assert one == pytest.approx(own, rel=1e-5, abs=1e-6)


def critical(face: str) -> list[float]:
    """A critic's own passes are each rank's own, and a generator's loss goes through it."""
    torch.manual_seed(0)
    made, judged = nn.Linear(4, 4), nn.Linear(4, 1)
    generator = Script(face, made, made)
    critic = Script(face, judged, judged, generator)
    for x in DATA[:3, critic.rank]:
        generator.optimizer.zero_grad()
        generator.backward(critic.model(generator.model(x)).mean())
        generator.optimizer.step()
        critic.optimizer.zero_grad()
        with critic.no_sync():
            critic.backward(critic.model(generator.model(x).detach()).square().mean())
        critic.note()
        critic.optimizer.step()
    return [*critic.found, *(x for p in critic.parameters for x in p.detach().flatten().tolist())]


@pytest.mark.parametrize("face", ["ddp", "accelerate"])
def test_a_pass_of_another_models_loss_is_one_of_its_own(world_pool: Any, face: str) -> None:
    expected = world_pool(2).run(under, "ddp", critical, "native")
    found = behind(world_pool, face, partial(critical, face))
    for one, own in zip(found, expected, strict=True):
        assert one == pytest.approx(own, rel=1e-5, abs=1e-6)


def passed_through(face: str, clears: str) -> list[float]:
    """What a generator's loss leaves in the critic is read, and cleared or added to."""
    torch.manual_seed(0)
    made, judged = nn.Linear(4, 4), nn.Linear(4, 1)
    generator = Script(face, made, made)
    critic = Script(face, judged, judged, generator)
    for x in DATA[:3, critic.rank]:
        generator.backward(critic.model(generator.model(x)).mean())
        critic.note()
        generator.step()
        if clears == "zero_grad":
            critic.optimizer.zero_grad()
        for p in critic.parameters if clears == "none" else ():
            p.grad = None
        critic.backward(critic.model(generator.model(x).detach()).square().mean())
        critic.note()
        critic.optimizer.step()
        if clears == "":
            critic.optimizer.zero_grad()
    weights = [*generator.parameters, *critic.parameters]
    return [*critic.found, *(x for p in weights for x in p.detach().flatten().tolist())]


@pytest.mark.parametrize("clears", ["zero_grad", "none", ""])
@pytest.mark.parametrize("face", ["ddp", "accelerate", "colossalai", "fabric"])
def test_what_another_models_loss_leaves_is_the_mean(
    world_pool: Any, face: str, clears: str
) -> None:
    expected = world_pool(2).run(under, "ddp", passed_through, "native", clears)
    found = behind(world_pool, face, partial(passed_through, face, clears))
    for one, own in zip(found, expected, strict=True):
        assert one == pytest.approx(own, rel=1e-5, abs=1e-6)
