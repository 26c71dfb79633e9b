"""What only a GPU can show; run with ``pytest -m gpu`` where there is one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from plain import BATCH, batches, build, loss_fn
from torch import nn

from unipar import Session, checkpoint
from unipar.benchmark.bubble import PassTimes
from unipar.data import move_to
from unipar.data.batch import Batch, MicroBatch
from unipar.optimizers.named import NamedOptimizer
from unipar.strategy import EngineSpec, Precision, registry
from unipar.world import Placement, joined

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none"),
]

STRATEGIES = ["single", "dp", "ddp", "fsdp", "fsdp:cpu_offload=true"]


def reference(dtype: torch.dtype, change: Callable[[Any], None] | None = None) -> list[float]:
    """The plain loop on the GPU; nothing of unipar in it."""
    model = build().cuda()
    if change is not None:
        change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for inputs, targets in batches():
        with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
            loss = nn.functional.cross_entropy(model(inputs.cuda()), targets.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def prepared(
    strategy: str,
    precision: Precision = "fp32",
    *,
    compile: bool = False,
    max_grad_norm: float | None = None,
    **adamw: Any,
) -> tuple[Any, Any]:
    found = registry.resolve(strategy)
    world = found.setup(Placement(device_type="cuda"))
    spec = EngineSpec(
        build(),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2, **adamw),
        precision=precision,
        compile=compile,
        max_grad_norm=max_grad_norm,
    )
    return found.prepare(spec, world), world


def train(engine: Any) -> list[float]:
    return [
        engine.train_step(Batch((MicroBatch(pair, BATCH),), BATCH), loss_fn).loss
        for pair in batches()
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fp32_equals_the_plain_loop(strategy: str) -> None:
    engine, world = prepared(strategy)
    losses = train(engine)
    world.leave()
    assert losses == pytest.approx(reference(torch.float32), rel=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_stays_as_near_as_autocast(strategy: str, precision: Precision) -> None:
    engine, world = prepared(strategy, precision)
    losses = torch.tensor(train(engine))
    world.leave()
    exact = torch.tensor(reference(torch.float32))
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    allowed = 4 * ((torch.tensor(reference(dtype)) - exact) / exact).abs().max()
    assert ((losses - exact) / exact).abs().max() <= allowed


def test_offloaded_gradients_are_divided_by_the_scale_however_busy_the_device_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unscale = torch.amp.GradScaler.unscale_

    def late(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        torch.cuda._sleep(100_000_000)
        unscale(scaler, optimizer)

    losses: list[list[float]] = []
    for busy in (False, True):
        if busy:
            monkeypatch.setattr(torch.amp.GradScaler, "unscale_", late)
        engine, world = prepared("fsdp:cpu_offload=true", "fp16", max_grad_norm=0.1)
        losses.append(train(engine))
        world.leave()
    assert losses[0] == losses[1]


def test_what_is_moved_to_the_host_is_there_at_once() -> None:
    for size in (1, 1000, 1_000_000):
        values = torch.zeros(size, device="cuda")
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)
        values.add_(1)
        assert move_to({"a": [values]}, torch.device("cpu"))["a"][0].eq(1).all()


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="needs a compute capability of 8.9",
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_fp8_stays_as_near_as_torchaos_own_loop(strategy: str, compiled: bool) -> None:
    engine, world = prepared(strategy, "fp8", compile=compiled)
    losses = torch.tensor(train(engine))
    world.leave()
    exact, rounded = (torch.tensor(reference(torch.float32)), torch.tensor(float8_reference()))
    assert ((losses - exact) / exact).abs().max() <= 4 * ((rounded - exact) / exact).abs().max()
    assert not torch.equal(losses, torch.tensor(reference(torch.bfloat16)))


def float8_reference() -> list[float]:
    """The plain loop with torchao; its 8 rows a batch are padded to 16."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def convert(model: nn.Module) -> None:
        convert_to_float8_training(
            model,
            module_filter_fn=lambda module, name: name.startswith("blocks."),
            config=Float8LinearConfig(pad_inner_dim=True),
        )

    return reference(torch.bfloat16, convert)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_fused_optimizer_state_survives_a_checkpoint(strategy: str, tmp_path: Path) -> None:
    engine, world = prepared(strategy, fused=True)
    train(engine)
    path = checkpoint.save(tmp_path, {"model": engine}, world, step=len(batches()))
    on = train(engine)
    world.leave()
    again, world = prepared("single", fused=True)
    checkpoint.load(path, {"model": again}, world)
    assert train(again) == pytest.approx(on, rel=1e-5)
    world.leave()


