"""Building the wheel of a source distribution that needs help to build."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unipar.errors import InstallError
from unipar.install.cache import wheel_directory
from unipar.install.commands import Command, Runner, pip
from unipar.install.recipe import Build, Edit
from unipar.utils.scratch import scratch


def build_wheel(build: Build, run: Runner) -> Path:
    """Build the wheel and put it into the cache, which never holds a part of one.

    Raises:
        InstallError: a command fails, or the sources are not those that the recipe is for.
    """
    kept = wheel_directory(build)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with scratch(kept.parent, prefix=".building-") as work:
        prepare, wheel = commands(build, work)
        for command in prepare:
            run(command)
        (sdist,) = (work / "sdist").iterdir()
        _check_sources(sdist, build)
        source = _unpack(sdist, work / "source")
        for edit in build.edits:
            apply(edit, source)
        run(wheel)
        (made,) = (work / "wheel").glob("*.whl")
        shutil.rmtree(kept, ignore_errors=True)
        # Within one file system, so that the cache has the whole wheel or none.
        os.replace(made.parent, kept)
    return kept / made.name


def commands(build: Build, work: Path) -> tuple[list[Command], Command]:
    """Return the commands before the sources are edited, and after."""
    tools = work / "tools"
    # The build must see the installed torch, so it is not isolated; its tools come first.
    paths = {
        "PYTHONPATH": _joined(str(tools), os.environ.get("PYTHONPATH")),
        "PATH": _joined(str(tools / "bin"), os.path.dirname(sys.executable), os.environ["PATH"]),
    }
    prepare = [pip("install", "--target", str(tools), *build.tools)] if build.tools else []
    download = pip(
        *("download", "--no-deps", "--no-build-isolation", "--no-binary", build.distribution),
        *("--dest", str(work / "sdist"), f"{build.distribution}=={build.version}"),
        environment=paths,
    )
    wheel = pip(
        *("wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir"),
        *("--wheel-dir", str(work / "wheel"), str(work / "source")),
        environment={**build.environment, **paths, "MAKEFLAGS": _jobs()},
    )
    return [*prepare, download], wheel


def shell(build: Build) -> Iterator[str]:
    """The build as one would type it."""
    work = Path("/BUILD")
    prepare, wheel = commands(build, work)
    yield "BUILD=$(mktemp -d)"
    for command in prepare:
        yield _typed(command, work)
    yield f"echo '{build.sha256}  '$BUILD/sdist/*.tar.gz | sha256sum --check"
    yield "mkdir $BUILD/source"
    yield "tar xzf $BUILD/sdist/*.tar.gz -C $BUILD/source --strip-components=1"
    for edit in build.edits:
        yield f"# in $BUILD/source/{edit.file}, once ({edit.why}):"
        yield from (f"#   - {line}" for line in edit.old.splitlines())
        yield from (f"#   + {line}" for line in edit.new.splitlines())
    yield _typed(wheel, work)
    yield f"mkdir -p {wheel_directory(build)} && mv $BUILD/wheel/*.whl {wheel_directory(build)}"


def apply(edit: Edit, source: Path) -> None:
    """Make one change to the sources.

    Raises:
        InstallError: the text is not there, or more than once.
    """
    path = source / edit.file
    text = path.read_text() if path.is_file() else ""
    count = text.count(edit.old)
    if count != 1:
        raise InstallError(
            f"the recipe changes {edit.file} ({edit.why}), and its text is there {count} times "
            f"instead of once: {edit.old!r}. The sources are not those that it was written for; "
            "upgrade the backend's unipar package."
        )
    path.write_text(text.replace(edit.old, edit.new))


def _check_sources(sdist: Path, build: Build) -> None:
    found = hashlib.sha256(sdist.read_bytes()).hexdigest()
    if found != build.sha256:
        raise InstallError(
            f"the package index gave a {sdist.name} with SHA-256 {found}; the recipe is for "
            f"{build.sha256}. Nothing was built. See which index pip uses: pip config list."
        )


def _unpack(sdist: Path, directory: Path) -> Path:
    with tempfile.TemporaryDirectory(dir=directory.parent) as unpacked:
        with tarfile.open(sdist) as archive:
            # What is in it is known by its hash; Pythons before 3.10.12 and 3.11.4 have no filters.
            guard: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(unpacked, **guard)
        (root,) = Path(unpacked).iterdir()
        os.replace(root, directory)
    return directory


def _jobs() -> str:
    """As many compilers as there are cores, unless the user says otherwise."""
    return os.environ.get("MAKEFLAGS") or f"-j{os.cpu_count() or 1}"


def _joined(*paths: str | None) -> str:
    return os.pathsep.join(path for path in paths if path)


def _typed(command: Command, work: Path) -> str:
    return command.shell().replace(str(work), "$BUILD")
