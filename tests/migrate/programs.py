"""The scripts that migration is proved on."""

from __future__ import annotations

from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
PROGRAMS = sorted(
    path.parent.relative_to(CORPUS).as_posix()
    for path in CORPUS.glob("*/*/train.*")
    if path.suffix in (".py", ".ipynb")
)

# Frameworks with an environment of their own, in which their backend's tests run the programs.
ELSEWHERE = ("colossalai",)


def main_of(program: str) -> str:
    """The file that is run."""
    return "train.py" if (CORPUS / program / "train.py").is_file() else "train.ipynb"


def files_of(program: str) -> dict[str, str]:
    """The text of a program's files, by their paths in it."""
    return _texts(program, "*.py") | _texts(program, "*.ipynb")


def settings_of(program: str) -> dict[str, str]:
    """The text of the settings beside them, likewise."""
    return _texts(program, "*.json") | _texts(program, "*.yaml")


def _texts(program: str, pattern: str) -> dict[str, str]:
    root = CORPUS / program
    return {
        path.relative_to(root).as_posix(): path.read_bytes().decode()
        for path in sorted(root.rglob(pattern))
    }
