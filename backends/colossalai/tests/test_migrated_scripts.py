"""Scripts for Colossal-AI train the same before and after `unipar migrate`.

The originals run through ``patched_colossalai.py``, since the published Colossal-AI does not run
on a CPU; it changes what unipar's backend changes, and nothing else.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from unipar.migrate import migrate_files
from unipar.migrate.verify import Proof, losses_of

ROOT = Path(__file__).resolve().parents[3]
CORPUS = ROOT / "tests" / "migrate" / "corpus" / "colossalai"
PAGE = ROOT / "docs" / "migrate" / "colossalai.md"
PATCHED = Path(__file__).parent / "patched_colossalai.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
QUICK = ("zero", "llama")
PROGRAMS = sorted(path.parent.name for path in CORPUS.glob("*/train.py"))


def prove(root: Path, files: Mapping[str, str], config: Mapping[str, Any]) -> Proof:
    """Run a program as it is and rewritten, both on the host."""
    plugin = config["strategy"]["plugin"]
    settings = {"unipar.yaml": yaml.safe_dump({**config, "device": "cpu"})}
    return Proof(
        losses_of(root, "train.py", {}, [*TORCHRUN, str(PATCHED), plugin], timeout=180),
        losses_of(root, "train.py", {**files, **settings}, TORCHRUN, timeout=180),
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "program",
    [
        program if program in QUICK else pytest.param(program, marks=pytest.mark.thorough)
        for program in PROGRAMS
    ],
)
def test_losses_are_equal_before_and_after(program: str) -> None:
    root = CORPUS / program
    migrations = migrate_files({path.name: path.read_text() for path in root.glob("*.py")})
    files = {name: one.code for name, one in migrations.items()}
    proof = prove(root, files, migrations["train.py"].config)
    assert proof.difference <= 1e-6
    assert sorted(proof.original) == [0, 1]
    assert all(len(set(losses)) >= 10 for losses in proof.original.values())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_one_field_changes_what_runs_a_migrated_script() -> None:
    root = CORPUS / "zero"
    migrations = migrate_files({"train.py": (root / "train.py").read_text()})
    main = migrations["train.py"]
    files = {"train.py": main.code}
    settings = {**main.config, "device": "cpu"}
    under = {
        name: losses_of(
            root,
            "train.py",
            {**files, "unipar.yaml": yaml.safe_dump({**settings, "strategy": strategy})},
            TORCHRUN,
            timeout=180,
        )
        for name, strategy in (("colossalai", settings["strategy"]), ("ddp", "ddp"))
    }
    assert Proof(under["colossalai"], under["ddp"]).difference <= 1e-5


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_migrated_script_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    text = (CORPUS / "zero" / "train.py").read_text()
    main = migrate_files({"train.py": text})["train.py"]
    (tmp_path / "train.py").write_text(main.code)
    (tmp_path / "unipar.yaml").write_text(yaml.safe_dump({**main.config, "device": "cpu"}))
    place = str(tmp_path / "kept")
    first = losses_of(
        tmp_path, "train.py", {}, TORCHRUN, arguments=["--checkpoints", place], timeout=180
    )
    assert sorted(os.listdir(place)) == ["model.pt", "optimizer.pt", "scheduler.pt"]
    again = losses_of(
        tmp_path, "train.py", {}, TORCHRUN, arguments=["--resume", "--checkpoints", place],
        timeout=180,
    )  # fmt: skip
    for rank, losses in again.items():
        assert losses == pytest.approx(first[rank][6:], rel=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_pages_example_trains_the_same(tmp_path: Path) -> None:
    page = PAGE.read_text()
    before, after = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (config,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    migration = migrate_files({"train.py": before})["train.py"]
    assert migration.code == after
    assert yaml.safe_load(config) == dict(migration.config)
    (tmp_path / "train.py").write_text(before)
    proof = prove(tmp_path, {"train.py": after}, migration.config)
    assert proof.difference <= 1e-6
    assert all(len(losses) > 10 for losses in proof.original.values())
