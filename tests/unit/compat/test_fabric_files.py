"""What Fabric's face writes and reads: checkpoints, logs, and the data of loaders."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Sampler

from unipar.compat.fabric import Fabric, launching
from unipar.compat.fabric.loggers import CSVLogger, TensorBoardLogger
from unipar.compat.fabric.utilities import is_shared_filesystem
from unipar.errors import ConfigError

pytestmark = pytest.mark.usefixtures("alone")
CPU: dict[str, Any] = {"accelerator": "cpu", "devices": 1}


@pytest.mark.parametrize(
    "call",
    [
        lambda url: Fabric(**CPU).save(url, {}),
        lambda url: Fabric(**CPU).load(url),
        CSVLogger,
        TensorBoardLogger,
    ],
)
def test_a_url_is_no_path(call: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\('s3://bucket/run'\) has no counterpart.* fsspec"):
        call("s3://bucket/run")
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_whole_leaves_the_one_before(tmp_path: Path) -> None:
    fabric, path = Fabric(**CPU), tmp_path / "last.ckpt"
    fabric.save(path, {"epoch": 1})
    with pytest.raises((AttributeError, pickle.PicklingError)):
        fabric.save(path, {"epoch": torch.ones(1000), "not": lambda: None})
    assert fabric.load(path) == {"epoch": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_filter_is_of_dictionaries_and_may_leave_nothing(tmp_path: Path) -> None:
    fabric = Fabric(**CPU)
    filters: Any = {"epoch": lambda *_: False, "model": lambda *_: False}
    fabric.save(tmp_path / "a.ckpt", {"epoch": 3, "model": nn.Linear(1, 1)}, filters)
    assert fabric.load(tmp_path / "a.ckpt") == {"epoch": 3}


def both_loggers() -> list[Any]:
    theirs = pytest.importorskip("lightning_fabric.loggers")
    return [CSVLogger, theirs.CSVLogger]


@pytest.mark.parametrize("number", [0, 1])
def test_lines_of_metrics_are_added_to_the_file(number: int, tmp_path: Path) -> None:
    make = both_loggers()[number]
    logger = make(tmp_path, flush_logs_every_n_steps=2)
    assert not list(tmp_path.iterdir())
    logger.log_metrics({"a": torch.tensor(1.0)})
    other = make(tmp_path)
    assert (logger.version, other.version) == (0, 1), "a run's directory is there at once"
    for metrics, step in (({"a": 2.0}, None), ({"b": 3.0}, None), ({"a": 4.0}, None), ({}, 18)):
        logger.log_metrics(metrics, step)
    file = Path(logger.log_dir, "metrics.csv")
    assert file.read_text() == "a,b,step\n1.0,,0\n2.0,,1\n,3.0,0\n4.0,,1\n"
    assert [one["step"] for one in logger.experiment.metrics] == [18]
    before = file.stat().st_ino
    logger.finalize("success")
    assert file.stat().st_ino == before, "written on, and not again"
    assert file.read_text().splitlines()[-1] == ",,18"
    again = make(tmp_path, version=0)
    with pytest.warns(UserWarning, match="earlier run|Previous log files"):
        again.log_metrics({"a": 1.0})
    assert not file.exists()


def test_a_board_finds_variables_and_can_be_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRATCH", str(tmp_path / "own"))
    board = TensorBoardLogger("$SCRATCH/logs", name="a")
    board.log_metrics({"a": 1.0})
    assert board.log_dir == f"{tmp_path}/own/logs/a/version_0"
    assert pickle.loads(pickle.dumps(board)).log_dir == board.log_dir
    assert [one.name for one in tmp_path.iterdir()] == ["own"]
    board.finalize("success")


def test_numbers_are_logged_wherever_they_are() -> None:
    told: list[Any] = []

    class Own:
        def log_metrics(self, metrics: Any, step: Any) -> None:
            told.append(metrics)

    fabric = Fabric(**CPU, loggers=Own())
    fabric.log_dict({"a": {"b": torch.ones((), requires_grad=True)}, "c": [torch.ones(1)]})
    assert repr(told) == "[{'a': {'b': 1.0}, 'c': [1.0]}]", "no tensors"


def test_workers_have_seeds_of_their_own_where_anything_true_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")
    for given, expected in ((None, "1"), (0, "0"), (False, "0"), (1, "1")):
        Fabric.seed_everything(1, workers=given, verbose=False)  # pyright: ignore
        assert os.environ["PL_SEED_WORKERS"] == expected


class Repeating(Sampler[list[int]]):
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        while True:
            yield from iter(self.sampler)


class Infinite(DataLoader[Any]):
    """It goes on over the data; as training scripts have it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Repeating(self.batch_sampler))
        self.iterator = super().__iter__()


class Begun(DataLoader[Any]):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batches = iter(self.batch_sampler or ())


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Infinite, "batches of a Repeating, which cannot be shared"),
        (Begun, r"iterator over all samples, batches, which it has made before\. Make it in"),
    ],
)
def test_loaders_that_cannot_be_made_again_are_refused(kind: Any, said: str) -> None:
    fabric = Fabric(strategy="ddp", **CPU)
    with pytest.raises(ConfigError, match=said):
        fabric.setup_dataloaders(kind(range(8), batch_size=2))
    fabric.setup_dataloaders(kind(range(8), batch_size=2), use_distributed_sampler=False)


def test_a_loader_that_was_gone_over_before_goes_over_its_share() -> None:
    loader = DataLoader(range(8), batch_size=2, num_workers=1, persistent_workers=True)  # pyright: ignore
    assert len(list(loader)) == 4
    shared = Fabric(strategy="ddp", **CPU).setup_dataloaders(loader)
    shared.sampler.num_replicas, shared.sampler.num_samples, shared.sampler.total_size = 2, 4, 8
    assert isinstance(shared.batch_sampler, BatchSampler)
    assert [batch.tolist() for batch in shared] == [[0, 2], [4, 6]]


def test_it_is_said_that_processes_import_modules_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("unipar.launchers.spawning.spawn", lambda *_, **__: "started")
    for strategy, told in (("ddp_spawn", False), ("ddp_fork", True), ("ddp_notebook", True)):
        caplog.clear()
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        assert fabric.launch(lambda fabric: None) == "started"
        assert ("import modules anew" in caplog.text) is told
    monkeypatch.setattr(launching, "is_interactive", lambda: True)
    Fabric(accelerator="cpu", devices=2).launch(lambda fabric: None)
    assert "import modules anew" in caplog.text


def test_one_process_sees_its_files() -> None:
    assert is_shared_filesystem()
    assert is_shared_filesystem(path="s3://bucket")
