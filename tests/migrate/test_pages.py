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

PAGES = Path(__file__).resolve().parents[2] / "docs" / "migrate"
READ = [one for one in DIALECTS if one.rows]


def fences(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("dialect", READ, ids=lambda one: one.name)
def test_tables_are_the_dialects_own(dialect) -> None:
    page = (PAGES / f"{dialect.name}.md").read_text()
    assert f"<!-- maps begin -->\n{dialect.table()}<!-- maps end -->" in page
    assert f"<!-- refused begin -->\n{dialect.refused_table()}<!-- refused end -->" in page


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "dialect", [one for one in READ if one.name not in ELSEWHERE], ids=lambda one: one.name
)
def test_before_becomes_after_and_trains_the_same(dialect, tmp_path: Path) -> None:
    page = (PAGES / f"{dialect.name}.md").read_text()
    before, after = fences(page, "py")
    (config,) = fences(page, "yaml")
    migration = migrate_source(before)
    assert migration.code == after
    assert yaml.safe_load(config) == dict(migration.config)
    (tmp_path / "train.py").write_text(before)
    proof = verify(
        tmp_path, "train.py", {"train.py": after}, config, launcher=migration.launcher, timeout=180
    )
    assert proof.difference <= 1e-6
    assert all(len(losses) > 10 for losses in proof.original.values())
