"""Networks that train against each other, each by an optimizer of its own, as under DDP."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from faces import under
from plain_scripts import plainly
from torch import nn

from unipar.compat import colossalai
from unipar.compat.accelerate import Accelerator
from unipar.compat.adopting import adoption
from unipar.compat.colossalai.booster import Booster
from unipar.compat.colossalai.booster.plugin import TorchDDPPlugin
from unipar.compat.fabric import Fabric
from unipar.compat.native.wrappers import DistributedDataParallel
from unipar.compat.run import current
from unipar.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 6
ORDERS = ["before backward", "after step", "at the end"]
"""Where gradients are cleared."""
Backward = Callable[[torch.Tensor], None]


def networks() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    torch.manual_seed(0)
    maker, critic = nn.Linear(3, 5), nn.Linear(5, 1)
    making, judging = (torch.optim.SGD(m.parameters(), 0.1, 0.5) for m in (maker, critic))
    return maker, critic, making, judging


def play(
    maker: Any,
    critic: Any,
    making: Any,
    judging: Any,
    backward: Backward,
    order: str,
    accumulate: int,
    ranks: list[int],
    sync: Any = contextlib.nullcontext,
) -> list[list[float]]:
    """Losses of each of these ranks' data, and at last what the weights are."""
    found: list[list[float]] = [[] for _ in ranks]
    for number in range(STEPS):
        data = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(number))
        first, last = number % accumulate == 0, (number + 1) % accumulate == 0
        with sync(last):
            fakes = [maker(data[rank, :, :3]) for rank in ranks]
            if first and order == "before backward":
                judging.zero_grad()
            for rank, fake, losses in zip(ranks, fakes, found, strict=True):
                real = critic(data[rank, :, 3:]).tanh().mean()
                loss = (critic(fake.detach()).tanh().mean() - real) / accumulate
                backward(loss / len(ranks))
                losses.append(loss.item())
            if last:
                judging.step()
            if last and order == "after step":
                judging.zero_grad()
            if first and order == "before backward":
                making.zero_grad()
            for fake, losses in zip(fakes, found, strict=True):
                loss = -critic(fake).tanh().mean() / accumulate
                backward(loss / len(ranks))
                losses.append(loss.item())
            if last:
                making.step()
            if last and order != "before backward":
                making.zero_grad()
            if last and order == "at the end":
                judging.zero_grad()
    weights = [p.detach().double().sum().item() for m in (maker, critic) for p in m.parameters()]
    return [one + weights for one in found]


def by_hand(order: str, accumulate: int) -> list[list[float]]:
    """Gradients that are the mean of two replicas'; nothing of unipar in it."""
    maker, critic, making, judging = networks()
    return play(maker, critic, making, judging, torch.Tensor.backward, order, accumulate, [0, 1])


def by_accelerate(order: str, accumulate: int) -> list[float]:
    accelerator = Accelerator()
    maker, critic, making, judging = accelerator.prepare(*networks())
    ranks, back = [accelerator.process_index], accelerator.backward
    return play(maker, critic, making, judging, back, order, accumulate, ranks)[0]


def by_fabric(order: str, accumulate: int) -> list[float]:
    fabric, maker, critic, making, judging = set_up()
    ranks, back = [fabric.global_rank], fabric.backward
    return play(maker, critic, making, judging, back, order, accumulate, ranks)[0]


def set_up() -> tuple[Any, ...]:
    fabric = Fabric()
    maker, critic, making, judging = networks()
    maker, making = fabric.setup(maker, making)
    critic, judging = fabric.setup(critic, judging)
    return fabric, maker, critic, making, judging


def by_colossalai(order: str, accumulate: int) -> list[float]:
    booster, maker, critic, making, judging = boosted()
    # The critic's loss comes first.
    of = itertools.cycle([judging, making])

    def back(loss: torch.Tensor) -> None:
        booster.backward(loss, next(of))

    ranks = [torch.distributed.get_rank()]
    return play(maker, critic, making, judging, back, order, accumulate, ranks)[0]


def boosted() -> tuple[Any, ...]:
    colossalai.launch_from_torch(verbose=False)
    booster = Booster(plugin=TorchDDPPlugin())
    maker, critic, making, judging = networks()
    maker, making, *_ = booster.boost(maker, making)
    critic, judging, *_ = booster.boost(critic, judging)
    return booster, maker, critic, making, judging


def by_ddp(order: str, accumulate: int) -> list[float]:
    adoption.note_aware()
    maker, critic, making, judging = networks()
    first, second = DistributedDataParallel(maker), DistributedDataParallel(critic)

    @contextlib.contextmanager
    def sync(last: bool) -> Any:
        with contextlib.ExitStack() as local:
            for one in (first, second) if not last else ():
                local.enter_context(one.no_sync())
            yield

    ranks, back = [current.placement().rank], torch.Tensor.backward
    return play(first, second, making, judging, back, order, accumulate, ranks, sync)[0]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("face", [by_accelerate, by_colossalai, by_fabric, by_ddp])
