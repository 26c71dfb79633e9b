"""What the README and the docs say is run as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)

# These need what a test cannot have, or do what other tests do: set-up from nothing, a cluster.
NOT_RUN = ("make ", "pip install", "torchrun", "srun", "mpirun", "horovodrun", "pytest ")


def blocks(page: Path, *languages: str) -> list[str]:
    found = FENCE.finditer(page.read_text())
    return [match["code"] for match in found if match["language"] in languages]


def commands(page: Path) -> list[str]:
    lines = [
        line.split("#")[0].strip()
        for block in blocks(page, "sh", "console")
        for line in block.splitlines()
    ]
    return [line for line in lines if line and not line.startswith(NOT_RUN)]


def to_run(page: Path) -> list[str]:
    """Its commands; what works on no code of the page's own, only for the first that has it."""
    if blocks(page, "python"):
        return commands(page)
    earlier = {line for other in PAGES[: PAGES.index(page)] for line in commands(other)}
    return [line for line in commands(page) if line not in earlier]


# The command of the one is that of doctor.md, for every strategy at once; what the other runs,
# tests of the benchmark run likewise.
THOROUGH = [ROOT / "docs" / "gpu.md", ROOT / "docs" / "how-to" / "bench.md"]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run(command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300
    )


# A self-test of every strategy, which a page asks for, takes three minutes on two cores.
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.thorough] if page in THOROUGH else [])
        for page in PAGES
        if blocks(page, "python") or to_run(page)
    ],
    ids=named,
)
def test_python_blocks_and_then_commands_run_in_order(page: Path, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    script = tmp_path / "blocks.py"
    script.write_text("\n".join(blocks(page, "python")))
    # The commands work on what the page's own code leaves.
    programs = [[sys.executable, str(script)]] if script.stat().st_size else []
    for command in [*programs, *(line.split() for line in to_run(page))]:
        done = run(command, tmp_path)
        said = f"{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
        assert done.returncode == 0, f"{' '.join(command)}\n{said}"


def test_both_sides_of_the_readmes_diff_train(tmp_path: Path) -> None:
    (diff,) = blocks(ROOT / "README.md", "diff")
    for side in "-+":
        script = tmp_path / f"{'before' if side == '-' else 'after'}.py"
        lines = [line for line in diff.splitlines() if line[:1] in ("", " ", side)]
        script.write_text("\n".join(line[1:] for line in lines))
        # The page seeds nothing, and a few steps of any data need not bring the loss down.
        seeded = "import runpy, torch; torch.manual_seed(0); runpy.run_path({!r})"
        done = run([sys.executable, "-c", seeded.format(str(script))], tmp_path)
        assert done.returncode == 0, done.stderr
        losses = [float(line) for line in done.stdout.splitlines()]
        assert len(losses) == 8
        assert losses[-1] < losses[0]


def test_tables_are_what_the_code_says() -> None:
    done = run([sys.executable, str(ROOT / "measure" / "pages" / "generate.py"), "--check"], ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{named(page)}: {target}"