@pytest.mark.parametrize(("strategy", "sgd"), [("single", True), ("ddp", True), ("fsdp", None)])
def test_optimizers_by_name_are_fused(strategy: str, sgd: bool | None) -> None:
    for name, expected in (("adamw", True), ("sgd", sgd)):
        found = registry.resolve(strategy)
        world = found.setup(Placement(device_type="cuda"))
        spec = EngineSpec(build(), optimizer=NamedOptimizer(name, {"lr": 1e-2}))
        engine: Any = found.prepare(spec, world)
        losses = train(engine)
        world.leave()
        assert [group["fused"] for group in engine.optimizer.param_groups] == [expected]
        if name == "adamw":
            assert losses == pytest.approx(reference(torch.float32), rel=1e-5)


def test_offloaded_shards_are_never_on_the_gpu() -> None:
    found = registry.resolve("fsdp:cpu_offload=true")
    world = found.setup(Placement(device_type="cuda"))
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)])
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found.prepare(EngineSpec(model, optimizer=NamedOptimizer("adamw")), world)
    world.leave()
    assert torch.cuda.max_memory_allocated() - before < 1024 * 1024 * 4


def test_the_group_is_bound_to_the_gpu() -> None:
    with joined(Placement(device_type="cuda")):
        assert dist.group.WORLD is not None
        assert dist.group.WORLD.bound_device_id == torch.device("cuda", 0)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_no_step_waits_for_the_device_but_for_its_loss(strategy: str) -> None:
    """By torch's own watch over waits, which does not count the event that the loss is read by."""
    engine, world = prepared(strategy, "bf16", fused=True, max_grad_norm=1.0)
    steps = [Batch((MicroBatch(pair, BATCH),), BATCH) for pair in batches()]
    # Under fsdp, changes of weights are looked for in passes 1, 2, 4, 8, 16, 32 and so on, and a
    # look waits: in none of those that follow here.
    for step in [*steps, *steps]:
        engine.train_step(step, loss_fn)
    pinned = [(inputs.pin_memory(), targets.pin_memory()) for inputs, targets in batches()]
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [
            engine.train_step(Batch((MicroBatch(pair, BATCH),), BATCH), loss_fn) for pair in pinned
        ]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(result.loss == result.loss and result.grad_norm for result in results)
    world.leave()


class Scheduled:
    """Half of its work is in a pass."""

    clock: Any = None

    def run(self) -> None:
        factor = torch.randn(4096, 4096, device="cuda")
        with self.clock.batch(None):
            for surrounding in (self.clock.computing(), contextlib.nullcontext()):
                with surrounding:
                    for _ in range(50):
                        torch.mm(factor, factor)


def test_passes_are_timed_on_the_device_without_waiting_for_it() -> None:
    schedule = Scheduled()
    times = PassTimes(schedule, "cuda", 0)
    # The first product makes what the library needs, and waits.
    with times:
        schedule.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with times:
            schedule.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = times.read()
    assert found is not None
    assert 0.35 < found.computing[1] / found.whole[1] < 0.65


def test_a_run_tries_its_strategy_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    records = []
    for _ in range(2):
        with Session("ddp"):
            pass
        (file,) = tmp_path.glob("unipar/self-tests/*.json")
        records.append(json.loads(file.read_text()))
    assert records[0]["outcome"]["verdict"] == "agrees"
    assert records[0]["key"]["hardware"]
    # The second run has read what the first one left.
    assert records[0] == records[1]
