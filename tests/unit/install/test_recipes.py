"""What follows from a recipe alone: who can live with whom, and which wheel is whose."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from unipar.errors import ConfigError, InstallError
from unipar.install import Build, Edit, Extra, Pip, Program, Python, Recipe, cache
from unipar.install.build import apply
from unipar.install.commands import Command, Runner
from unipar.install.plan import plan


def _recipe(name: str, needs: dict[str, str] | None = None, alone: str = "") -> Recipe:
    return Recipe(name, name.title(), (Pip((name,)),), needs=needs or {}, alone=alone)


BUILD = Build("thing", "1.0", "0" * 64, environment={"THING_FLAG": "1"}, sensitive=("THING_",))


def test_frameworks_that_need_different_versions_cannot_share() -> None:
    old, new = _recipe("old", {"dep": "1.0"}), _recipe("new", {"dep": "2.0"})
    neither = _recipe("neither")
    assert not old.can_share(new)
    assert old.can_share(neither)
    assert neither.can_share(old)
    assert old.can_share(_recipe("same", {"dep": "1.0"}))


def test_a_framework_that_wants_to_be_alone_shares_with_none() -> None:
    alone, other = _recipe("alone", alone="it pins what all others use"), _recipe("other")
    assert not alone.can_share(other)
    assert not other.can_share(alone)


def test_extras_come_after_the_framework_or_alone_where_it_is_there() -> None:
    step = Python(("-m", "thing.fast"), "compile what is fast")
    fast = Extra("fast", "what is fast", (step,), (Program(("c++",), "g++"),))
    recipe = replace(_recipe("thing"), extras=(fast,))
    assert recipe.including([]) == recipe
    whole = recipe.including(["fast", "fast"])
    assert whole.steps == (*recipe.steps, step)
    assert whole.programs == fast.programs
    assert recipe.including(["fast"], only=True).steps == (step,)
    with pytest.raises(ConfigError, match=r"no extra 'fest'.*'fast'.*fast \(what is fast\)"):
        recipe.including(["fest"])


def test_torch_is_pinned_to_what_is_there() -> None:
    (install, _) = plan(_recipe("thing"))
    assert install.shell[0].endswith(f"thing torch=={cache.torch_version()}")


def test_each_torch_python_and_set_of_flags_has_a_wheel_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = cache.wheel_directory(BUILD)
    assert first.is_relative_to(tmp_path / "unipar" / "wheels")
    found = {first}
    found.add(cache.wheel_directory(replace(BUILD, environment={"THING_FLAG": "2"})))
    found.add(cache.wheel_directory(replace(BUILD, edits=(Edit("f", "a", "b", "why"),))))
    found.add(cache.wheel_directory(replace(BUILD, version="1.1")))
    monkeypatch.setenv("CXXFLAGS", "-O0")
    found.add(cache.wheel_directory(BUILD))
    monkeypatch.delenv("CXXFLAGS")
    monkeypatch.setenv("THING_OTHER", "1")
    found.add(cache.wheel_directory(BUILD))
    monkeypatch.delenv("THING_OTHER")
    monkeypatch.setattr(cache, "torch_version", lambda: "9.9.9")
    found.add(cache.wheel_directory(BUILD))
    assert len(found) == 7
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.wheel_directory(BUILD) == first


@pytest.mark.parametrize(("text", "count"), [("a = 1", 0), ("x x", 2)])
def test_an_edit_must_find_its_text_once(tmp_path: Path, text: str, count: int) -> None:
    (tmp_path / "file.cc").write_text(text)
    with pytest.raises(InstallError, match=f"{count} times"):
        apply(Edit("file.cc", "x", "y", "why"), tmp_path)
    assert (tmp_path / "file.cc").read_text() == text


def test_an_edit_of_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match=r"file\.cc"):
        apply(Edit("file.cc", "x", "y", "why"), tmp_path)


def test_a_failure_shows_the_compilers_first_error_and_the_last_lines(tmp_path: Path) -> None:
    script = "import sys\nprint('a.cc:7:1: fatal error: mpi.h: No such file')\n"
    script += "for i in range(100): print('line', i)\nsys.exit(3)"
    run = Runner(tmp_path / "log", lambda line: None)
    with pytest.raises(InstallError) as failed:
        run(Command((sys.executable, "-c", script)))
    text = str(failed.value)
    assert "exit code 3" in text
    assert "a.cc:7:1: fatal error: mpi.h" in text
    assert "line 99" in text
    assert "line 50" not in text
    assert f"The whole log: {tmp_path / 'log'}" in text


def test_a_command_that_takes_too_long_is_ended_with_all_it_has_started(
    tmp_path: Path, still_running
) -> None:
    script = f"sh -c 'echo $$ > {tmp_path}/pid; sleep 600'; true"
    run = Runner(tmp_path / "log", lambda line: None)
    with pytest.raises(InstallError, match="took longer than 3 s"):
        run(Command(("sh", "-c", script)), timeout=3)
    assert still_running([int((tmp_path / "pid").read_text())]) == []
