"""Loops that are folded into ``fit`` train as they did, on one process and on two."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from unipar.migrate import migrate_source
from unipar.migrate.launchers import command
from unipar.migrate.verify import losses_of, verify

# A script does the same however its interpreter has begun; what a user's own does is proved by
# test_verify_command.py.
pytestmark = pytest.mark.usefixtures("forked_programs")

FOLDING = Path(__file__).parent / "corpus" / "folding"
# Each with its backward passes in a step.
SCRIPTS = {"accumulation": 4, "dictionary": 1, "flat": 1}
TORCHRUN = command("torchrun", 2)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name",
    [
        "accumulation",
        *(pytest.param(one, marks=pytest.mark.thorough) for one in ("dictionary", "flat")),
    ],
)
def test_a_folded_loop_has_the_losses_of_the_script(name: str, tmp_path: Path) -> None:
    shutil.copy(FOLDING / f"{name}.py", tmp_path / "train.py")
    migration = migrate_source((tmp_path / "train.py").read_text(), to="fit")
    assert migration.changed, [str(note) for note in migration.notes]
    config = yaml.safe_dump(dict(migration.config))
    files = {"train.py": migration.code}
    proof = verify(
        tmp_path, "train.py", files, config, launcher="python", steps=40, timeout=180,
        in_order=True,
    )  # fmt: skip
    assert proof.difference <= 1e-6
    assert all(len(set(losses)) >= 12 for losses in proof.original.values())
    both = losses_of(
        tmp_path, "train.py", {**files, "unipar.yaml": config}, TORCHRUN, steps=40, timeout=180,
        environ={"UNIPAR_CAPTURE_IN_ORDER": "1", "UNIPAR_SHUFFLE": "false"},
    )  # fmt: skip
    # What each rank's backward passes are called on is its share of the global batch's loss.
    passes = SCRIPTS[name]
    shares = [of_steps(losses, max(1, passes // 2)) for losses in both.values()]
    means = [(a + b) / 2 for a, b in zip(*shares, strict=True)]
    assert means == pytest.approx(of_steps(proof.original[0], passes), rel=1e-5)


def of_steps(losses: Sequence[float], passes: int) -> list[float]:
    """The losses of steps, from those of their backward passes."""
    return [sum(losses[i : i + passes]) for i in range(0, len(losses), passes)]


def test_every_script_here_is_proved() -> None:
    assert sorted(SCRIPTS) == sorted(path.stem for path in FOLDING.glob("*.py"))
