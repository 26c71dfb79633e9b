from __future__ import annotations

import time

import pytest

from unipar.launch import mark
from unipar.launch.rank_names import behind
from unipar.utils import progress_marks
from unipar.utils.progress_marks import Mark


def test_outside_a_worker_a_mark_does_nothing():
    mark(3, "forward")


def test_the_last_mark_is_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(progress_marks, "_buffer", None)
    path = tmp_path / "mark"
    assert progress_marks.read_mark(path) is None
    progress_marks.open_marks(path)
    assert progress_marks.read_mark(path) is None
    mark(3, "forward")
    mark(7, "a phase whose name is longer than the room for it")
    found = progress_marks.read_mark(path)
    assert found is not None
    assert found.step == 7
    assert found.phase == "a phase whose name is longer tha"
    assert found.count == 2
    assert found.time == pytest.approx(time.monotonic(), abs=5)


def test_a_mark_costs_next_to_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(progress_marks, "_buffer", None)
    progress_marks.open_marks(tmp_path / "mark")
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for step in range(1, 10_001):
            mark(step, "forward")
        best = min(best, (time.perf_counter() - began) / 10_000)
    # Seen: 0.4 microseconds. The bound only catches a mistake, such as a write to a file.
    assert best < 5e-6
    print(f"{best * 1e9:.0f} ns")


def test_without_a_file_marks_stay_in_the_process(monkeypatch):
    monkeypatch.setattr(progress_marks, "_buffer", None)
    assert progress_marks.own_mark() is None
    progress_marks.open_marks(None)
    assert not progress_marks.watched()
    mark(2, "backward")
    found = progress_marks.own_mark()
    assert found is not None
    assert (found.step, found.phase, found.count) == (2, "backward", 1)


def at(count: int) -> Mark:
    return Mark(1, "", 0.0, count)


@pytest.mark.parametrize(
    ("marks", "rank"),
    [
        ({0: at(9), 1: at(8)}, 1),
        ({0: at(9), 1: None}, 1),
        ({0: at(9), 1: at(9)}, None),
        ({0: at(8), 1: at(9), 2: at(8)}, None),
        ({0: at(9)}, None),
    ],
)
def test_the_one_rank_that_has_come_less_far(marks, rank):
    assert behind(marks) == rank
