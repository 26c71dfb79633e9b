"""A gradient that is not finite: found by the device, told a step late, and changing nothing."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.optim import lr_scheduler

import unipar
from unipar import Callback, NonFiniteLossError, Session, StepRecord
from unipar.data.batch import Batch, MicroBatch
from unipar.engine.kept_buffers import KeptBuffers, has_nan
from unipar.state import local_part
from unipar.testing.models import with_infinite_gradient
from unipar.testing.pool import WorldPools
from unipar.utils.host_copy import HostCopy
from unipar.world import Placement, join

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def squares(model: Any, data: tuple[torch.Tensor, bool]) -> torch.Tensor:
    x, sudden = data
    loss = model(x).square().mean()
    return with_infinite_gradient(loss) if sudden else loss


def batch(sudden: bool = False) -> Batch:
    return Batch((MicroBatch((X, sudden), 4),), 4)


def fused(kind: Callable[..., optim.Optimizer] = optim.AdamW, **options: Any) -> Any:
    return lambda named: kind([p for _, p in named], lr=0.1, fused=True, **options)


def one_cycle(optimizer: Any) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=20)


def in_sequence(optimizer: Any) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.5), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


TWO = {
    "first": {
        "target": fused(optim.SGD, momentum=0.9),
        "params": "0.*",
        "lr_scheduler": in_sequence,
    },
    "rest": {"target": fused(), "lr_scheduler": one_cycle},
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def prepare(session: Session, optimizer: Any = None, scheduler: Any = one_cycle) -> Any:
    scheduler = None if isinstance(optimizer, dict) else scheduler
    return session.prepare(
        model(), optimizer=optimizer or fused(), lr_scheduler=scheduler, max_grad_norm=1.0
    )


def state(engine: Any) -> Any:
    scheduler = engine.lr_scheduler.state_dict()
    return copy.deepcopy(
        [engine.module.state_dict(), engine.optimizer.state_dict(), scheduler, engine.num_steps]
    )


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


@pytest.fixture
def session() -> Iterator[Session]:
    with Session("single", device="cpu") as session:
        yield session


OPTIMIZERS = [fused(), fused(optim.SGD, momentum=0.9), fused(optim.Adagrad), TWO]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["adamw", "sgd", "adagrad", "two"])
@pytest.mark.parametrize("read", [True, False], ids=["read", "not read"])
def test_it_changes_nothing_and_is_told_a_step_late_at_most(
    session: Session, optimizer: Any, read: bool
) -> None:
    engine = prepare(session, optimizer, in_sequence)
    for _ in range(2):
        engine.train_step(batch(), squares)
    before = state(engine)
    result = engine.train_step(batch(sudden=True), squares)
    with pytest.raises(NonFiniteLossError, match="gradient norm of step 3 is not finite") as error:
        _ = result.loss if read else engine.train_step(batch(), squares)
    assert error.value.step == 3
    assert same(state(engine), before)
    # It is no result later, either.
    with pytest.raises(NonFiniteLossError):
        _ = result.num_items

    engine.train_step(batch(), squares)
    with Session("single", device="cpu") as other:
        never = prepare(other, optimizer, in_sequence)
        for _ in range(3):
            never.train_step(batch(), squares)
        assert same(state(engine), state(never))


@pytest.mark.parametrize(
    "look",
    [
        lambda engine: engine.check_last_step(),
        lambda engine: engine.export_state(),
        lambda engine: engine.eval_batch(batch(), squares),
    ],
    ids=["asked", "saved", "evaluated"],
)
def test_nothing_is_made_of_a_step_that_was_not_taken(session: Session, look: Any) -> None:
    engine = prepare(session)
    engine.train_step(batch(), squares)
    engine.train_step(batch(sudden=True), squares)
    with pytest.raises(NonFiniteLossError, match="step 2"):
        look(engine)
    look(engine)


def test_a_session_does_not_end_without_a_word_of_it() -> None:
    def train() -> None:
        with Session("single", device="cpu") as session:
            engine = prepare(session)
            engine.train_step(batch(), squares)
            engine.train_step(batch(sudden=True), squares)

    with pytest.raises(NonFiniteLossError, match="step 2"):
        train()


@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD])
def test_what_takes_no_flag_is_looked_at_before_it_steps(session: Session, kind: Any) -> None:
    engine = prepare(session, lambda named: kind([p for _, p in named], lr=0.1))
    before = state(engine)
    with pytest.raises(NonFiniteLossError, match="step 1"):
        engine.train_step(batch(sudden=True), squares)
    assert same(state(engine), before)


def test_what_follows_a_step_does_not_follow_one_that_is_not_taken(session: Session) -> None:
    taken: list[int] = []

    def build(named: Any) -> optim.Optimizer:
        optimizer = fused()(named)
        optimizer.register_step_post_hook(lambda *_: taken.append(1))
        return optimizer

    engine = prepare(session, build)
    engine.train_step(batch(), squares)
    with pytest.raises(NonFiniteLossError, match="step 2"):
        engine.train_step(batch(sudden=True), squares)
    assert taken == [1]


def test_a_first_step_is_looked_at_for_it_makes_the_optimizers_state(session: Session) -> None:
    engine = prepare(session, fused(optim.SGD, momentum=0.9))
    with pytest.raises(NonFiniteLossError, match="step 1"):
        engine.train_step(batch(sudden=True), squares)
    assert not engine.optimizer.state
    engine.train_step(batch(), squares)
    assert all(weight.isfinite().all() for weight in engine.module.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_that_is_to_be_skipped_moves_no_schedule(precision: Any) -> None:
    with Session("single", device="cpu", on_nan="skip", precision=precision) as session:
        engine = prepare(session)
        engine.train_step(batch(), squares)
        before = state(engine)
        result = engine.train_step(batch(sudden=True), squares)
        assert same(state(engine)[:3], before[:3])
        assert result.skipped
        assert not engine.train_step(batch(), squares).skipped


def test_a_loss_that_is_not_finite_lowers_the_scale() -> None:
    """As a plain loop's scaler does."""
    scaler, plain = torch.amp.GradScaler("cpu"), model()
    optimizer = optim.SGD(plain.parameters(), lr=0.1)
    scales, found = [], []
    with Session("single", device="cpu", on_nan="skip", precision="fp16") as session:
        engine: Any = session.prepare(model(), optimizer={"name": "sgd", "lr": 0.1})
        for factor in (1.0, math.inf, math.nan, 1.0):
            with torch.autocast("cpu", torch.float16):
                loss = plain(X).float().square().mean() * factor
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            engine.train_step(
                batch(), lambda m, data, f=factor: m(data[0]).float().square().mean() * f
            )
            found.append(engine.precision.current_scale.item())
    assert found == scales == [2.0**16, 2.0**15, 2.0**14, 2.0**14]


