"""A script that lets ranks keep buffers of their own has them under every strategy."""

from __future__ import annotations

import contextlib
import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from faces import under
from plain_scripts import plainly
from torch import nn

from unipar.compat import colossalai, deepspeed
from unipar.compat.accelerate import Accelerator
from unipar.compat.accelerate.utils import DistributedDataParallelKwargs
from unipar.compat.adopting import adoption
from unipar.compat.colossalai.booster import Booster
from unipar.compat.colossalai.booster import plugin as plugins
from unipar.compat.horovod import torch as hvd
from unipar.compat.native.wrappers import DistributedDataParallel
from unipar.compat.run import current

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DATA = torch.randn(3, 2, 6, 4, generator=torch.Generator().manual_seed(0)) + 2
"""Of each step and rank six samples."""


def train(broadcast: bool) -> list[float]:
    accelerator = Accelerator(
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=broadcast)]
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for shares in DATA:
        accelerator.backward(prepared(shares[accelerator.process_index]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return dict(prepared.named_buffers())["0.running_mean"].tolist()


def by_hand(shares: torch.Tensor) -> list[float]:
    norm = nn.BatchNorm1d(4)
    for share in shares:
        norm(share)
    assert norm.running_mean is not None
    return norm.running_mean.tolist()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "horovod"])
def test_buffers_that_are_not_broadcast_are_each_ranks_own(world_pool: Any, strategy: str) -> None:
    found = world_pool(2).run(under, strategy, train, False)
    for rank in range(2):
        torch.testing.assert_close(found[rank], by_hand(DATA[:, rank]))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "horovod", "zero2"])
def test_by_default_they_begin_each_step_as_those_of_rank_0(world_pool: Any, strategy: str) -> None:
    first, second = world_pool(2).run(under, strategy, train, True)
    torch.testing.assert_close(first, by_hand(DATA[:, 0]))
    # Of the other rank's own batches the last alone is in them.
    mixed = torch.stack([*DATA[:2, 0], DATA[2, 1]])
    torch.testing.assert_close(second, by_hand(mixed))