def test_steps_are_by_what_each_loss_has_left_since_they_were_cleared(
    world_pool: Any, face: Callable[..., Any], order: str, accumulate: int
) -> None:
    if face is by_ddp:
        found = world_pool(2).run(plainly, "ddp", face, order, accumulate)
        assert all(isinstance(one, tuple) for one in found), found
        found = [one[0] for one in found]
    else:
        found = world_pool(2).run(under, "ddp", face, order, accumulate)
    for one, expected in zip(found, by_hand(order, accumulate), strict=True):
        assert one == pytest.approx(expected, rel=1e-5, abs=1e-6)


def accumulated(passed_through: bool) -> list[float]:
    """Accelerate's own accumulation, in which it leaves steps and clearing out."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    maker, critic, making, judging = accelerator.prepare(*networks())
    found = []
    for number in range(STEPS):
        data = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(number))
        own = data[accelerator.process_index]
        with accelerator.accumulate(maker, critic):
            fake = maker(own[:, :3])
            judged = critic(fake if passed_through else fake.detach()).tanh().mean()
            loss = judged - critic(own[:, 3:]).tanh().mean()
            accelerator.backward(loss)
            judging.step()
            judging.zero_grad()
            made = -critic(maker(own[:, :3])).tanh().mean()
            accelerator.backward(made)
            making.step()
            making.zero_grad()
        found += [loss.item(), made.item()]
    return found


def accumulated_by_hand(passed_through: bool) -> list[list[float]]:
    maker, critic, making, judging = networks()
    found: list[list[float]] = [[], []]
    for number in range(STEPS):
        data = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(number))
        last = number % 2 == 1
        for own, losses in zip(data, found, strict=True):
            fake = maker(own[:, :3])
            judged = critic(fake if passed_through else fake.detach()).tanh().mean()
            loss = judged - critic(own[:, 3:]).tanh().mean()
            (loss / 4).backward()
            losses.append(loss.item())
        if last:
            judging.step()
            judging.zero_grad()
        for own, losses in zip(data, found, strict=True):
            made = -critic(maker(own[:, :3])).tanh().mean()
            (made / 4).backward()
            losses.append(made.item())
        if last:
            making.step()
            making.zero_grad()
    return found


@pytest.mark.parametrize("passed_through", [False, True])
def test_what_accelerate_accumulates_of_both_is_stepped_by(
    world_pool: Any, passed_through: bool
) -> None:
    found = world_pool(2).run(under, "ddp", accumulated, passed_through)
    for one, expected in zip(found, accumulated_by_hand(passed_through), strict=True):
        assert one == pytest.approx(expected, rel=1e-5, abs=1e-6)


def together(face: str, clears: str) -> list[float]:
    """Networks in a row, which one loss trains."""
    if face == "fabric":
        fabric, first, second, *optimizers = set_up()
        rank, back = fabric.global_rank, lambda loss: fabric.backward(loss, model=second)
    else:
        booster, first, second, *optimizers = boosted()
        rank = torch.distributed.get_rank()
        back = lambda loss: booster.backward(loss, optimizers[0])  # noqa: E731
    return in_a_row(first, second, optimizers, back, [rank], clears)[0]


def in_a_row(
    first: Any, second: Any, optimizers: Any, backward: Backward, ranks: list[int], clears: str
) -> list[list[float]]:
    found: list[list[float]] = [[] for _ in ranks]
    for number in range(3):
        data = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(number))
        if clears == "before":
            for one in optimizers:
                one.zero_grad()
        for rank, losses in zip(ranks, found, strict=True):
            loss = second(first(data[rank])).square().mean()
            backward(loss / len(ranks))
            losses.append(loss.item())
        for one in optimizers:
            one.step()
            if clears == "after":
                one.zero_grad()
    weights = [p.detach().double().sum().item() for m in (first, second) for p in m.parameters()]
    return [one + weights for one in found]


@pytest.mark.parametrize("clears", ["before", "after"])
@pytest.mark.parametrize("face", ["colossalai", "fabric"])
def test_one_loss_trains_all_that_it_goes_through(world_pool: Any, face: str, clears: str) -> None:
    first, second, *optimizers = networks()
    expected = in_a_row(first, second, optimizers, torch.Tensor.backward, [0, 1], clears)
    for found, by_hand in zip(
        world_pool(2).run(under, "ddp", together, face, clears), expected, strict=True
    ):
        assert found == pytest.approx(by_hand, rel=1e-5, abs=1e-6)


def divided() -> list[str]:
    """What is said where each rank has a part of the gradients, which one loss leaves in one."""
    accelerator = Accelerator()
    maker, critic, making, judging = accelerator.prepare(*networks())
    x, said = torch.ones(2, 3), list[str]()
    making.zero_grad()
    accelerator.backward(critic(maker(x)).sum())
    try:
        judging.step()
    except ConfigError as error:
        said.append(str(error))
    making.step()
    try:
        accelerator.backward(critic(maker(x).detach()).sum())
    except ConfigError as error:
        said.append(str(error))
    return said


def test_gradients_that_another_loss_has_left_in_parts_are_not_added_in_silence(
    world_pool: Any,
) -> None:
    for said in world_pool(2).run(under, "fsdp", divided):
        stepped, added = said
        assert "has trained another one" in stepped
        assert "put them into one nn.Module with one optimizer; or use a strategy" in stepped
        assert "Call this optimizer's zero_grad() before accelerator.backward(loss)" in added
