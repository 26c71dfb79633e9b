"""What only a GPU can show of micro-batches that are copied ahead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import STEPS, Watched, accuracy, build, data, loss_fn, reference
from torch import nn

from unipar import LossSum, Objective, RunResult, Session
from unipar.data import Loader, on_device
from unipar.data.samples import Collate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none"),
]

Run = Callable[..., RunResult]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("case", [{}, {"micro_batch_size": 3}, {"num_workers": 2}], ids=str)
def test_a_run_on_a_gpu_is_the_plain_loop(run: Run, case: dict[str, Any]):
    samples = Watched(-1, lambda: None) if "num_workers" in case else data()
    metrics = {"accuracy": accuracy}
    result = run(None, samples, device="cuda", eval_data=data(12), metrics=metrics, **case)
    assert result.losses == pytest.approx(reference()[0], rel=1e-4)


def test_what_is_computed_with_is_what_was_loaded(device: torch.device):
    """Large batches beside slow kernels, in memory that is used again and again."""
    count, size = 64, 2**20
    samples = torch.arange(count, dtype=torch.float32)[:, None].expand(count, size).contiguous()
    loader = Loader(samples, global_batch_size=2, micro_batch_size=1, shuffle=False)
    sums: list[torch.Tensor] = []
    for batch in loader.feed(device):
        for part in batch:
            given = on_device(part, device)
            assert given.device == device
            torch.cuda._sleep(2_000_000)
            sums += [given.min(), given.max()]
            del given
    found = torch.stack(sums).view(count, 2).tolist()
    assert found == [[i, i] for i in range(count)]


def test_a_copy_does_not_wait_for_what_is_computed(device: torch.device):
    """The second micro-batch is on the device while kernels of the first one's still run."""
    samples = torch.ones(2, 2**20)
    loader = Loader(
        samples, global_batch_size=2, micro_batch_size=1, shuffle=False, pin_memory=True
    )
    batch = next(iter(loader.feed(device)))
    first, second = batch.microbatches
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)
    on_device(first, device)
    slow = torch.cuda.Event()
    slow.record()
    with torch.cuda.stream(torch.cuda.Stream(device)):
        assert float(on_device(second, device).sum()) == 2**20
    assert not slow.query()
    torch.cuda.synchronize()


def test_batches_are_pinned_whatever_they_are_made_of(device: torch.device):
    def collate(samples: list[Any]) -> Any:
        return {"x": (torch.stack(samples), "a")}

    for num_workers in (0, 1):
        loader = Loader(
            [torch.ones(3)] * 4,
            global_batch_size=2,
            collate_fn=collate,
            pin_memory=True,
            num_workers=num_workers,
        )
        x, name = next(iter(loader)).microbatches[0].data["x"]
        assert (x.is_pinned(), name) == (True, "a")
    assert isinstance(Collate(collate)([torch.ones(3)]).data["x"], tuple)


def test_evaluation_waits_for_the_device_once(device: torch.device):
    """Torch raises where the host waits; what is read at the end is let be."""
    inputs, targets = torch.randn(32, 4), torch.randint(3, (32,))

    def margin(predictions: torch.Tensor, labels: torch.Tensor) -> LossSum:
        return LossSum(predictions.gather(1, labels[:, None]).sum(), len(labels))

    objective = Objective(
        lambda batch: batch[0], lambda output, batch: nn.functional.cross_entropy(output, batch[1])
    )
    with Session("single", device="cuda") as session:
        engine = session.prepare(build())
        loader = session.loader((inputs, targets), global_batch_size=8, shuffle=False)
        batches = list(loader)
        wanted = session.evaluate(engine, batches, loss_fn, metrics={"margin": margin})

        def watched() -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                yield from batches
            finally:
                torch.cuda.set_sync_debug_mode("default")

        found = session.evaluate(engine, watched(), objective, metrics={"margin": margin})
    assert found == pytest.approx(wanted, rel=1e-6)


def test_a_resumed_run_on_a_gpu_goes_on(run: Run, tmp_path: Path):
    settings: dict[str, Any] = {"device": "cuda", "checkpoint": {"every_steps": 1}}
    whole = run(build(0.4), output_dir=tmp_path / "whole", **settings)
    first = run(build(0.4), steps=STEPS - 2, **settings)
    rest = run(build(0.4), resume="auto", **settings)
    assert first.losses + rest.losses == pytest.approx(whole.losses, rel=1e-5)
