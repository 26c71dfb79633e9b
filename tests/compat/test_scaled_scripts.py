"""Scripts in fp16 whose losses train more than one model, held against PyTorch on one process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from plain_scripts import batches, plainly
from torch import nn
from torch.nn import functional

from unipar.compat.native.calls import clip_grad_norm_
from unipar.compat.native.scaling import GradScaler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SGD = torch.optim.SGD
Script = Callable[..., list[float]]


def name(one: Any) -> str:
    return one if isinstance(one, str) else getattr(one, "func", one).__name__


def half() -> torch.autocast:
    return torch.autocast("cpu", torch.float16)


def values(*modules: nn.Module) -> list[float]:
    return [one.sum().item() for module in modules for one in module.state_dict().values()]


def temperature(scaler: Any, clip: Any, *, scales: bool = True) -> list[float]:
    """A tensor with an optimizer of its own and no module, and an input that is looked at."""
    torch.manual_seed(1)
    model, log_sigma, found = nn.Linear(6, 3), torch.zeros(1, requires_grad=True), []
    optimizer, other = SGD(model.parameters(), lr=0.1), SGD([log_sigma], lr=0.1, momentum=0.9)
    scale = scaler("cpu", enabled=scales)
    for number, x in enumerate(batches(8, 8, 8, 8)):
        shift = torch.zeros(6, requires_grad=True)
        for part in (x, x.flip(1)):
            with half():
                output = model(part + shift)
            loss = (torch.exp(-log_sigma) * output.float().square().mean() + log_sigma).sum()
            scale.scale(loss).backward()
        assert shift.grad is not None
        found.append(shift.grad.sum().item() / scale.get_scale())
        if number % 2:
            scale.unscale_(other)
            found.append(float(clip([log_sigma], 0.1)))
        for one in (optimizer, other):
            scale.step(one)
            one.zero_grad()
        scale.update()
        found += [loss.item(), log_sigma.item()]
    return found + values(model)


def too_large(scaler: Any, clip: Any, *, scales: bool = True, fused: bool = False) -> list[float]:
    """Its gradients overflow, and those of the model do not."""
    torch.manual_seed(1)
    model, weight, found = nn.Linear(6, 3), torch.zeros(2, 6, requires_grad=True), []
    optimizer, other = SGD(model.parameters(), lr=0.1), SGD([weight], lr=0.1, fused=fused)
    scale = scaler("cpu", enabled=scales)
    for x in batches(8, 8, 8, 8, 8, 8):
        with half():
            loss = model(x).float().square().mean()
            loss = loss + 0.4 * functional.linear(x.abs(), weight).float().sum()
        scale.scale(loss).backward()
        for one in (optimizer, other):
            scale.step(one)
            one.zero_grad()
        scale.update()
        found += [loss.item(), weight.sum().item()]
    return found + values(model)


def together(scaler: Any, clip: Any, *, apart: bool = False, pending: bool = False) -> list[float]:
    """One loss trains two models, which may have stepped by losses of their own.

    Args:
        scaler: the class.
        clip: what clips.
        apart: whether a gradient of one of these overflows.
        pending: whether they come to the first joint pass with gradients of losses of their own.
    """
    torch.manual_seed(1)
    encoder, decoder, found = nn.Sequential(nn.Linear(6, 4), nn.Tanh()), nn.Linear(4, 6), []
    first, second = SGD(encoder.parameters(), lr=0.1), SGD(decoder.parameters(), lr=0.1)
    scale = scaler("cpu")
    for number, x in enumerate(batches(8, 8, 8)):
        if apart:
            with half():
                one = encoder(x).float().square().mean()
                other = decoder(x[:, :4]).float().square().mean() * (1e4 if number == 0 else 1)
            for loss, optimizer in ((one, first), (other, second)):
                scale.scale(loss).backward()
                if not pending or number == 0:
                    scale.step(optimizer)
                    optimizer.zero_grad()
            if not pending or number == 0:
                scale.update()
            if pending and number == 0:
                continue
        with half():
            loss = (decoder(encoder(x)) - x).float().square().mean()
        scale.scale(loss).backward()
        for optimizer, model in ((first, encoder), (second, decoder)):
            scale.unscale_(optimizer)
            found.append(float(clip(model.parameters(), 0.5)))
            scale.step(optimizer)
            optimizer.zero_grad()
        scale.update()
        found.append(loss.item())
    return found + values(encoder, decoder)


class Inside(nn.Module):
    """It asks for fp16 itself, of which the call tells nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with half():
            return self.layer(x)


