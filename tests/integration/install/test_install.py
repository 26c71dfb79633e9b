"""``unipar install`` of a framework that has to be built, as a user meets it."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
from madeup_backend import Home, make_home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return make_home(tmp_path)


def _missing(home: Home) -> bool:
    return not (home.site / "madeup.py").exists()


def test_builds_installs_checks_and_finds_the_wheel_again(home: Home):
    done = home.unipar("install", "madeup", "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "build a wheel of madeup 1.0 for torch" in done.stdout
    assert "Madeup 1.0 is installed and trains" in done.stdout
    assert (home.site / "madeup.py").read_text() == "WORKS = True\n"
    assert len(home.wheels) == 1
    assert "is here already" in home.unipar("install", "madeup").stdout
    again = home.unipar("install", "madeup", "--dry-run")
    assert str(home.wheels[0]) in again.stdout
    other = home.unipar("install", "madeup", "--dry-run", MADEUP_FLAG="1")
    assert "pip --disable-pip-version-check wheel" in other.stdout
    assert "wheel of another flag" not in other.stdout


def test_a_dry_run_prints_the_commands_and_does_nothing(home: Home):
    done = home.unipar("install", "madeup", "--dry-run")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any("pip --disable-pip-version-check wheel" in line for line in lines)
    assert any("WORKS = True" in line for line in lines)
    assert "unipar.install.smoke madeup" in lines[-1]
    assert _missing(home)
    assert not home.wheels


def test_asks_before_it_does_anything(home: Home):
    done = home.unipar("install", "madeup")
    assert done.returncode == 2
    assert "--yes" in done.stderr
    assert "1. build a wheel of madeup" in done.stdout
    assert _missing(home)


@pytest.mark.parametrize(
    ("variables", "code", "expected"),
    [
        ({"MADEUP_FAIL": "1"}, 1, ["madeup.cpp:7: error: no torch was found", "The whole log: "]),
        ({"MADEUP_SHA256": "0" * 64}, 1, ["SHA-256", "Nothing was built"]),
        ({"MADEUP_PROGRAM": "no-such-thing"}, 2, ["no-such-thing", "apt-get install dash"]),
        *(
            pytest.param(*one, marks=pytest.mark.thorough)
            for one in (
                ({"MADEUP_OLD": "NOT THERE"}, 1, ["madeup.py", "0 times", "'NOT THERE'"]),
                ({"MADEUP_NUMPY": "1.0"}, 2, ["needs numpy 1.0", "environment of its own"]),
                ({"XDG_CACHE_HOME": "/proc/nowhere"}, 2, ["XDG_CACHE_HOME"]),
            )
        ),
    ],
)
def test_what_fails_says_why_and_leaves_nothing(home: Home, variables, code, expected):
    done = home.unipar("install", "madeup", "--yes", **variables)
    assert done.returncode == code, done.stdout + done.stderr
    for text in expected:
        assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert _missing(home)
    assert not home.wheels


@pytest.mark.thorough
def test_a_framework_that_does_not_train_is_no_success(home: Home):
    done = home.unipar("install", "madeup", "--yes", MADEUP_BROKEN="1")
    assert done.returncode == 1
    assert "madeup was built wrongly" in done.stderr
    assert "The whole log: " in done.stderr


def test_an_interrupt_leaves_no_part_of_a_wheel_and_no_process(home: Home):
    process = subprocess.Popen(
        home.command("install", "madeup", "--yes"),
        env=home.environment(MADEUP_SLEEP="100"),
        cwd=home.root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    logs = home.root / "cache" / "unipar" / "logs"
    while process.poll() is None and not any(
        "metadata" in log.read_text() for log in logs.glob("*")
    ):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert not home.wheels
    assert not list((home.root / "cache" / "unipar" / "wheels").iterdir())
    assert _missing(home)
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert str(home.root) not in left.stdout


def test_a_name_that_is_no_strategy_or_needs_nothing(home: Home):
    unknown = home.unipar("install", "nothere")
    assert unknown.returncode == 2
    assert "pip install ./backends/<framework>" in unknown.stderr
    assert "madeup" in unknown.stderr
    nothing = home.unipar("install", "ddp")
    assert nothing.returncode == 2
    assert "needs nothing installed" in nothing.stderr