def boosted(plugin: str, launched: str | None, settings: dict[str, Any]) -> list[float]:
    """The statistics that a rank evaluates with."""
    colossalai.launch_from_torch(verbose=False, strategy=launched)
    booster = Booster(plugin=getattr(plugins, plugin)(**settings))
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for shares in DATA:
        booster.backward(boosted(shares[torch.distributed.get_rank()]).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    boosted.eval()
    with torch.no_grad():
        boosted(DATA[0, 0])
    return dict(boosted.named_buffers())["0.running_mean"].tolist()


ZERO = {"precision": "fp32"}
HYBRID = {**ZERO, "tp_size": 1, "pp_size": 1}


@pytest.mark.parametrize(
    ("plugin", "settings", "strategy", "launched", "shares"),
    [
        ("LowLevelZeroPlugin", ZERO, "ddp", None, False),
        ("GeminiPlugin", ZERO, "fsdp", None, False),
        ("TorchDDPPlugin", {"broadcast_buffers": False}, None, "ddp", False),
        ("HybridParallelPlugin", {**HYBRID, "broadcast_buffers": False}, None, None, False),
        ("TorchDDPPlugin", {}, None, "fsdp", True),
        ("HybridParallelPlugin", HYBRID, "ddp", None, True),
    ],
)
def test_whose_buffers_evaluate_is_said_by_the_plugin(
    world_pool: Any,
    plugin: str,
    settings: dict[str, Any],
    strategy: str | None,
    launched: str | None,
    shares: bool,
) -> None:
    found = world_pool(2).run(under, strategy, boosted, plugin, launched, settings)
    for rank in range(2):
        torch.testing.assert_close(found[rank], by_hand(DATA[:, 0 if shares else rank]))


class Placed(nn.Module):
    """A model that knows a number of its rank's own, and computes with it."""

    place: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("place", torch.full((2,), float(torch.distributed.get_rank())))
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * (1 + self.place.sum())


def placed(face: str) -> list[list[float]]:
    """The buffers of a rank, once its model was taken up, and after steps."""
    found: Any
    optimizer: Any
    if face == "deepspeed":
        deepspeed.init_distributed("gloo")
        config = {"train_micro_batch_size_per_gpu": 6, "zero_optimization": {"stage": 1}}
        model = Placed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        found, optimizer, backward = engine, engine, engine.backward
    elif face == "colossalai":
        colossalai.launch_from_torch(verbose=False)
        booster = Booster(plugin=plugins.LowLevelZeroPlugin(precision="fp32"))
        model = Placed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found, optimizer, *_ = booster.boost(model, optimizer)
        backward = functools.partial(booster.backward, optimizer=optimizer)
    else:
        kept = DistributedDataParallelKwargs(broadcast_buffers=False)
        accelerator = Accelerator(kwargs_handlers=[kept])
        model = Placed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found, optimizer = accelerator.prepare(model, optimizer)
        backward = accelerator.backward
    seen = [found.module.place.tolist()]
    for shares in DATA:
        backward(found(shares[torch.distributed.get_rank()]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, found.module.place.tolist()]


@pytest.mark.parametrize(
    ("face", "strategy"),
    [("deepspeed", "ddp"), ("deepspeed", "fsdp"), ("deepspeed", "zero2"), ("colossalai", "ddp"),
     ("accelerate", None)],
)  # fmt: skip
def test_ranks_keep_the_buffers_that_their_models_come_with(
    world_pool: Any, face: str, strategy: str | None
) -> None:
    found = world_pool(2).run(under, strategy, placed, face)
    assert found == [[[rank, rank], [rank, rank]] for rank in range(2)]


def taught() -> list[float]:
    """What a frozen teacher gives that each rank has made for itself."""
    accelerator = Accelerator()
    torch.manual_seed(accelerator.process_index)
    teacher = accelerator.prepare(nn.Linear(4, 1).requires_grad_(False))
    return [*teacher.module.weight[0].tolist(), teacher(torch.ones(4)).item()]


def test_a_teacher_is_each_ranks_own_as_accelerate_leaves_it(world_pool: Any) -> None:
    found = world_pool(2).run(under, "ddp", taught)
    for rank in range(2):
        torch.manual_seed(rank)
        own = nn.Linear(4, 1)
        expected = [*own.weight[0].tolist(), own(torch.ones(4)).item()]
        assert found[rank] == pytest.approx(expected)


def trained(model: nn.Module, accelerator: Accelerator, *, ddp: bool) -> tuple[Any, Any]:
    """A model by torch's DDP or by the face, and what trains it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if ddp:
        return nn.parallel.DistributedDataParallel(model), optimizer
    return accelerator.prepare(model, optimizer)


def with_targets(ddp: bool) -> list[float]:
    """Losses of steps whose targets are the model's own, of a pass in eval mode."""
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    model, optimizer = trained(model, accelerator, ddp=ddp)
    losses = []
    for shares in DATA:
        share = shares[accelerator.process_index]
        output = model(share)
        model.eval()
        with torch.no_grad():
            targets = model(share)
        model.train()
        loss = (output - targets - 1).square().mean()
        loss.backward() if ddp else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_an_evaluation_may_come_between_forward_and_backward_pass(world_pool: Any) -> None:
    assert world_pool(2).run(under, "ddp", with_targets, False) == [
        pytest.approx(one) for one in world_pool(2).run(under, "ddp", with_targets, True)
    ]


class Centered(nn.Module):
    """Computes with a buffer that its passes change."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("center", torch.zeros(4))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        moved = self.scale * (samples - self.center)
        self.center = 0.5 * self.center + 0.5 * samples.mean(0)
        return moved.square().mean()


def accumulate(ddp: bool, apart: bool) -> list[float]:
    """Losses of steps of three passes."""
    accelerator = Accelerator()
    model, optimizer = trained(Centered(), accelerator, ddp=ddp)
    losses = []
    for shares in DATA:
        for number, samples in enumerate(shares[accelerator.process_index].split(2)):
            no_sync = model.no_sync() if ddp else accelerator.no_sync(model)
            with no_sync if apart and number < 2 else contextlib.nullcontext():
                loss = model(samples) / 3
                loss.backward() if ddp else accelerator.backward(loss)
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("apart", [False, True])
def test_passes_of_a_step_begin_so_where_those_of_ddp_do(
    world_pool: Any, strategy: str, apart: bool
) -> None:
    found = world_pool(2).run(under, strategy, accumulate, False, apart)
    assert found == [
        pytest.approx(one) for one in world_pool(2).run(under, "ddp", accumulate, True, apart)
    ]


def draw_first(kind: str) -> list[float]:
    """Losses of steps before each of which the model computes without gradients."""
    model, wrapped = Centered(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "horovod":
        hvd.init()
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    elif kind == "face":
        adoption.note_aware()
        wrapped = DistributedDataParallel(model)
    elif kind == "torch":
        current.world()
        wrapped = nn.parallel.DistributedDataParallel(model)
    losses, rank = [], current.world().rank
    for shares in DATA:
        first, *others = shares[rank].split(2)
        with torch.no_grad():
            losses.append((wrapped or model)(first).item())
        for samples in others:
            if wrapped is not None:
                wrapped.require_backward_grad_sync = samples is others[-1]
            loss = (wrapped or model)(samples) / 2
            loss.backward()
            losses.append(loss.item())
        if kind == "alone":
            # Parameters are to be as Horovod has them.
            assert model.scale.grad is not None
            torch.distributed.all_reduce(model.scale.grad)
            model.scale.grad.div_(2)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(("face", "native"), [("face", "torch"), ("horovod", "alone")])
def test_passes_without_gradients_leave_what_they_leave_natively(
    world_pool: Any, strategy: str, face: str, native: str
) -> None:
    """Also before the first that a strategy makes, and between steps."""
    found = world_pool(2).run(plainly, strategy, draw_first, face)
    expected = world_pool(2).run(under, "ddp", draw_first, native)
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, tuple), one
        assert one[0] == pytest.approx(other)


def save_between(directory: str) -> list[list[float]]:
    """Each rank's own statistics, before what is stored of the model and after; and what is."""
    accelerator = Accelerator(
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)]
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(prepared(DATA[0, accelerator.process_index]).square().mean())
    optimizer.step()

    def mean() -> list[float]:
        return dict(prepared.named_buffers())["0.running_mean"].tolist()

    found = [mean()]
    accelerator.save_state(directory)
    found.append(mean())
    stored = accelerator.get_state_dict(prepared)
    # That is rank 0's to store.
    first = stored["0.running_mean"].tolist() if accelerator.is_main_process else []
    return [*found, mean(), first]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
def test_saving_leaves_each_rank_its_own(world_pool: Any, tmp_path: Path, strategy: str) -> None:
    found = world_pool(2).run(under, strategy, save_between, str(tmp_path / "saved"))
    for rank, (before, *after, stored) in enumerate(found):
        torch.testing.assert_close(before, by_hand(DATA[:1, rank]))
        assert after == [before, before]
        assert stored == ([] if rank else before)


def net(classes: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, classes))


