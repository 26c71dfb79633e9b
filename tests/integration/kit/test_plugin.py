"""The plugin: out of the way of other test suites, and clear about what it wants."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest


def run_pytest(directory: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *args]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=150)


@pytest.mark.usefixtures("new_interpreters")
def test_plugin_imports_no_torch() -> None:
    code = "import sys, unipar.testing.plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.usefixtures("new_interpreters")
def test_another_suite_may_have_options_of_the_same_names(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--strategy', default='theirs')\n"
    )
    (tmp_path / "test_theirs.py").write_text(
        "import sys\n"
        "def test_theirs(request):\n"
        "    assert request.config.getoption('--strategy') == 'mine'\n"
        "    assert 'torch' not in sys.modules\n"
    )
    done = run_pytest(tmp_path, "--strategy", "mine")
    assert done.returncode == 0, done.stdout + done.stderr


def test_installed_strategy_is_proved_and_measured(tmp_path: Path) -> None:
    report = tmp_path / "parity.json"
    done = run_pytest(
        tmp_path,
        *("--pyargs", "unipar.testing", "--strategy", "single", "--world-sizes", "1,2"),
        *("-k", "equals_the_reference or refuses_the_world", "--parity-json", str(report)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    (row,) = json.loads(report.read_text())
    assert (row["strategy"], row["world_size"], row["precision"]) == ("single", 1, "fp32")
    assert max(row["loss"], row["grad_norm"], row["weights"]) <= 1e-5


@pytest.mark.thorough
def test_what_is_not_thorough_is_all_cases_on_one_number_of_ranks_and_some_on_others(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_mine.py").write_text(
        "from unipar.testing.test_conformance import test_conformance\n"
        "STRATEGIES = ['ddp', 'fsdp', 'single']\n"
        "BRIEF = ['fsdp']\n"
    )
    collect = ("test_mine.py", "--collect-only")
    everything = proofs(run_pytest(tmp_path, *collect).stdout)
    brief = proofs(run_pytest(tmp_path, *collect, "-m", "not thorough").stdout)
    assert brief < everything
    for main in ("ddp-2", "single-1"):
        assert {one for one in everything if one.startswith(main)} <= brief
    # Of four ranks some have no sample of the ragged batch.
    assert {"ddp-4-equals_the_reference", "ddp-1-follows_batch_statistics"} <= brief
    assert {"ddp-4-compiles", "ddp-1-compiles"} <= everything - brief
    # What is the same strategy with another option meets these, and no others.
    assert {"fsdp-4-resumes", "fsdp-2-equals_the_reference"} <= brief
    assert {"fsdp-4-compiles", "fsdp-2-compiles", "fsdp-1-compiles"} <= everything - brief
    assert "fsdp-1-equals_the_reference" in everything - brief


def proofs(collected: str) -> set[str]:
    return set(re.findall(r"test_conformance\[(.*)\]", collected))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        pytest.param(
            (),
            "pytest --pyargs unipar.testing --strategy NAME[:option=value,…]",
            marks=pytest.mark.thorough,
        ),
        (("--strategy", "fsd"), "Did you mean 'fsdp'?"),
        (("--strategy", "ddp", "--world-sizes", "two"), "give whole numbers from 1, like 1,2,4"),
    ],
)
def test_wrong_request_says_what_is_right(
    tmp_path: Path, args: tuple[str, ...], message: str
) -> None:
    done = run_pytest(tmp_path, "--pyargs", "unipar.testing", *args)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
    # What is wrong with a request is no error of ours, to be looked for in a traceback.
    assert "Traceback" not in done.stdout
    assert "selection.py" not in done.stdout
