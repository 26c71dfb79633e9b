"""The pages on migration: their tables are the code's own, and their examples train the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
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


def example(dialect: str) -> tuple[str, list[str]]:
    """A page's script, and the lines that others take the place of."""
    before, changed = fences((PAGES / f"{dialect}.md").read_text(), "py")
    return before, changed.splitlines()


@pytest.mark.parametrize("dialect", READ, ids=lambda one: one.name)
def test_only_the_lines_that_the_page_shows_change(dialect) -> None:
    before, changed = example(dialect.name)
    migration = migrate_source(before)
    pairs = zip(before.splitlines(), migration.code.splitlines(), strict=True)
    assert [now for was, now in pairs if now != was] == changed
    assert not migration.config


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
    before, _ = example(dialect.name)
    migration = migrate_source(before)
    (tmp_path / "train.py").write_text(before)
    changed = {"train.py": migration.code}
    proof = verify(tmp_path, "train.py", changed, "{}", launcher=migration.launcher, timeout=180)
    assert proof.difference <= 1e-6
    assert all(len(losses) > 10 for losses in proof.original.values())