def wrapper_of(kind: str) -> Any:
    """DDP by the face, or torch's."""
    if kind == "face":
        adoption.note_aware()
        return DistributedDataParallel
    current.world()
    return nn.parallel.DistributedDataParallel


def own(rank: int) -> Any:
    return DATA[:, rank] + rank


def statistics(*models: Any) -> list[float]:
    return [one.double().sum().item() for model in models for one in model.buffers()]


def two_at_once(kind: str) -> list[float]:
    """Two models whose wrappers have other options, the second of both kinds of settings."""
    wrap, rank = wrapper_of(kind), current.world().rank
    first = wrap(net(4), broadcast_buffers=True)
    second = wrap(net(), forward_sync_buffers=False)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (first, second)]
    found = []
    for samples in own(rank):
        output = first(samples)
        for model, given, optimizer in zip(
            (first, second), (samples, output.detach()), optimizers, strict=True
        ):
            loss = model(given).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return [*found, *statistics(first, second)]


def one_after_another(kind: str) -> list[float]:
    """A sweep over what buffers do."""
    wrap, rank, found = wrapper_of(kind), current.world().rank, []
    for broadcasts in (True, False, None):
        model = wrap(net(), broadcast_buffers=broadcasts)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for samples in own(rank):
            loss = model(samples).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        # It may be told otherwise later.
        model.forward_sync_buffers = not model.forward_sync_buffers
        model(own(rank)[0])
        found += statistics(model)
        del model, optimizer
    return found


