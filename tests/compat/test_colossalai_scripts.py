"""Scripts for Colossal-AI under strategies that its own environment has not.

That ``ddp`` has Colossal-AI's losses is proved where Colossal-AI is, in its backend's tests.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest

from unipar.errors import ConfigError
from unipar.migrate import migrate_source
from unipar.migrate.launchers import command
from unipar.migrate.verify import Proof, losses_of

# Of two scripts it is always proved, there, under Colossal-AI itself and under fsdp.
pytestmark = [
    pytest.mark.usefixtures("forked_programs"), pytest.mark.slow, pytest.mark.thorough,
    pytest.mark.timeout(400),
]  # fmt: skip

CORPUS = Path(__file__).parent / "corpus" / "colossalai"
TORCHRUN = command("torchrun", 2)
PROGRAMS = sorted({path.stem for path in CORPUS.glob("*.py")} - {"processes"})
REFUSED = {
    "adversarial": "strategy 'zero2' holds one model in a session",
    "checkpointing": "strategy 'zero2' holds one model in a session",
}


@functools.cache
def migrated(name: str) -> str:
    return migrate_source((CORPUS / f"{name}.py").read_text()).code


def under(name: str, strategy: str, root: Path = CORPUS) -> dict[int, list[float]]:
    return losses_of(
        root, f"{name}.py", {f"{name}.py": migrated(name)}, TORCHRUN, timeout=180, steps=30,
        environ={"UNIPAR_STRATEGY": strategy},
    )  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_losses_under_zero2_are_those_under_ddp(name: str) -> None:
    if name in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[name]):
            under(name, "zero2")
        return
    proof = Proof(under(name, "ddp"), under(name, "zero2"))
    assert proof.difference <= (1e-5 if name != "gemini" else 2e-2)
    assert all(len(set(losses)) >= 8 for losses in proof.original.values())


def test_a_script_may_start_its_processes_itself(tmp_path: Path) -> None:
    """``launch`` tells each its rank, as a launcher's variables would."""
    script = tmp_path / "processes.py"
    script.write_text(migrated("processes"))
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    ends = [(tmp_path / f"rank-{rank}.txt").read_text().split() for rank in range(2)]
    assert ends[0][0] != ends[1][0], "each has data of its own"
    assert ends[0][1] == ends[1][1], "all have the same weights"
