"""The pages on migration: their tables are the code's own, and their examples train the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from programs import ELSEWHERE

from unipar.migrate import migrate_source
from unipar.migrate.dialects import DIALECTS
from unipar.migrate.verify import verify

# A script does the same however its interpreter has begun; what a user's own does is proved by
# test_verify_command.py.
pytestmark = pytest.mark.usefixtures("forked_programs")

PAGES = Path(__file__).resolve().parents[2] / "docs" / "migrate"
READ = [one for one in DIALECTS if one.rows]
# The dialects of programs that test_corpus.py always trains, and that have all that the page has.
FACES = ("accelerate", "colossalai")
OF_THE_CORPUS = ("ddp", "deepspeed", "fabric")


def fences(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("dialect", READ, ids=lambda one: one.name)
def test_tables_are_the_dialects_own(dialect) -> None:
    page = (PAGES / f"{dialect.name}.md").read_text()
    assert f"<!-- maps begin -->\n{dialect.table()}<!-- maps end -->" in page
    assert f"<!-- refused begin -->\n{dialect.refused_table()}<!-- refused end -->" in page


def examples(dialect: str) -> tuple[str, str, str]:
    """A page's script before and after, and its settings."""
    page = (PAGES / f"{dialect}.md").read_text()
    before, after = fences(page, "py")
    if dialect in FACES:
        # The lines that change, and no other.
        changed = iter(after.splitlines(keepends=True))
        lines = before.splitlines(keepends=True)
        after = "".join(next(changed) if f" {dialect}" in line else line for line in lines)
        return before, after, "{}"
    (config,) = fences(page, "yaml")
    return before, after, config


@pytest.mark.parametrize("dialect", READ, ids=lambda one: one.name)
def test_before_becomes_after(dialect) -> None:
    before, after, config = examples(dialect.name)
    migration = migrate_source(before)
    assert migration.code == after
    assert yaml.safe_load(config) == dict(migration.config)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "dialect",
    [
        pytest.param(one, marks=[pytest.mark.thorough] if one.name in OF_THE_CORPUS else [])
        for one in READ
        if one.name not in ELSEWHERE
    ],
    ids=lambda one: one.name,
)
def test_after_trains_as_before(dialect, tmp_path: Path) -> None:
    before, after, config = examples(dialect.name)
    migration = migrate_source(before)
    (tmp_path / "train.py").write_text(before)
    proof = verify(
        tmp_path, "train.py", {"train.py": after}, config, launcher=migration.launcher, timeout=180
    )
    assert proof.difference <= 1e-6
    assert all(len(losses) > 10 for losses in proof.original.values())
