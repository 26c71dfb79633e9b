"""Scripts for Colossal-AI train the same before and after `unipar migrate`.

The originals run through ``patched_colossalai.py``, since the published Colossal-AI does not run
on a CPU; it changes what unipar's backend changes, and nothing else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from unipar.migrate import migrate_files
from unipar.migrate.launchers import command
from unipar.migrate.verify import Proof, losses_of

ROOT = Path(__file__).resolve().parents[3]
CORPUS = ROOT / "tests" / "migrate" / "corpus" / "colossalai"
PAGE = ROOT / "docs" / "migrate" / "colossalai.md"
PATCHED = Path(__file__).parent / "patched_colossalai.py"
TORCHRUN = command("torchrun", 2)
PROGRAMS = sorted(path.parent.name for path in CORPUS.glob("*/train.py"))


Losses = dict[int, list[float]]


def original_losses(root: Path, config: Mapping[str, Any]) -> Losses:
    launcher = [*TORCHRUN, str(PATCHED), config["strategy"]["plugin"]]
    return losses_of(root, "train.py", {}, launcher, timeout=180)


def migrated_losses(
    root: Path, files: Mapping[str, str], config: Mapping[str, Any], *arguments: str
) -> Losses:
    settings = {"unipar.yaml": yaml.safe_dump({**config, "device": "cpu"})}
    return losses_of(
        root, "train.py", {**files, **settings}, TORCHRUN, arguments=arguments, timeout=180
    )


class Rewritten(NamedTuple):
    """A program of the corpus: where it is, its files as they become, and its settings."""

    root: Path
    files: dict[str, str]
    config: Mapping[str, Any]


def rewritten(program: str) -> Rewritten:
    root = CORPUS / program
    migrations = migrate_files({path.name: path.read_text() for path in root.glob("*.py")})
    files = {name: one.code for name, one in migrations.items()}
    return Rewritten(root, files, migrations["train.py"].config)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the rewritten ``zero`` keeps its checkpoints."""
    return tmp_path_factory.mktemp("migrated") / "kept"


@pytest.fixture(scope="module")
def zero_losses(kept: Path) -> Losses:
    return migrated_losses(*rewritten("zero"), "--checkpoints", str(kept))


def assert_same(original: Losses, migrated: Losses) -> None:
    assert Proof(original, migrated).difference <= 1e-6
    assert sorted(original) == [0, 1]
    assert all(len(set(losses)) >= 10 for losses in original.values())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_losses_with_zero_are_equal_before_and_after(zero_losses: Losses) -> None:
    root, _, config = rewritten("zero")
    assert_same(original_losses(root, config), zero_losses)


# The one above has all that the page's example has; the changes of every program are compared with
# what was reviewed.
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(400)
@pytest.mark.parametrize("program", [program for program in PROGRAMS if program != "zero"])
def test_losses_are_equal_before_and_after(program: str) -> None:
    root, files, config = rewritten(program)
    assert_same(original_losses(root, config), migrated_losses(root, files, config))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_one_field_changes_what_runs_a_migrated_script(zero_losses: Losses) -> None:
    root, files, config = rewritten("zero")
    assert config["strategy"]["name"] == "colossalai"
    under_ddp = migrated_losses(root, files, {**config, "strategy": "ddp"})
    assert Proof(zero_losses, under_ddp).difference <= 1e-5


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_migrated_script_goes_on_from_its_checkpoint(zero_losses: Losses, kept: Path) -> None:
    assert sorted(os.listdir(kept)) == ["model.pt", "optimizer.pt", "scheduler.pt"]
    again = migrated_losses(*rewritten("zero"), "--resume", "--checkpoints", str(kept))
    for rank, losses in again.items():
        assert losses == pytest.approx(zero_losses[rank][6:], rel=1e-6)


def pages_example() -> tuple[str, str, Mapping[str, Any]]:
    """The page's script before and after, and its settings."""
    page = PAGE.read_text()
    before, after = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (config,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return before, after, yaml.safe_load(config)


def test_the_pages_example_becomes_what_the_page_shows() -> None:
    before, after, config = pages_example()
    migration = migrate_files({"train.py": before})["train.py"]
    assert migration.code == after
    assert config == dict(migration.config)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_the_pages_example_trains_the_same(tmp_path: Path) -> None:
    before, after, config = pages_example()
    (tmp_path / "train.py").write_text(before)
    original = original_losses(tmp_path, config)
    assert_same(original, migrated_losses(tmp_path, {"train.py": after}, config))