def distil(kind: str) -> list[float]:
    """A frozen teacher, in both modes; a model that no optimizer has; and blocks of no_sync()."""
    wrap, rank, found = wrapper_of(kind), current.world().rank, []
    student, teacher, unused = wrap(net()), wrap(net()), wrap(net())
    teacher.requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for step, samples in enumerate(own(rank)):
        with student.no_sync():
            teacher(samples - 1)
            (student(samples - 1).square().mean() / 2).backward()
        with torch.no_grad():
            unused(samples)
        teacher(samples)
        unused(samples)
        # As a script may do by itself.
        teacher.module[1].running_mean.add_(rank)
        teacher.eval()
        target = teacher(samples)
        teacher.train()
        loss = (student(samples) - target).square().mean() / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), target.sum().item(), float(step), *statistics(teacher, unused)]
    return found


@pytest.mark.parametrize(
    ("act", "strategy"),
    [
        *itertools.product([two_at_once, one_after_another, distil], [None, "fsdp", "horovod"]),
        (one_after_another, "zero1"),
        (distil, "zero3"),
    ],
)
def test_buffers_are_as_the_wrapper_of_the_very_model_has_them(
    world_pool: Any, act: Any, strategy: str | None
) -> None:
    found = world_pool(2).run(plainly, strategy, act, "face")
    expected = world_pool(2).run(under, "ddp", act, "torch")
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, tuple), one
        assert one[0] == pytest.approx(other, rel=1e-4)


def test_the_runs_own_setting_is_of_all_models(world_pool: Any) -> None:
    """Which is that of a strategy, and not of a wrapper."""
    found = world_pool(2).run(plainly, "ddp:broadcast_buffers=false", keep_all, True)
    expected = world_pool(2).run(under, "ddp", keep_all, False)
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, tuple), one
        assert one[0] == pytest.approx(other)


def keep_all(face: bool) -> list[float]:
    wrap, rank = wrapper_of("face" if face else "torch"), current.world().rank
    options = {} if face else {"broadcast_buffers": False}
    model, teacher = wrap(net(), **options), wrap(net(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for samples in own(rank):
        model(samples).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        teacher(samples)
    return statistics(model, teacher)


def taught_by_accelerate(ddp: bool) -> list[float]:
    """A teacher that is frozen once Accelerate has it."""
    accelerator = Accelerator()
    teacher: Any = net()
    student, optimizer = trained(net(), accelerator, ddp=ddp)
    teacher = nn.parallel.DistributedDataParallel(teacher) if ddp else accelerator.prepare(teacher)
    teacher.requires_grad_(False)
    found = []
    for samples in own(accelerator.process_index):
        loss = (student(samples) - teacher(samples)).square().mean()
        loss.backward() if ddp else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), *statistics(teacher)]
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
def test_so_has_a_teacher_that_accelerate_has_wrapped(world_pool: Any, strategy: str) -> None:
    found = world_pool(2).run(under, strategy, taught_by_accelerate, False)
    expected = world_pool(2).run(under, "ddp", taught_by_accelerate, True)
    assert found == [pytest.approx(one, rel=1e-4) for one in expected]
