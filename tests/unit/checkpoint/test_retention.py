"""Which checkpoints stay."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from unipar.checkpoint import Retention, checkpoints, save
from unipar.errors import ConfigError
from unipar.world import World


@pytest.fixture
def directory(tmp_path: Path, make_engine: Callable[..., Any], alone: World) -> Path:
    engine = {"m": make_engine({"w": torch.ones(1)})}
    for step, loss, accuracy in ((1, 0.5, 0.1), (2, 0.2, 0.9), (3, 0.2, 0.3), (4, float("nan"), 0)):
        save(tmp_path, engine, alone, step=step, metrics={"loss": loss, "accuracy": accuracy})
    save(tmp_path, engine, alone, step=5)
    return tmp_path


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (Retention(), [1, 2, 3, 4, 5]),
        (Retention(keep_last=9), [1, 2, 3, 4, 5]),
        (Retention(keep_last=2), [4, 5]),
        (Retention(keep_last=1, keep_best=("loss", "min")), [3, 5]),
        (Retention(keep_last=1, keep_best=("loss", "max")), [1, 5]),
        (Retention(keep_last=1, keep_best=("other", "max")), [5]),
        (Retention(keep_last=1, keep_best=[("loss", "min"), ("accuracy", "max")]), [2, 3, 5]),
    ],
)
def test_the_newest_and_the_best_stay(directory: Path, policy: Retention, kept: list[int]) -> None:
    removed = policy.apply(directory)
    assert [path.name for path in checkpoints(directory)] == [f"step-{s:08d}" for s in kept]
    assert len(removed) == 5 - len(kept)
    assert len(list(directory.iterdir())) == len(kept)


def test_what_the_run_has_passed_over_does_not_count(directory: Path) -> None:
    Retention(keep_last=1).apply(directory, newest=3)
    assert [path.name for path in checkpoints(directory)] == [f"step-{s:08d}" for s in (3, 4, 5)]


def test_what_is_not_a_whole_checkpoint_is_let_be(directory: Path) -> None:
    (directory / "step-00000005/manifest.json").unlink()
    (directory / "notes").mkdir()
    Retention(keep_last=1).apply(directory)
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["notes", "step-00000004", "step-00000005"]


def test_what_is_known_is_not_read_again(
    directory: Path, make_engine: Callable[..., Any], alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training waits for the interpreter while the thread that has saved decodes manifests."""
    policy = Retention(keep_last=4, keep_best=("loss", "min"))
    policy.apply(directory)
    decoded: list[object] = []

    def counted(own: Callable[..., Any], *args: Any) -> Any:
        decoded.append(args[0])
        return own(*args)

    for module, name in (("utils.listing", "_About"), ("checkpoint.decode", "_manifest")):
        found = importlib.import_module(f"unipar.{module}")
        monkeypatch.setattr(found, name, functools.partial(counted, getattr(found, name)))
    policy.apply(directory)
    assert not decoded
    # One that is put in the place of another is another.
    engine = {"m": make_engine({"w": torch.ones(1)})}
    save(directory, engine, alone, step=4, metrics={"loss": 0.1})
    policy.apply(directory)
    assert len(decoded) == 1
    Retention(keep_last=1, keep_best=("loss", "min")).apply(directory)
    assert [path.name for path in checkpoints(directory)] == ["step-00000004", "step-00000005"]


def test_a_policy_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="keep_last=0 would keep no checkpoint"):
        Retention(keep_last=0)
    with pytest.raises(ConfigError, match=r"mode 'lowest'\. Give 'min' or 'max'"):
        Retention(keep_best=("loss", "lowest"))  # pyright: ignore[reportArgumentType]
