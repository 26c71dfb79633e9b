"""A directory of checkpoints behind a URL, which fsspec reaches: ``s3://``, ``gs://``, ``hf://``, …

A checkpoint's manifest goes there last and leaves first, so that one which has its manifest is
whole. Checkpoints are written and read on local disks; whole files travel.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from unipar.checkpoint.decode import read_manifest
from unipar.checkpoint.directory import publish, remove
from unipar.checkpoint.manifest import MANIFEST, Manifest
from unipar.checkpoint.names import TEMPORARY, named_step
from unipar.errors import CheckpointError
from unipar.utils.replacing import replacing

logger = logging.getLogger(__name__)

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "hf": "hf"}
_AT_ONCE = 8
"""Files that travel at the same time, where the file system is made for it: others may commit each
file by itself, as the Hugging Face Hub does."""
ATTEMPTS = 6
PAUSE = 1.0
"""Seconds before the second of these attempts; each further pause is twice as long."""

_T = TypeVar("_T")


class Unreachable(CheckpointError):
    """A store did not do what it was asked to; another time it may."""


class RemoteDirectory:
    """A directory of checkpoints behind a URL.

    Every method raises :class:`Unreachable`, with the URL and the cause, where the store cannot be
    reached or refuses.

    Args:
        url: of the directory.

    Raises:
        CheckpointError: what reaches such URLs is not installed, or no such scheme is known.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url.rstrip("/")
        scheme = self.url.partition("://")[0]
        # Only there: elsewhere folders come with what is put into them.
        options: dict[str, Any] = {"auto_mkdir": True} if scheme in ("file", "local") else {}
        try:
            self._fs, root = fsspec.core.url_to_fs(self.url, **options)
        except ImportError as error:
            extra = _EXTRAS.get(scheme)
            remedy = f": pip install 'unipar[{extra}]'" if extra else f" ({error})"
            raise CheckpointError(
                f"{url} needs a package that is not installed here{remedy}."
            ) from error
        except Exception as error:
            raise CheckpointError(f"{url} cannot be used: {_said(error)}.") from error
        self._root = str(root).rstrip("/")
        self._at_once = _AT_ONCE if self._fs.async_impl else 1

    def check(self) -> None:
        """Write and remove something, so that what is missing is known before a run begins."""
        path = f"{self._root}/.unipar-{uuid.uuid4().hex}"
        remedy = " Check the name, the credentials and the network, or choose another directory."
        with self._explained("written to", remedy):
            self._fs.pipe_file(path, b"unipar")
            self._fs.rm_file(path)

    def steps(self) -> list[int]:
        """The steps of the checkpoints that have a manifest, the newest first."""
        return sorted((step for step, files in self._found().items() if MANIFEST in files))[::-1]

    def clear(self) -> None:
        """Remove what interrupted copies have left."""
        for step, files in self._found().items():
            if MANIFEST not in files:
                self.remove(step)

    def remove(self, step: int) -> None:
        """Remove a checkpoint, or what is there of one, so that it never looks whole meanwhile."""
        files = self._found().get(step, {})
        with self._explained("cleared"):
            if MANIFEST in files:
                self._fs.rm_file(self._path(step, MANIFEST))
            for name in files.keys() - {MANIFEST}:
                self._fs.rm_file(self._path(step, name))
            if files and self._fs.isdir(self._path(step)):
                self._fs.rm(self._path(step), recursive=True)

    def put(self, local: Path, names: Iterable[str]) -> None:
        """Copy files of the checkpoint ``local`` there."""
        step = _step_of(local)

        def one(name: str) -> None:
            self._fs.put_file(str(local / name), self._path(step, name))

        with self._explained("written to"), ThreadPoolExecutor(self._at_once) as pool:
            list(pool.map(one, names))

    def manifest(self, step: int) -> Manifest:
        """The manifest of a checkpoint there; its ``path`` is of no use.

        Raises:
            CheckpointError: there is none, it is damaged, or files are missing or cut short.
        """
        with tempfile.TemporaryDirectory(prefix="unipar-") as scratch:
            with self._explained("read"):
                self._fs.get_file(self._path(step, MANIFEST), str(Path(scratch, MANIFEST)))
            manifest = read_manifest(Path(scratch))
        sizes = self._found().get(step, {})
        for name, info in manifest.files.items():
            if sizes.get(name) != info.size:
                has = f"has {sizes[name]} bytes" if name in sizes else "is not there"
                raise CheckpointError(
                    f"{self.url}/step-{step:08d}/{name} {has}; it should have {info.size} bytes."
                )
        return manifest

    def fetch(self, step: int, into: Path, wanted: Callable[[Manifest], Iterable[str]]) -> Path:
        """Copy a checkpoint from there into a directory, under its own name.

        What lies there of the same checkpoint already is not copied again.

        Args:
            step: which.
            into: the directory; made if need be.
            wanted: which of its files.

        Returns:
            the copy.

        Raises:
            CheckpointError: it is not whole there, or the disk has no room.
        """
        final = into / f"step-{step:08d}"
        partial = into / f"{TEMPORARY}{final.name}-fetched"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            with self._explained("read"):
                self._fs.get_file(self._path(step, MANIFEST), str(partial / MANIFEST))
            manifest = read_manifest(partial)
            if final.exists() and _same(final / MANIFEST, partial / MANIFEST):
                shutil.rmtree(partial)
                partial = final
            elif final.exists():
                remove(final)
            self._get(step, partial, {n: manifest.files[n].size for n in wanted(manifest)})
            if partial != final:
                publish(partial, final)
        except OSError as error:
            raise CheckpointError(
                f"Cannot copy {self.url}/{final.name} to {into}: {error.strerror or error}."
            ) from error
        return final

    def _get(self, step: int, into: Path, sizes: dict[str, int]) -> None:
        def one(name: str) -> None:
            path = into / name
            if path.is_file() and path.stat().st_size == sizes[name]:
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as partial, self._explained("read"):
                self._fs.get_file(self._path(step, name), str(partial))

        with ThreadPoolExecutor(self._at_once) as pool:
            list(pool.map(one, sizes))

    def _found(self) -> dict[int, dict[str, int]]:
        """Of each checkpoint there, whole or not, its files and their bytes."""
        with self._explained("read"):
            self._fs.invalidate_cache()
            try:
                listed = self._fs.find(self._root, detail=True)
            except FileNotFoundError:
                return {}
        found: dict[int, dict[str, int]] = {}
        for path, about in listed.items():
            relative = str(path)[len(self._root) :].lstrip("/")
            name, _, file = relative.partition("/")
            if file and (step := named_step(name)) is not None:
                found.setdefault(step, {})[file] = about.get("size") or 0
        return found

    def _path(self, step: int, name: str = "") -> str:
        return f"{self._root}/step-{step:08d}" + (f"/{name}" if name else "")

    @contextlib.contextmanager
    def _explained(self, what: str, remedy: str = "") -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            # Each file system, and the libraries beneath it, has exceptions of its own.
            raise Unreachable(f"{self.url} cannot be {what}: {_said(error)}.{remedy}") from error


