"""Directories of checkpoints behind URLs: whole or not there, and what is said when they fail."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from unipar.checkpoint import (
    Disks,
    RemoteDirectory,
    Uploads,
    everything,
    fetched,
    find,
    located,
    remote,
    save,
    verify,
)
from unipar.errors import CheckpointError, ConfigError
from unipar.world import World

Save = Callable[[int], Path]
ALONE = Disks((0,), (0,))


@pytest.fixture
def saved(tmp_path: Path, make_engine: Callable[..., Any], alone: World) -> Save:
    """Saves a step locally."""

    def call(step: int) -> Path:
        weights = {"w": torch.full((300,), float(step))}
        return save(tmp_path / "local", {"m": make_engine(weights)}, alone, step=step)

    return call


@pytest.fixture(params=["memory", "file"])
def there(request: pytest.FixtureRequest, tmp_path: Path) -> RemoteDirectory:
    root = tmp_path / "there" if request.param == "file" else Path("/", tmp_path.name)
    return RemoteDirectory(f"{request.param}://{root}/run/")


def names(path: Path) -> list[str]:
    return [str(one.relative_to(path)) for one in path.rglob("*") if one.is_file()]


def put(there: RemoteDirectory, path: Path, *, sealed: bool = True) -> None:
    there.put(path, [name for name in names(path) if name != "manifest.json"])
    if sealed:
        there.put(path, ["manifest.json"])


def test_a_checkpoint_comes_back_as_it_was(
    there: RemoteDirectory, saved: Save, tmp_path: Path
) -> None:
    there.check()
    assert there.steps() == []
    for step in (3, 12):
        put(there, saved(step))
    assert there.steps() == [12, 3]
    with fetched(there.url) as newest, fetched(f"{there.url}/step-00000003") as named:
        assert (newest.name, named.name) == ("step-00000012", "step-00000003")
        verify(newest)
    back = there.fetch(3, tmp_path / "back", everything)
    assert find(tmp_path / "back") == back
    assert {name: (back / name).read_bytes() for name in names(back)} == {
        name: (tmp_path / "local" / back.name / name).read_bytes() for name in names(back)
    }


def test_what_lacks_its_manifest_is_not_there_and_is_cleared(
    there: RemoteDirectory, saved: Save
) -> None:
    put(there, saved(1))
    put(there, saved(2), sealed=False)
    assert there.steps() == [1]
    assert located(there.url)[1] == 1
    with pytest.raises(CheckpointError, match=r"step-00000002 is no complete checkpoint"):
        located(f"{there.url}/step-00000002")
    there.clear()
    assert list(there._found()) == [1]
    there.remove(1)
    with pytest.raises(CheckpointError, match="holds no complete checkpoint, or does not exist"):
        located(there.url)


def test_only_what_is_missing_is_copied(
    there: RemoteDirectory, saved: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(4)
    put(there, path)
    back = there.fetch(4, tmp_path / "back", everything)
    lost = next(back.rglob("*.safetensors"))
    lost.unlink()
    asked: list[str] = []
    get = there._fs.get_file
    monkeypatch.setattr(
        there._fs, "get_file", lambda name, *rest: (asked.append(name), get(name, *rest))
    )
    there.fetch(4, tmp_path / "back", everything)
    assert [Path(name).name for name in asked] == ["manifest.json", lost.name]
    verify(back)
    # One of the same step that is another takes the place of this one.
    other = shutil.copytree(saved(5), tmp_path / "other" / "step-00000004")
    put(there, other)
    there.fetch(4, tmp_path / "back", everything)
    assert (back / "manifest.json").read_bytes() == (other / "manifest.json").read_bytes()


def test_a_save_by_hand_to_a_url_is_refused(make_engine: Callable[..., Any], alone: World) -> None:
    with pytest.raises(ConfigError, match="written to a local directory, and s3://a/b is a URL"):
        save("s3://a/b", {"m": make_engine({"w": torch.ones(1)})}, alone, step=1)


def test_what_cannot_be_reached_is_explained(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nosuch://a cannot be used: .*nosuch"):
        RemoteDirectory("nosuch://a")
    (tmp_path / "file").touch()
    blocked = RemoteDirectory(f"file://{tmp_path}/file/run")
    with pytest.raises(CheckpointError, match=r"file/run cannot be written to: NotADirectory"):
        blocked.check()


@pytest.mark.parametrize(("scheme", "extra"), [("s3", "s3"), ("gs", "gs"), ("hf", "hf")])
def test_an_extra_that_is_not_installed_is_named(
    scheme: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ImportError(f"Install it to access {scheme}")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(CheckpointError, match=rf"pip install 'unipar\[{extra}\]'"):
        RemoteDirectory(f"{scheme}://bucket/run")


class Uploading:
    """Uploads of one host, whose store can be made to fail."""

    def __init__(self, there: RemoteDirectory, world: World) -> None:
        self.there, self.copied, self.freed = there, [], 0
        self.uploads = Uploads(there, ALONE, world, self._then, self._free)

    def _then(self, path: Path) -> None:
        self.copied.append(path.name)

    def _free(self) -> None:
        # Whoever waits for the copies waits for this, too: a run that has ended leaves nothing
        # half removed.
        time.sleep(0.1)
        self.freed += 1


def test_a_network_that_comes_back_is_waited_for(
    there: RemoteDirectory, saved: Save, alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PAUSE", 0.001)
    put_file, failures = there._fs.put_file, iter([True, True])

    def flaky(*args: Any) -> None:
        if next(failures, False):
            raise ConnectionError("reset by peer")
        put_file(*args)

    monkeypatch.setattr(there._fs, "put_file", flaky)
    host = Uploading(there, alone)
    host.uploads.add(saved(1))
    host.uploads.wait()
    host.uploads.close()
    assert (host.copied, there.steps(), host.freed) == (["step-00000001"], [1], 1)


def test_one_that_could_not_be_copied_is_told_and_the_next_is_tried(
    there: RemoteDirectory,
    saved: Save,
    alone: World,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(remote, "PAUSE", 0.001)
    put_file, lost = there._fs.put_file, True

    def gone(*args: Any) -> None:
        if lost:
            raise ConnectionError("no route to host")
        put_file(*args)

    monkeypatch.setattr(there._fs, "put_file", gone)
    host = Uploading(there, alone)
    path = saved(1)
    host.uploads.add(path)
    with pytest.raises(CheckpointError, match=r"step-00000001 was not copied: .*no route to host"):
        host.uploads.wait()
    assert f"Training goes on; it is kept in {path.parent}" in caplog.text
    assert there.steps() == []
    lost = False
    host.uploads.add(saved(2))
    host.uploads.wait()
    host.uploads.close()
    assert there.steps() == [2]


def test_what_comes_in_faster_than_it_is_copied_is_passed_over(
    there: RemoteDirectory, saved: Save, alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_file, begun, go = there._fs.put_file, threading.Event(), threading.Event()

    def slow(*args: Any) -> None:
        begun.set()
        assert go.wait(30)
        put_file(*args)

    monkeypatch.setattr(there._fs, "put_file", slow)
    host = Uploading(there, alone)
    paths = [saved(step) for step in (1, 2, 3)]
    host.uploads.add(paths[0])
    assert begun.wait(30)
    for path in paths[1:]:
        host.uploads.add(path)
    assert host.uploads.waiting() == paths
    go.set()
    host.uploads.wait()
    host.uploads.close()
    assert host.copied == ["step-00000001", "step-00000003"]
    assert there.steps() == [3, 1]
