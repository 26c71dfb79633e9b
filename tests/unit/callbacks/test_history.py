"""A long run's history takes little memory, and none of its losses is lost."""

from __future__ import annotations

import pickle
import tracemalloc

import pytest

from unipar.callbacks import History


def test_every_loss_is_kept_and_the_newest_records(make_record, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(History, "LIMIT", 4)
    history = History()
    assert not history
    for step in range(1, 11):
        history.append(make_record(step, num_items=step, seconds=0.5))
    assert history.losses == [4.0 / step for step in range(1, 11)]
    assert [record.step for record in history] == [7, 8, 9, 10]
    assert (len(history), history[-1].step, history[0].step) == (4, 10, 7)
    assert [record.step for record in history[1:3]] == [8, 9]
    assert [record.step for record in history[::-2]] == [10, 8]
    assert (history.num_items, history.seconds) == (55, 5.0)
    again = pickle.loads(pickle.dumps(history))
    assert again == history
    again.append(make_record(11))
    assert (again != history, len(again)) == (True, 4)


def test_memory_does_not_grow_with_records(make_record, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(History, "LIMIT", 100)
    history = History(make_record(step) for step in range(1, 101))
    tracemalloc.start()
    for step in range(101, 5101):
        history.append(make_record(step))
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(history.losses) == 5100
    assert grown < 5000 * 16 + 2**16
