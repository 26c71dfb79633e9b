"""Runs whose checkpoints are copied to where a URL leads, on one host and on several."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_run import build, data
from torch import nn

import unipar
from unipar import CheckpointError, ConfigError, RunResult, Session, checkpoint
from unipar.checkpoint import RemoteDirectory, remote
from unipar.config import CheckpointConfig
from unipar.data.batch import Batch, MicroBatch
from unipar.testing.pool import WorldPools
from unipar.train import resuming
from unipar.train.checkpointing import Saver
from unipar.world import Placement

Run = Callable[..., RunResult]


def test_a_run_goes_on_from_what_was_copied(run: Run, tmp_path: Path) -> None:
    """Under other ranks, on a machine that has none of the first one's files."""
    url = f"file://{tmp_path}/there"
    saves = {"directory": url, "every_steps": 2, "keep_last": 2}
    whole = run(steps=9)
    first = run(steps=6, checkpoint=saves, output_dir=tmp_path / "a")
    assert first.checkpoint == tmp_path / "a/checkpoints/step-00000006"
    assert [p.name for p in (tmp_path / "a/checkpoints").iterdir()] == ["step-00000006"]
    assert RemoteDirectory(url).steps() == [6, 4]
    with pytest.raises(
        ConfigError,
        match=r"there holds checkpoints of an earlier run \(the newest is step-00000006",
    ):
        run(checkpoint=saves, output_dir=tmp_path / "b")
    rest = run(
        steps=8,
        checkpoint=saves,
        resume="auto",
        output_dir=tmp_path / "b",
        strategy="ddp",
        devices=2,
    )
    assert [record.step for record in rest.history] == [7, 8]
    # Of another run's, which is left as it is.
    last = run(steps=9, resume=f"{url}/step-00000008", output_dir=tmp_path / "c")
    assert [record.step for record in last.history] == [9]
    assert not list((tmp_path / "c").glob("**/step-*"))
    assert RemoteDirectory(url).steps() == [8, 6]
    losses = first.losses + rest.losses + last.losses
    assert losses == pytest.approx(whole.losses, rel=1e-5)


class AwaitsCopies(unipar.Callback):
    """Goes on when the checkpoint of the step before has been copied: only the newest has to be."""

    def __init__(self, url: str) -> None:
        self.url = url

    def on_step_end(self, run: Any, record: Any) -> None:
        until = time.monotonic() + 60
        while record.step > 1 and record.step - 1 not in RemoteDirectory(self.url).steps():
            assert time.monotonic() < until
            time.sleep(0.01)


