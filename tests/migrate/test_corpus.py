"""Scripts of the shapes that people write train the same before and after."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from programs import CORPUS, ELSEWHERE, PROGRAMS, files_of, main_of, settings_of

from unipar.migrate import migrate_files
from unipar.migrate.report import diff
from unipar.migrate.verify import Proof, verify

# A script does the same however its interpreter has begun; what a user's own does is proved by
# test_verify_command.py.
pytestmark = pytest.mark.usefixtures("forked_programs")


# What the pages' examples, which test_pages.py runs for the other dialects, do not have: two
# engines, cells. All changes are compared below; programs of frameworks that have a face, and ranks
# that a script starts itself, are in tests/compat.
QUICK = ("notebook/two_moons", "torch/gan")


def proof_of(program: str, **how: Any) -> Proof:
    """The losses of a program before and after."""
    migrations = migrate_files(files_of(program), settings=settings_of(program))
    main = migrations[main_of(program)]
    return verify(
        CORPUS / program,
        main_of(program),
        {name: one.code for name, one in migrations.items()},
        yaml.safe_dump(dict(main.config)),
        launcher=main.launcher,
        launched=main.launched,
        timeout=180,
        **how,
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "program",
    [
        program if program in QUICK else pytest.param(program, marks=pytest.mark.thorough)
        for program in PROGRAMS
        if not program.startswith(ELSEWHERE)
    ],
)
def test_losses_are_equal_before_and_after(program: str) -> None:
    proof = proof_of(program)
    assert proof.difference <= 1e-6
    assert sorted(proof.original) == (
        [0] if program.startswith(("notebook/", "torch/")) else [0, 1]
    )
    assert all(len(set(losses)) >= 8 for losses in proof.original.values())


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "program",
    [
        "torch/accumulation",
        pytest.param("torch/flat", marks=pytest.mark.thorough),
        pytest.param("torch/gan", marks=pytest.mark.thorough),
    ],
)
def test_a_script_for_one_device_trains_the_same_on_two(program: str) -> None:
    proof = proof_of(program, processes=2)
    assert proof.about == "The migrated script ran on 2 processes, the original on one."
    assert proof.agrees


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("program", "strategy"),
    # Of the second PyTorch's scaler multiplies the loss, and ZeRO's does so again, by 1.
    [("ddp/functions", "fsdp"), ("torch/amp", "zero1")],
)
def test_one_field_changes_what_runs_a_migrated_script(program: str, strategy: str) -> None:
    proof = proof_of(program, environ={"UNIPAR_STRATEGY": strategy})
    assert proof.difference <= 1e-5


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_changes_are_those_that_were_reviewed(program: str) -> None:
    files = files_of(program)
    migrations = migrate_files(files, settings=settings_of(program))
    notes = sorted(str(note) for one in migrations.values() for note in one.notes)
    told = "".join(f"{note}\n" for note in notes)
    config = yaml.safe_dump(dict(migrations[main_of(program)].config), sort_keys=False)
    found = f"{diff(files, migrations)}{config}{told}"
    assert found == (CORPUS / program / "golden.diff").read_text()


@pytest.mark.parametrize("program", PROGRAMS)
def test_migrating_twice_changes_nothing(program: str) -> None:
    migrations = migrate_files(files_of(program), settings=settings_of(program))
    once = {name: one.code for name, one in migrations.items()}
    again = migrate_files(once)
    assert {name: one.code for name, one in again.items()} == once
    assert not any(one.changed or one.notes for one in again.values())