def tried(act: Callable[[], _T], what: str) -> _T:
    """Call ``act`` until the store does its part, some times at most, after ever longer pauses.

    Raises:
        CheckpointError: that of the last attempt, or what no other attempt would change.
    """
    for attempt in range(1, ATTEMPTS):
        try:
            return act()
        except Unreachable as error:
            pause = PAUSE * 2 ** (attempt - 1)
            logger.info("%s: %s Again in %g s.", what, error, pause)
            time.sleep(pause)
    return act()


def everything(manifest: Manifest) -> Iterable[str]:
    """All files of a checkpoint."""
    return manifest.files


@contextlib.contextmanager
def fetched(url: str, wanted: Callable[[Manifest], Iterable[str]] = everything) -> Iterator[Path]:
    """A copy on this machine of the checkpoint at a URL, or of the newest one there.

    Args:
        url: of a checkpoint, or of a directory of them.
        wanted: which of its files.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    remote, step = located(url)
    with tempfile.TemporaryDirectory(prefix="unipar-fetched-") as scratch:
        yield remote.fetch(step, Path(scratch), wanted)


def located(url: str) -> tuple[RemoteDirectory, int]:
    """The directory and the step of the checkpoint at ``url``, or of the newest one there.

    Raises:
        CheckpointError: there is none, or the store cannot be read.
    """
    parent, _, name = url.rstrip("/").rpartition("/")
    step = named_step(name)
    if step is not None:
        remote = RemoteDirectory(parent)
        if step in remote.steps():
            return remote, step
        raise CheckpointError(f"{url} is no complete checkpoint, or does not exist.")
    remote = RemoteDirectory(url)
    steps = remote.steps()
    if not steps:
        raise CheckpointError(f"{url} holds no complete checkpoint, or does not exist.")
    return remote, steps[0]


def _step_of(local: Path) -> int:
    step = named_step(local.name)
    assert step is not None, local
    return step


def _same(one: Path, other: Path) -> bool:
    return one.is_file() and one.read_bytes() == other.read_bytes()


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".: ")
