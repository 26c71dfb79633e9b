"""A forked program has what a new interpreter would have been given."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# What a new interpreter has not.
FORKED = "import sys; assert 'torch' in sys.modules; "


def run(*command: str, **options) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=60, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("held", [0, 20])
def test_descriptors_have_their_numbers_and_are_closed_with_it(held: int) -> None:
    reading, writing = os.pipe()
    # So that their numbers are other ones than those that a process gives first.
    more = [os.dup(writing) for _ in range(held)]
    passed = more[-1] if more else writing
    run("-c", f"{FORKED}import os; os.write({passed}, b'here')", pass_fds=[passed])
    for descriptor in (writing, *more):
        os.close(descriptor)
    with open(reading) as end:
        # Which there would be none of if a process still held it.
        assert end.read() == "here"


def test_it_ends_before_its_daemons() -> None:
    # As a script does that leaves a loader's iterator to the end, whose workers end after it.
    lines = [
        f"{FORKED}import multiprocessing, time",
        "fork = multiprocessing.get_context('fork')",
        "fork.Process(target=time.sleep, args=[600], daemon=True).start()",
        "print('end')",
    ]
    assert run("-c", "\n".join(lines)) == "end\n"


def test_what_acts_when_an_interpreter_starts_does(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('started')\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert run("-c", f"{FORKED}print('here')", env=environ) == "started\nhere\n"


def test_one_that_is_isolated_finds_no_modules_of_the_callers(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("print('mine')\n")
    program = tmp_path / "program.py"
    program.write_text(f"{FORKED}import importlib.util as u; print(u.find_spec('mine') is None)")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert run(str(program), env=environ) == "False\n"
    assert run("-I", str(program), env=environ) == "True\n"
