"""What starts a script in several processes for the proof."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from unipar.launch.detection import detect
from unipar.migrate import ranks
from unipar.migrate.launchers import command


def start(tmp_path: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(script)
    return subprocess.run(
        [*command("torchrun", 2), "train.py", *arguments],
        cwd=tmp_path, timeout=60, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_each_process_finds_what_torchrun_would_have_told_it(tmp_path: Path) -> None:
    script = (
        "import json, os, sys\n"
        "with open(f'{os.environ[\"RANK\"]}.json', 'w') as file:\n"
        "    json.dump([dict(os.environ), sys.argv], file)\n"
    )
    done = start(tmp_path, script, "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, (variables, argv) in enumerate(told):
        placement = detect(variables)
        assert placement is not None
        assert (placement.rank, placement.local_rank) == (rank, rank)
        assert (placement.size, placement.local_size, placement.num_nodes) == (2, 2, 1)
        assert argv == ["train.py", "--lr", "0.1"]
    (first, _), (second, _) = told
    assert first["MASTER_PORT"] == second["MASTER_PORT"]


@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", 137)]
)
def test_a_rank_that_fails_ends_the_others(
    end: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        f"if os.environ['RANK'] == '1': {end}\n"
        "time.sleep(2)\n"
        f"pathlib.Path({str(tmp_path)!r}, 'ended').touch()\n"
    )
    monkeypatch.setattr(ranks, "_REST", 0.1)
    assert ranks.main(["2", str(script)]) == code
    assert not (tmp_path / "ended").exists()


def test_only_the_standard_library_is_imported() -> None:
    code = "import sys; import ranks; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(ranks.__file__).parent, timeout=60, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert not {"torch", "unipar", "numpy"} & set(done.stdout.split())
