"""Scripts that change nothing but their imports train as under Colossal-AI itself.

The originals run through ``patched_colossalai.py``, since the published Colossal-AI does not run
on a CPU; it changes what unipar's backend changes, and nothing else of what is trained.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from unipar.migrate import migrate_files
from unipar.migrate.launchers import command
from unipar.migrate.verify import Proof, losses_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[3]
FACES = ROOT / "tests" / "compat" / "corpus" / "colossalai"
MIGRATED = ROOT / "tests" / "migrate" / "corpus" / "colossalai"
PATCHED = Path(__file__).parent / "patched_colossalai.py"
TORCHRUN = command("torchrun", 2)

PLUGINS = {
    "accumulation": "zero1", "adversarial": "ddp", "bert": "zero1", "checkpointing": "zero2",
    "distillation": "ddp", "gemini": "gemini", "llama": "hybrid", "resnet": "ddp",
    "sharded": "fsdp",
}  # fmt: skip
"""The plugin that a script takes, by which Colossal-AI is changed to run here."""

OTHERS = {
    "migrate/accumulation": "ddp", "migrate/flat": "ddp", "migrate/llama": "hybrid",
    "migrate/trainer": "zero2", "migrate/zero": "zero1",
}  # fmt: skip

Losses = dict[int, list[float]]


def program(name: str) -> tuple[Path, str, dict[str, str]]:
    """The directory of a program, the file that is run, and its files."""
    if name in PLUGINS:
        return FACES, f"{name}.py", {f"{name}.py": (FACES / f"{name}.py").read_text()}
    root = MIGRATED / name.partition("/")[2]
    return root, "train.py", {path.name: path.read_text() for path in root.glob("*.py")}


@functools.cache
def original(name: str) -> Losses:
    root, main, _ = program(name)
    launcher = [*TORCHRUN, str(PATCHED), (PLUGINS | OTHERS)[name]]
    return losses_of(root, main, {}, launcher, name="original", timeout=180, steps=40)


def under(name: str, strategy: str | None) -> Losses:
    root, main, files = program(name)
    migrations = migrate_files(files)
    assert not [str(note) for one in migrations.values() for note in one.notes]
    changed = {path: one.code for path, one in migrations.items()}
    for path, text in files.items():
        pairs = zip(text.splitlines(), changed[path].splitlines(), strict=True)
        differing = [after for before, after in pairs if before != after]
        assert all("unipar.compat.colossalai" in line for line in differing)
    environ = {} if strategy is None else {"UNIPAR_STRATEGY": strategy}
    return losses_of(root, main, changed, TORCHRUN, timeout=180, steps=40, environ=environ)