def of_its_own(scaler: Any, clip: Any) -> list[float]:
    torch.manual_seed(1)
    model, scale, found = Inside(), scaler("cpu"), []
    optimizer = SGD(model.parameters(), lr=1e8)
    for x in batches(8, 8):
        loss = model(x).float().sum(1).mean() * 1e-8
        optimizer.zero_grad()
        scale.scale(loss).backward()
        scale.step(optimizer)
        scale.update()
        found.append(loss.item() * 1e8)
    return found + values(model)


def by_one_optimizer(scaler: Any, clip: Any, *, fused: bool = False) -> list[float]:
    """No engine trains two modules; one loss overflows, and another would be too small."""
    torch.manual_seed(1)
    one, other, scale, found = nn.Linear(6, 4), nn.Linear(4, 3), scaler("cpu"), []
    optimizer = SGD([*one.parameters(), *other.parameters()], lr=1e6, fused=fused)
    for number, x in enumerate(batches(8, 8, 8, 8)):
        for part in (x, x.flip(0)):
            with half():
                output = other(one(part))
            loss = output.float().sum(1).mean() * (1e-8 if number else 10)
            scale.scale(loss).backward()
        if number == 2:
            scale.unscale_(optimizer)
            found.append(float(clip(one.parameters(), 1e-8)) * 1e8)
        scale.step(optimizer)
        optimizer.zero_grad()
        scale.update()
        found.append(loss.item() * (1e8 if number else 1))
    return [*found, scale.state_dict()["scale"], *values(one, other)]


def of_its_own_scale(scaler: Any, clip: Any, *, changes: bool = False) -> list[float]:
    """The scale that a scaler begins by otherwise is too high, and so is what this one grows to."""
    torch.manual_seed(1)
    model, found = nn.Linear(6, 3), []
    optimizer = SGD(model.parameters(), lr=1e-3)
    scale = scaler(
        "cpu", init_scale=2.0**8, growth_factor=16.0, backoff_factor=1 / 16, growth_interval=2
    )
    for x in batches(8, 8, 8, 8, 8):
        with half():
            output = model(x)
        loss = output.float().sum(1).mean() * 100
        optimizer.zero_grad()
        scale.scale(loss).backward()
        scale.step(optimizer)
        scale.update(2.0**10 if changes else None)
        found += [loss.item(), model.bias.sum().item()]
    return found + values(model)


