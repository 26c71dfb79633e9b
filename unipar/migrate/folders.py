"""What a program's folder holds beside the files that are migrated."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

LARGEST = 50 * 2**20
"""Bytes up to which a file, or a folder without code, is copied."""
_OUTPUTS = ("checkpoint*", "ckpt*", "lightning_logs", "logs", "mlruns", "output*", "runs", "wandb")


@dataclass(frozen=True)
class Others:
    """The other files of a program, by their paths from its folder.

    Attributes:
        copied: files and folders that a copy of the program needs, too, each with its files.
        left_out: files and folders that it is left without, each with why.
    """

    copied: Mapping[str, Sequence[str]] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


def walk(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder, without hidden ones, caches and virtual environments."""
    for one in sorted(folder.iterdir()):
        if one.name.startswith(".") or one.name == "__pycache__":
            continue
        if not one.is_dir():
            yield from [one] if one.is_file() else ()
        elif not one.is_symlink() and not _is_environment(one):
            yield from walk(one)


def others(root: Path, code: Collection[str], output: Path) -> Others:
    """Find what a copy of a program needs beside its code.

    Args:
        root: its folder.
        code: the paths of its code from there.
        output: where the copy goes; it may be in the folder.
    """
    holding = {parent.as_posix() for name in code for parent in PurePosixPath(name).parents}
    copied: dict[str, list[str]] = {}
    left_out: dict[str, str] = {}
    stack = [root]
    while stack:
        for one in sorted(stack.pop().iterdir()):
            name = one.relative_to(root).as_posix()
            if name in code or one.name in (".git", "__pycache__") or one == output.resolve():
                continue
            if name in holding:
                stack.append(one)
                continue
            if why := _why_not(one):
                left_out[name] = why
                continue
            found = [path for path in (one, *sorted(one.rglob("*"))) if path.is_file()]
            size = sum(path.stat().st_size for path in found)
            if size > LARGEST:
                mib = 2**20
                left_out[name] = (
                    f"it has {size / mib:,.1f} MiB, more than the {LARGEST // mib} that are copied"
                )
            elif found:
                copied[name] = [path.relative_to(root).as_posix() for path in found]
    return Others(copied, left_out)


def _why_not(path: Path) -> str:
    """Why something is left out whatever it holds, so that nothing of it need be read."""
    if path.name.startswith("."):
        return "it is hidden"
    if path.is_dir() and path.is_symlink():
        return "it is a link to a folder"
    if path.is_dir() and _is_environment(path):
        return "it is a virtual environment"
    if path.is_dir() and any(fnmatchcase(path.name, one) for one in _OUTPUTS):
        return "by its name it holds what earlier runs wrote"
    return ""


def _is_environment(folder: Path) -> bool:
    return (folder / "pyvenv.cfg").exists() or (folder / "conda-meta").exists()