def test_a_step_that_is_skipped_leaves_statistics_too() -> None:
    with Session("single", device="cpu", on_nan="skip") as session:
        net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
        engine: Any = session.prepare(net, optimizer={"name": "sgd", "lr": 0.1})
        assert not engine.train_step(batch(), squares).skipped
        before = copy.deepcopy(net.state_dict())
        broken = Batch((MicroBatch((X * float("nan"), False), 4),), 4)
        assert engine.train_step(broken, squares).skipped
        assert all(map(torch.equal, net.state_dict().values(), before.values()))
        # In a loop that is the user's own the forward pass comes before the step begins.
        engine.backward(engine.model(X * float("nan")).square().mean(), num_items=4)
        assert engine.step().skipped
        assert net.state_dict()["0.running_mean"].isnan().all()


def test_a_run_that_has_left_out_all_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Its scale of losses always overflows, and never falls."""
    fixed = {"initial": 2.0**127, "growth_factor": 1, "backoff_factor": 1}
    for taken in (3, 52):
        with Session(
            "single", device="cpu", on_nan="skip", precision="fp16", loss_scale=fixed
        ) as session:
            engine = prepare(session)
            for _ in range(taken):
                assert engine.train_step(batch(), squares).skipped
    short, long = (record.getMessage() for record in caplog.records)
    assert short.startswith("all 3 steps were left out")
    assert long.startswith("50 steps in a row, up to step 50, were left out")
    assert "a loss_scale with factors of 1 never does" in long


def test_a_run_that_has_left_out_some_is_not(caplog: pytest.LogCaptureFixture) -> None:
    with Session("single", device="cpu", on_nan="skip") as session:
        engine = prepare(session)
        for broken in (True, False, True):
            assert engine.train_step(batch(sudden=broken), squares).skipped == broken
    assert not caplog.records


class Averaging(nn.Module):
    """A layer that keeps averages of its own, one of them large, and a mask that is not finite."""

    running: torch.Tensor
    large: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("running", torch.zeros(3))
        self.register_buffer("large", torch.zeros(2**15))
        self.register_buffer("mask", torch.full((2**15,), -math.inf))
        self.register_buffer("nothing", None)
        self.register_buffer("eighths", torch.zeros(2).to(torch.float8_e4m3fn))
        self.fills = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean(0)
        self.running = 0.9 * self.running + 0.1 * mean
        if self.fills:
            self.large.lerp_(mean[0].expand_as(self.large), 0.1)
        return self.layer(x)


def test_a_step_that_is_skipped_leaves_the_models_own_averages(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = Batch((MicroBatch((X * float("nan"), False), 4),), 4)
    with Session("single", device="cpu", on_nan="skip") as session:
        net, before = Averaging(), {}
        engine: Any = session.prepare(net, optimizer={"name": "sgd", "lr": 0.1})
        for _ in range(3):
            assert not engine.train_step(batch(), squares).skipped
            before = copy.deepcopy(net.state_dict())
            assert engine.train_step(broken, squares).skipped
            assert all(map(torch.equal, net.state_dict().values(), before.values()))
        assert before["running"].any()
        assert before["large"].any()
        assert not caplog.records


def test_what_is_large_is_copied_where_the_first_step_has_changed_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = Averaging()
    kept = KeptBuffers(net)
    net.fills = False
    kept.keep()
    net(X)
    kept.take()
    before = net.running.clone()
    net.fills = True
    kept.keep()
    net(X * math.nan)
    kept.put_back()
    assert "NaN in buffers that the first step had not changed" in caplog.text
    assert caplog.text.rstrip().endswith("not copied: large. Load them from a checkpoint.")
    assert torch.equal(net.running, before)


class Strange(nn.Module):
    """Buffers that are not plain, of which the last two are changed by those who hold them."""

    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            made = torch.ones(3)
        nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.strided)
        for name, one in {
            "expanded": torch.zeros(1).expand(2**15),
            "sparse": torch.eye(3).to_sparse(),
            "rows": torch.eye(3).to_sparse_csr(),
            "inferred": made,
            "meta": torch.empty(3, device="meta"),
            "nested": nested,
            "gone": torch.zeros(3),
            "packed": torch.zeros(2**16, dtype=torch.uint8),
            "late": None,
        }.items():
            self.register_buffer(name, one)
        shared = torch.zeros(3)
        self.register_buffer("one", shared)
        self.register_buffer("other", shared)
        self.wide = nn.BatchNorm1d(20_000)
        self.teacher = nn.BatchNorm1d(3).eval()

    def forward(self, x: torch.Tensor) -> None:
        if hasattr(self, "gone"):
            del self.gone
        self.late = torch.zeros(3) if self.late is None else self.late.lerp(x.mean(0), 0.5)
        self.other = self.other + x.mean()
        assert self.teacher.running_mean is not None
        self.teacher.running_mean.lerp_(x.mean(0), 0.5)
        self.wide(x[:, :1].expand(-1, 20_000))


def test_buffers_of_any_kind_are_put_back_or_left_alone() -> None:
    net, before = Strange(), {}
    kept = KeptBuffers(net)
    for _ in range(3):
        kept.keep()
        net(X)
        kept.take()
        before = {
            name: one.clone() for name, one in net.named_buffers(remove_duplicate=False)
            if name in ("late", "one", "other") or name.startswith(("wide.", "teacher."))
        }  # fmt: skip
        kept.keep()
        net(X * math.nan)
        kept.put_back()
        now = dict(net.named_buffers(remove_duplicate=False))
        assert all(torch.equal(now[name], one) for name, one in before.items())
    assert len(before) == 9
    assert before["late"].any()
    assert not any(has_nan(one) for one in net.buffers())


def put_back(placement: Placement) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (join(placement).size,))
    net = Averaging()
    net.running = distribute_tensor(net.running, mesh, [Replicate()])
    kept = KeptBuffers(net)
    kept.keep()
    for buffer in (net.running, net.large):
        buffer.add_(1)
    kept.put_back()
    return [local_part(net.running), net.large]


def test_buffers_that_are_divided_are_put_back(world_pool: WorldPools) -> None:
    (found,) = world_pool(1).run(put_back)
    assert not any(one.any() for one in found)


def test_an_error_names_buffers_that_have_taken_the_batch_in(session: Session) -> None:
    engine: Any = session.prepare(Averaging(), optimizer={"name": "sgd", "lr": 0.1})
    broken = Batch((MicroBatch((X * float("nan"), False), 4),), 4)
    with pytest.raises(NonFiniteLossError, match=r"NaN in buffers of the model \(running, large\)"):
        engine.train_step(broken, squares)


def test_a_result_is_plain_values_to_others(session: Session) -> None:
    engine = prepare(session)
    engine.train_step(batch(), squares)
    result = engine.train_step(batch(), squares)
    sent = pickle.loads(pickle.dumps(result))
    assert sent == result
    assert hash(sent) == hash(result)
    assert repr(sent) == repr(result)
    assert f"loss={result.loss}, num_items=4.0, grad_norm={result.grad_norm}" in repr(result)


# -- a run that does not wait --------------------------------------------------------------------


class Steps(Callback):
    """Which step each record came after; and whether it can wait for the next one."""

    def __init__(self, lags: bool) -> None:
        self.lags, self.seen = lags, []

    def on_step_end(self, run: unipar.RunInfo, record: StepRecord) -> None:
        assert run.engine is not None
        self.seen.append((record.step, run.engine.num_steps))


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator: what was not read has not come yet."""
    unread = property(lambda copy: copy._values is not None)
    monkeypatch.setattr(HostCopy, "waits", unread)


