"""Training goes on from a checkpoint as the script's own does, whoever has written it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from programs import CORPUS, files_of

from unipar.migrate import migrate_files
from unipar.migrate.launchers import command
from unipar.migrate.verify import Proof, losses_of

# A script does the same however its interpreter has begun; what a user's own does is proved by
# test_verify_command.py.
pytestmark = pytest.mark.usefixtures("forked_programs")

# What makes each train one epoch, and what makes it go on from there.
ONE_EPOCH = {"ddp/resume": {"environ": {"EPOCHS": "1"}}, "torch/resume": {"flags": ["--epochs=1"]}}
GOES_ON = {"ddp/resume": [], "torch/resume": ["--resume=ckpt/last.pt"]}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "program", ["torch/resume", pytest.param("ddp/resume", marks=pytest.mark.thorough)]
)
def test_a_resumed_run_has_the_losses_of_the_resumed_script(program: str, tmp_path: Path) -> None:
    migrations = migrate_files(files_of(program))
    launcher = command(migrations["train.py"].launcher, 2)
    files = {name: one.code for name, one in migrations.items()}
    files["unipar.yaml"] = yaml.safe_dump(dict(migrations["train.py"].config))
    losses = {}
    for name, changed in (("original", {}), ("migrated", files)):
        root = tmp_path / name
        shutil.copytree(CORPUS / program, root)
        for path, text in changed.items():
            (root / path).write_text(text)
        train_an_epoch(root, launcher, **ONE_EPOCH[program])
    for written, run in (
        ("original", "original"), ("original", "migrated"), ("migrated", "migrated")
    ):  # fmt: skip
        own = files if run == "migrated" else {}
        losses[written, run] = losses_of(
            tmp_path / written, "train.py", own, launcher, arguments=GOES_ON[program],
            steps=40, timeout=180,
        )  # fmt: skip
    expected = losses["original", "original"]
    # An epoch less than all three, so it has indeed gone on.
    assert {len(one) for one in expected.values()} == {12 if program == "ddp/resume" else 14}
    assert Proof(expected, losses["original", "migrated"]).difference <= 1e-6
    assert Proof(expected, losses["migrated", "migrated"]).difference <= 1e-6


def train_an_epoch(
    root: Path, launcher: list[str], *, environ: dict[str, str] | None = None,
    flags: list[str] | None = None,
) -> None:  # fmt: skip
    """Run the script in its directory, where it leaves its checkpoint."""

    subprocess.run(
        [*launcher, "train.py", *(flags or [])], cwd=root, check=True, timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})}, capture_output=True,
    )  # fmt: skip