def test_the_best_is_kept_there_too_and_models_are_read_from_there(
    run: Run, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/there"
    saves: dict[str, Any] = {"directory": url, "every_steps": 1, "keep_last": 1, "async": False}
    saves["keep_best"] = {"metric": "loss", "mode": "max"}
    result = run(
        steps=3, checkpoint=saves, eval_data=data(), eval_every=1, callbacks=[AwaitsCopies(url)]
    )
    worst = max(result.evaluations, key=lambda pair: pair[1]["loss"])[0]
    assert worst == 1
    assert RemoteDirectory(url).steps() == [3, 1]
    model = unipar.load_model(url, build())
    local = unipar.load_model(tmp_path / "run" / "checkpoints", build())
    assert all(map(torch.equal, model.state_dict().values(), local.state_dict().values()))


def test_what_was_saved_and_not_copied_is_copied_by_the_next_run(run: Run, tmp_path: Path) -> None:
    saves = {"directory": f"file://{tmp_path}/there", "every_steps": 2}
    run(steps=4, checkpoint=saves)
    shutil.rmtree(tmp_path / "there" / "step-00000004")
    (tmp_path / "there/step-00000003/model").mkdir(parents=True)
    (tmp_path / "there/step-00000003/model/cut-off").touch()
    rest = run(steps=4, checkpoint=saves, resume="auto")
    assert not rest.history
    assert sorted(p.name for p in (tmp_path / "there").iterdir()) == [
        "step-00000002",
        "step-00000004",
    ]


def test_one_that_is_cut_short_there_is_passed_over(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves = {"directory": f"file://{tmp_path}/there", "every_steps": 2}
    run(steps=4, checkpoint=saves, output_dir=tmp_path / "a")
    next((tmp_path / "there/step-00000004/model/weights").iterdir()).write_bytes(b"short")
    rest = run(steps=5, checkpoint=saves, output_dir=tmp_path / "b", resume="auto")
    assert [record.step for record in rest.history] == [3, 4, 5]
    assert "Passing over step 4" in caplog.text
    assert "has 5 bytes; it should have" in caplog.text
    for path in (tmp_path / "there").glob("*/manifest.json"):
        path.write_bytes(b"short")
    with pytest.raises(
        CheckpointError, match=r"None of the 2 checkpoints in file://.* can be read"
    ):
        run(steps=9, checkpoint=saves, output_dir=tmp_path / "c", resume="auto")


def test_one_with_a_wrong_byte_there_is_passed_over_for_an_older_one(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves = {"directory": f"file://{tmp_path}/there", "every_steps": 2}
    run(steps=4, checkpoint=saves, output_dir=tmp_path / "a")
    file = next((tmp_path / "there/step-00000004/model/weights").iterdir())
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    rest = run(steps=5, checkpoint=saves, output_dir=tmp_path / "b", resume="auto")
    assert [record.step for record in rest.history] == [3, 4, 5]
    assert "Passing over step 4" in caplog.text
    assert "checksum" in caplog.text
    # What this run has saved is there in its place.
    checkpoint.verify(tmp_path / "there/step-00000004")


class Cut(unipar.Callback):
    """The store goes away in the middle of the run, and may come back."""

    def __init__(self, root: Path, back: int | None) -> None:
        self.root, self.back = root, back

    def on_step_end(self, run: Any, record: Any) -> None:
        if record.step == 3:
            shutil.rmtree(self.root, ignore_errors=True)
            self.root.touch()
        if record.step == self.back:
            self.root.unlink()


@pytest.mark.parametrize("back", [None, 5])
def test_a_run_outlives_its_store_and_says_at_its_end_what_is_missing(
    back: int | None, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PAUSE", 0.001)
    root = tmp_path / "there"
    saves = {"directory": f"file://{root}", "every_steps": 4}
    cut = Cut(root, back)
    if back is not None:
        run(steps=6, checkpoint=saves, callbacks=[cut])
        assert RemoteDirectory(f"file://{root}").steps()[0] == 6
        return
    with pytest.raises(CheckpointError, match="its newest checkpoint is not where it should") as e:
        run(steps=6, checkpoint=saves, callbacks=[cut])
    kept = tmp_path / "run/checkpoints/step-00000006"
    assert f"It is {kept}; resume='auto' copies it once more" in str(e.value)
    checkpoint.verify(kept)


def test_memory_of_processes_that_end_is_no_store(run: Run) -> None:
    saves = {"directory": "memory://gone"}
    with pytest.raises(ConfigError, match="memory of one process, and this run starts others"):
        run(checkpoint=saves, strategy="ddp", devices=2)
    assert run(checkpoint=saves).checkpoint
    assert RemoteDirectory("memory://gone").steps() == [6]


def test_a_store_that_cannot_be_written_is_known_before_the_run(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/there cannot be written to: .*\. Nothing was tr"):
        run(checkpoint=f"file://{tmp_path}/file/there")
    with pytest.raises(CheckpointError, match="holds no complete checkpoint, or does not exist"):
        run(resume=f"file://{tmp_path}/nothing")


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def on_two_hosts(placement: Placement, root: Path, strategy: str) -> list[Any]:
    """Each rank is a host with a disk of its own; one loses it, and both go on."""
    placement = dataclasses.replace(
        placement, node_rank=placement.rank, num_nodes=2, local_rank=0, local_size=1
    )
    disk = root / f"host{placement.rank}"
    saves = {"directory": f"file://{root}/there", "every_steps": 2, "keep_local": 1}
    config = CheckpointConfig.model_validate(saves)
    job: Any = SimpleNamespace(checkpoint_dir=disk, remote=config.remote, output_dir=root)

    def prepared(session: Session) -> Any:
        torch.manual_seed(0)
        return session.prepare(
            nn.Linear(256, 256), optimizer=lambda named: torch.optim.AdamW([p for _, p in named])
        )

    seen: list[Any] = []
    with Session(strategy, device="cpu", placement=placement) as session:
        engine = prepared(session)
        saver = Saver(disk, config, session)
        for step in range(1, 7):
            batch = Batch((MicroBatch(torch.ones(2, 256) * step, 2),), 4)
            engine.train_step(batch, loss_of)
            saver.collect()
            if saver.due(step, {}):
                saver.save(step, {}, {})
        saver.finish(6, {}, {})
        seen.append(saver.wait_for_copies())
        saver.close()
        seen.append(sorted(str(p.relative_to(disk)) for p in disk.rglob("*.safetensors")))
        before = [p.detach().clone() for p in engine.module.state_dict().values()]
        session.world.barrier()
        if placement.rank == 1:
            shutil.rmtree(disk)
        session.world.barrier()
        for value in engine.module.state_dict().values():
            value.zero_()
        manifest = resuming.load("auto", job, session.engines, session.world)
        seen.append(manifest.step if manifest else None)
        after = engine.module.state_dict().values()
        seen.append(all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    return seen


@pytest.mark.parametrize("strategy", ["ddp", "ddp:shard_optimizer=true"])
def test_hosts_without_a_shared_disk_copy_what_each_has_written(
    strategy: str, world_pool: WorldPools, tmp_path: Path
) -> None:
    results = world_pool(2).run(on_two_hosts, tmp_path, strategy)
    for rank, (missing, written, step, same) in enumerate(results):
        assert missing is None
        assert written
        assert all("step-00000006/" in name for name in written)
        assert all(f"rank-{rank:05d}" in name for name in written)
        assert (step, same) == (6, True)
    there = RemoteDirectory(f"file://{tmp_path}/there")
    newest, *older = there.steps()
    assert newest == 6
    # What comes in faster than it is copied is passed over; two are kept.
    assert older in ([], [2], [4])
    with checkpoint.fetched(there.url) as path:
        checkpoint.verify(path)
