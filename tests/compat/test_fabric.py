"""Scripts for Fabric that change nothing but an import train as under Fabric itself."""

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

FACES = Path(__file__).parent / "corpus" / "fabric"
MIGRATED = Path(__file__).parents[1] / "migrate" / "corpus" / "fabric"
TORCHRUN = command("torchrun", 2)
STRATEGIES = ("ddp", "fsdp", "zero2")
OWN = sorted(path.stem for path in FACES.glob("*.py"))
OTHERS = sorted(path.name for path in MIGRATED.iterdir())
STEPS = 30

REFUSED = {
    (name, "zero2"): "strategy 'zero2' holds one model in a session" for name in ("gan", "kfold")
} | {
    ("functions", "fsdp"): "strategy 'fsdp' divides the model among ranks, so its state_dict() "
    "here is only a part. Call fabric.save(path, {'model': model}), on all ranks, "
    "so outside of any 'if rank == 0'.",
    ("gan", "fsdp"): "'fsdp' divides the model among ranks, so model.module.state_dict() here",
    ("trainer", "zero2"): "no rank has used 'unused.weight', 'unused.bias' in this step",
}
"""What is refused rightly: a remedy is in the message."""

# Accumulation, clipping, files and logs; methods and clipping by value; samplers of all kinds.
QUICK = {("language", "fsdp"), ("samplers", "ddp")}


def program(name: str) -> tuple[Path, str, dict[str, str]]:
    """The directory of a program, the file that is run, and its files."""
    if name in OWN:
        return FACES, f"{name}.py", {f"{name}.py": (FACES / f"{name}.py").read_text()}
    root = MIGRATED / name
    found = {one.relative_to(root).as_posix(): one.read_text() for one in root.rglob("*.py")}
    return root, "train.py", found


@functools.cache
def under_the_framework(name: str) -> dict[int, list[float]]:
    root, main, files = program(name)
    # The package `lightning` has the same Fabric under another name.
    installed = {
        path: text.replace("import lightning as", "import lightning_fabric as").replace(
            "from lightning.fabric", "from lightning_fabric"
        )
        for path, text in files.items()
    }
    return losses_of(root, main, installed, TORCHRUN, name="original", timeout=180, steps=STEPS)


def under(name: str, strategy: str) -> dict[int, list[float]]:
    root, main, files = program(name)
    migrations = migrate_files(files)
    assert not [note for one in migrations.values() for note in one.notes if note.kind == "refused"]
    changed = {path: one.code for path, one in migrations.items()}
    for path, text in files.items():
        pairs = zip(text.splitlines(), changed[path].splitlines(), strict=True)
        differing = [after for before, after in pairs if before != after]
        assert all("unipar.compat" in line for line in differing)
    environ = {"UNIPAR_STRATEGY": strategy}
    return losses_of(root, main, changed, TORCHRUN, timeout=180, steps=STEPS, environ=environ)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(*one, marks=() if one in QUICK else pytest.mark.thorough)
        for one in ((name, strategy) for name in [*OWN, *OTHERS] for strategy in STRATEGIES)
    ],
)
def test_losses_are_those_of_the_framework(name: str, strategy: str) -> None:
    if (name, strategy) in REFUSED:
        with pytest.raises(ConfigError) as refusal:
            under(name, strategy)
        assert REFUSED[name, strategy] in " ".join(str(refusal.value).split())
        return
    proof = Proof(under_the_framework(name), under(name, strategy))
    # In bf16 the frameworks that divide tensors round otherwise.
    half = name in ("distill", "trainer") and strategy != "ddp"
    assert proof.difference <= (5e-2 if half else 1e-5)
    assert sorted(proof.original) == [0, 1]
    assert all(len(set(losses)) >= 8 for losses in proof.original.values())