def run(
    tmp_path: Any, steps: Steps, sudden: int | None = None, optimizer: Any = None, **settings: Any
) -> Any:
    samples = [(X[i % 4], torch.tensor(i // 4 == sudden)) for i in range(24)]

    def loss(model: Any, data: Any) -> torch.Tensor:
        return squares(model, (data[0], bool(data[1].any())))

    settings = {"checkpoint": {"directory": str(tmp_path / "kept"), "every_steps": 2}, **settings}
    return unipar.fit(
        model(), samples, loss=loss, optimizer=optimizer or fused(), max_grad_norm=1.0,
        strategy="single", devices=1, device="cpu", global_batch_size=4, epochs=1, shuffle=False,
        callbacks=[steps], output_dir=tmp_path / "run", progress=False, **settings,
    )  # fmt: skip


@pytest.mark.usefixtures("late")
def test_records_wait_for_the_next_step_only_where_nothing_else_needs_them(tmp_path: Any) -> None:
    lagging, at_once = Steps(True), Steps(False)
    first = run(tmp_path, lagging)
    # Steps 1, which makes the optimizer's state, 2, 4 and 6, which are saved, are known at once.
    assert lagging.seen == [(1, 1), (2, 2), (3, 4), (4, 4), (5, 6), (6, 6)]
    second = run(tmp_path, at_once, checkpoint=False)
    assert at_once.seen == [(step, step) for step in range(1, 7)]
    assert first.losses == second.losses
    assert [r.grad_norm for r in first.history] == [r.grad_norm for r in second.history]


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("lags", [True, False])
@pytest.mark.parametrize("bad", [2, 3])
def test_a_run_stops_before_anything_is_made_of_it(tmp_path: Any, lags: bool, bad: int) -> None:
    steps = Steps(lags)
    with pytest.raises(NonFiniteLossError, match=f"step {bad + 1} ") as error:
        run(tmp_path, steps, sudden=bad)
    assert error.value.step == bad + 1
    assert [step for step, _ in steps.seen] == list(range(1, bad + 1))
    assert [path.name for path in (tmp_path / "kept").iterdir() if path.name[0] == "s"] == [
        "step-00000002"
    ]


@pytest.mark.usefixtures("late")
def test_a_rate_that_is_a_tensor_is_recorded_as_the_step_had_it(tmp_path: Any) -> None:
    def build(named: Any) -> optim.Optimizer:
        return optim.AdamW([p for _, p in named], lr=torch.tensor(0.1), fused=True)

    halving = {"name": "exponentiallr", "gamma": 0.5}
    found = run(tmp_path, Steps(True), optimizer=build, lr_scheduler=halving, checkpoint=False)
    rates = [record.lr for record in found.history]
    assert rates == pytest.approx([0.1 / 2**step for step in range(6)])