def guarded(scaler: Any, clip: Any, *, wide: bool = False, fused: bool = False) -> list[float]:
    """It looks whether steps are left out in three ways, and resumes twice from a scaler's state.

    Args:
        scaler: the class.
        clip: what clips.
        wide: whether it computes in fp32, and a gradient is infinite by itself.
        fused: whether its optimizer steps all parameters at once.
    """
    torch.manual_seed(1)
    model, found = nn.Linear(6, 3), []
    optimizer = SGD(model.parameters(), lr=1e-3, fused=fused)
    scale = scaler("cpu", growth_interval=3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    stored, last = scale.state_dict(), scale.get_scale()
    found.append(stored["scale"])
    for number, x in enumerate(batches(*[8] * 10)):
        start = scale.get_scale()
        with torch.autocast("cpu", torch.float16, enabled=not wide):
            loss = model(x).float().sum(1).mean()
        optimizer.zero_grad()
        scale.scale(loss * (300 if number in (0, 3, 4, 8) else 1)).backward()
        if wide and number in (3, 4):
            for one in model.parameters():
                assert one.grad is not None
                one.grad.fill_(torch.inf)
        before = scale.get_scale()
        scale.unscale_(optimizer)
        penalty = torch.ones(1) * scale.get_scale() / before
        scale.step(optimizer)
        scale.update()
        now = scale.get_scale()
        if now >= before:
            schedule.step()
        found += [now < start, now < before, now < last, schedule.last_epoch, penalty.item()]
        last = now
        if not wide:
            found += [scale.state_dict()["scale"], scale.state_dict()["_growth_tracker"]]
        if number == 5:
            scale.load_state_dict({**scale.state_dict(), "scale": 2.0**18, "_growth_tracker": 1})
            last = scale.get_scale()
        elif number == 6 and not wide:
            stored = copy.deepcopy(scale).state_dict()
    fresh = scaler("cpu")
    fresh.load_state_dict(stored)
    return [*found, *fresh.state_dict().values(), *values(model)]


SCRIPTS: list[Script] = [
    temperature, partial(temperature, scales=False), too_large, partial(too_large, fused=True),
    together, partial(together, apart=True), of_its_own, by_one_optimizer,
    partial(by_one_optimizer, fused=True), of_its_own_scale, guarded,
]  # fmt: skip


def check(pool: Any, strategy: str, act: Script) -> None:
    expected = act(torch.amp.GradScaler, nn.utils.clip_grad_norm_)
    for one in pool.run(plainly, strategy, partial(act, GradScaler, clip_grad_norm_)):
        assert isinstance(one, tuple), one
        assert one[0] == pytest.approx(expected, rel=2e-3, abs=1e-4)


@pytest.mark.parametrize("act", SCRIPTS, ids=name)
def test_an_engine_alone_scales_as_pytorch_does(world_pool: Any, act: Script) -> None:
    check(world_pool(1), "single", act)


@pytest.mark.parametrize(
    ("strategy", "act"),
    [
        ("ddp", temperature),
        ("ddp", too_large),
        ("ddp", SCRIPTS[5]),
        ("ddp", of_its_own),
        ("ddp", of_its_own_scale),
        ("ddp", guarded),
        ("zero2", guarded),
        ("fsdp", too_large),
        ("zero2", too_large),
    ],
    ids=name,
)
def test_so_do_ranks(world_pool: Any, strategy: str, act: Script) -> None:
    check(world_pool(2), strategy, act)


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_no_scale_was_too_high_for_are_seen_too(world_pool: Any, fused: bool) -> None:
    check(world_pool(1), "single", partial(guarded, wide=True, fused=fused))


def logged(scaler: Any, clip: Any, *, reads: str) -> list[float]:
    """The scale, and what scripts decide by it, where they read it.

    Args:
        scaler: the class.
        clip: what clips.
        reads: at the start, before losses are scaled; before or after steps; after updates.
    """
    torch.manual_seed(1)
    model, found = nn.Linear(6, 3), []
    scale = scaler("cpu", 2.0**15, growth_interval=2)
    optimizer = SGD(model.parameters(), lr=1e-3)
    for x, factor in zip(batches(*[8] * 8), (900, 1, 1, 900, 900, 1, 1, 1), strict=True):
        if "start" in reads:
            found.append(scale.get_scale())
        with half():
            loss = model(x).float().sum(1).mean() * factor
        optimizer.zero_grad()
        scale.scale(loss).backward()
        before = scale.get_scale() if "before" in reads else None
        scale.step(optimizer)
        if "stepped" in reads:
            before = scale.get_scale()
        scale.update()
        if "after" in reads:
            now = scale.get_scale()
            found.append(now)
            if before is not None:
                found += [before > now, now < before, before <= now, before == now, before < 2**14]
        found.append(loss.item())
    return found


READS = ["before after", "stepped after", "after", "start", "start before after"]


@pytest.mark.parametrize("reads", READS)
def test_scales_are_logged_and_decided_by_as_pytorchs(world_pool: Any, reads: str) -> None:
    check(world_pool(1), "single", partial(logged, reads=reads))


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_so_are_those_of_ranks(world_pool: Any, strategy: str) -> None:
    check(world_pool(2), strategy, partial(logged, reads="start stepped after"))


def test_a_scale_in_use_is_a_number_in_files() -> None:
    scaler = GradScaler("cpu", 2.0**15)
    scaler.scale(torch.ones(1))
    held = scaler.get_scale()
    assert (held * 2, held > 1024, held == 2.0**15) == (2.0, True, True)
    assert type(pickle.loads(pickle.dumps(held))) is float


def test_a_step_by_what_the_engines_scale_was_too_high_for_is_left_out(world_pool: Any) -> None:
    """PyTorch would not have scaled, and an engine does."""
    act = partial(too_large, GradScaler, clip_grad_norm_, scales=False)
    ((found, _),) = world_pool(1).run(plainly, "single", act)
    assert found[1] == 0.0
    assert found[11] < -1.0


def test_gradients_of_several_scales_are_not_added(world_pool: Any) -> None:
    act = partial(together, GradScaler, clip_grad_norm_, apart=True, pending=True)
    (said,) = world_pool(1).run(plainly, "single", act)
    assert "these were scaled by other numbers" in said


def test_a_scale_that_a_script_sets_in_its_course_is_refused(world_pool: Any) -> None:
    act = partial(of_its_own_scale, GradScaler, clip_grad_norm_, changes=True)
    (said,) = world_pool(1).run(plainly, "single", act)
    assert "scaler.update(1024.0): an engine scales in this GradScaler's place" in said


def test_a_strategy_that_cannot_scale_what_a_model_has_in_fp16_refuses_it(world_pool: Any) -> None:
    for said in world_pool(2).run(plainly, "fsdp", partial(of_its_own, GradScaler, None)):
        assert "set precision: fp16 in unipar.yaml" in said
