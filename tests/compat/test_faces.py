"""Scripts that change nothing but an import train as under their own framework."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from unipar.errors import ConfigError
from unipar.migrate import migrate_files
from unipar.migrate.launchers import command
from unipar.migrate.verify import Proof, losses_of

# A script does the same however its interpreter has begun.
pytestmark = [
    pytest.mark.usefixtures("forked_programs"), pytest.mark.slow, pytest.mark.timeout(400),
]  # fmt: skip

FACES = Path(__file__).parent / "corpus"
MIGRATED = Path(__file__).parents[1] / "migrate" / "corpus"
TORCHRUN = command("torchrun", 2)
STRATEGIES = ("ddp", "fsdp", "zero2")
FRAMEWORKS = ("accelerate", "deepspeed")
PROGRAMS = [
    *(f"{one}/{path.stem}" for one in FRAMEWORKS for path in sorted((FACES / one).glob("*.py"))),
    *(f"{one}/{path.name}" for one in FRAMEWORKS for path in sorted((MIGRATED / one).iterdir())),
]
"""Those of one file that are here, and those of the migration's corpus."""

REFUSED = {
    ("accelerate/local_sgd", strategy): "LocalSGD(enabled=True) has no counterpart here. "
    "Strategies reduce gradients in every step"
    for strategy in STRATEGIES
} | {
    ("accelerate/adversarial", "zero2"): "strategy 'zero2' holds one model in a session",
    ("accelerate/package", "zero2"): "strategy 'zero2' holds one model in a session",
    ("deepspeed/adversarial", "zero2"): "strategy 'zero2' holds one model in a session",
    ("accelerate/flat", "fsdp"): "accelerator.unwrap_model(model).state_dict() here is only a part",
}
"""What is refused rightly: a remedy is in the message."""

LEFT_OUT = {("accelerate/package", "fsdp"), ("accelerate/transformer", "fsdp")}
"""They save what ranks divide as if each had it, which fails under Accelerate's FSDP as well: one
gathers on rank 0 alone, and the other leaves state_dict out of save_pretrained."""

ROUGHER = {("accelerate/trainer", "fsdp"), ("accelerate/trainer", "zero2"),
           *(("deepspeed/half", strategy) for strategy in STRATEGIES)}  # fmt: skip
"""In bf16 the frameworks that divide tensors round otherwise."""

# Schedules, trackers, resuming and clipping; accumulation, a stream, and objects prepared one by
# one; two models, of which one loss goes through both; a configuration made of flags, and a loader.
QUICK = {
    ("accelerate/complete", "fsdp"), ("accelerate/accumulation", "zero2"),
    ("accelerate/adversarial", "ddp"), ("deepspeed/images", "fsdp"),
}  # fmt: skip


def program(name: str) -> tuple[Path, str, dict[str, str]]:
    """The directory of a program, the file that is run, and its files."""
    own = FACES / f"{name}.py"
    if own.is_file():
        return own.parent, own.name, {own.name: own.read_text()}
    root = MIGRATED / name
    found = {
        path.relative_to(root).as_posix(): path.read_text()
        for pattern in ("*.py", "*.ipynb") for path in root.rglob(pattern)
    }  # fmt: skip
    return root, "train.py" if "train.py" in found else "train.ipynb", found


NOTED = {"accelerate/package": {"accelerator.get_state_dict(generator)"}}
"""What migration tells of: rank 0 alone saves, which no strategy that divides weights allows."""


@functools.cache
def under_the_framework(name: str) -> dict[int, list[float]]:
    root, main, _ = program(name)
    return losses_of(root, main, {}, TORCHRUN, name="original", timeout=180, steps=30)


def under(name: str, strategy: str) -> dict[int, list[float]]:
    root, main, files = program(name)
    migrations = migrate_files(files)
    noted = {note.construct for one in migrations.values() for note in one.notes}
    assert noted == NOTED.get(name, set())
    changed = {path: one.code for path, one in migrations.items()}
    for path, text in files.items():
        pairs = zip(text.splitlines(), changed[path].splitlines(), strict=True)
        differing = [after for before, after in pairs if before != after]
        assert all(f"unipar.compat.{name.partition('/')[0]}" in line for line in differing)
    environ = {"UNIPAR_STRATEGY": strategy}
    return losses_of(root, main, changed, TORCHRUN, timeout=180, steps=30, environ=environ)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(*one, marks=() if one in QUICK else pytest.mark.thorough)
        for one in ((name, strategy) for name in PROGRAMS for strategy in STRATEGIES)
        if one not in LEFT_OUT
    ],
)
def test_losses_are_those_of_the_framework(name: str, strategy: str) -> None:
    if (name, strategy) in REFUSED:
        with pytest.raises(ConfigError) as refusal:
            under(name, strategy)
        assert REFUSED[name, strategy] in " ".join(str(refusal.value).split())
        return
    proof = Proof(under_the_framework(name), under(name, strategy))
    assert proof.difference <= (5e-2 if (name, strategy) in ROUGHER else 1e-5)
    assert sorted(proof.original) == [0, 1]
    assert all(len(set(losses)) >= 8 for losses in proof.original.values())
