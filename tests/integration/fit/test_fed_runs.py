"""A run whose micro-batches are copied one ahead is the same run; here without a GPU's streams."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from small_run import STEPS, Watched, accuracy, build, data
from torch.utils.data import Dataset

from unipar import Callback, RunResult
from unipar.checkpoint import read_manifest
from unipar.data import move_to
from unipar.data.feed import Copy
from unipar.errors import DataError

Run = Callable[..., RunResult]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Copies made ahead; on the device they have the memory of the host's."""
    begun: list[int] = []

    def begin(data: Any) -> Callable[[], Any]:
        begun.append(1)
        return lambda: move_to(data, torch.device("cpu"))

    for module in ("unipar.data.loader", "unipar.session"):
        monkeypatch.setattr(f"{module}.copies_to", lambda device: begin)
    return begun


class Noisy(Dataset):
    """Draws from the generator that dropout draws from."""

    def __init__(self) -> None:
        self.samples = data()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        x, y = self.samples[index]
        return x + 0.1 * torch.randn(4), y


CASES: dict[str, dict[str, Any]] = {
    "tensors": {},
    "micro-batches": {"micro_batch_size": 3},
    "workers": {"samples": Watched(-1, lambda: None), "num_workers": 2},
    "random samples": {"samples": Noisy()},
}


@pytest.mark.parametrize("case", CASES)
def test_losses_metrics_and_checkpoints_are_those_of_a_run_without(
    case: str, run: Run, tmp_path: Path, copies: list[int], monkeypatch: pytest.MonkeyPatch
):
    def go(where: str, **changes: Any) -> RunResult:
        settings: dict[str, Any] = {
            "eval_data": data(12),
            "metrics": {"accuracy": accuracy},
            "checkpoint": {"every_steps": 1, "keep_last": None},
            "output_dir": tmp_path / where,
            **CASES[case],
            **changes,
        }
        return run(build(0.4), settings.pop("samples", None), **settings)

    def saved(where: str) -> list[Any]:
        paths = sorted((tmp_path / where).glob("*/step-*"))
        generators = [json.loads((path / "rng" / "rank-00000.json").read_text()) for path in paths]
        places = [read_manifest(path).progress["loader"] for path in paths]
        # Torch's, by which samples and dropout are drawn; the run seeds no other.
        drawn = [xxhash.xxh3_64_hexdigest(one["torch"].encode()) for one in generators]
        return list(zip(places, drawn, strict=True))

    feeding = go("feeding")
    first = go("two", steps=STEPS - 1)
    rest = go("two", resume="auto")
    assert copies
    monkeypatch.undo()
    plain = go("plain")
    assert feeding.losses == plain.losses == first.losses + rest.losses
    assert feeding.evaluations == plain.evaluations
    # The loader's place, and where the random generators are, at each step.
    assert saved("feeding") == saved("plain") == saved("two")
    assert len(saved("plain")) == STEPS


def test_a_broken_sample_ends_the_run_at_the_step_that_needs_it(
    run: Run, tmp_path: Path, copies: list[int]
):
    def tear() -> None:
        raise ValueError("torn")

    steps: list[int] = []

    def watch(run: Any, record: Any) -> None:
        steps.append(record.step)

    watching = Callback()
    watching.on_step_end = watch  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(DataError, match="sample 17 of Watched raised ValueError: torn"):
        run(
            None,
            Watched(17, tear),
            num_workers=1,
            shuffle=False,
            callbacks=[watching],
            checkpoint={"every_steps": 1},
        )
    # Sample 17 is of the third batch, which was read before the second step.
    assert steps == [1, 2]
    newest = sorted((tmp_path / "run").glob("*/step-*"))[-1]
    assert read_manifest(newest).progress["loader"]["index"] == 2


def test_a_run_reads_nothing_beyond_its_last_step(run: Run, copies: list[int]):
    run(steps=2, shuffle=False)
    assert len(copies) == 2


def test_copies_are_what_a_step_computes_with(run: Run, copies: list[int], monkeypatch: Any):
    taken: list[int] = []
    take = Copy.take
    monkeypatch.setattr(Copy, "take", lambda self, data: (taken.append(1), take(self, data))[1])
    run(steps=3, micro_batch_size=4, eval_data=data(8), metrics={"accuracy": accuracy})
    # Two micro-batches a step, and an evaluation of two batches.
    assert len(taken) == len(copies) == 8
