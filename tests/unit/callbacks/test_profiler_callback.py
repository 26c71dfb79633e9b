"""The profiler writes a trace of the steps it was asked for, on each rank."""

from __future__ import annotations

import gzip
import json

import pytest
import torch

from unipar.callbacks import Profiler
from unipar.errors import ConfigError


def train(callback, run, make_record, steps):
    callback.on_run_start(run)
    for step in steps:
        with torch.profiler.record_function(f"marker {step}"):
            torch.mm(torch.ones(4, 4), torch.ones(4, 4))
        callback.on_step_end(run, make_record(step))


def traced_steps(path):
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    return sorted(int(name.split()[1]) for name in names if name.startswith("marker"))


@pytest.mark.parametrize(
    ("start", "skip", "expected"), [(0, 2, [3, 4]), (0, 0, [1, 2]), (10, 1, [12, 13])]
)
def test_the_steps_asked_for(make_run, make_record, start, skip, expected):
    run = make_run(start_step=start, rank=1)
    callback = Profiler(skip=skip, steps=2)
    assert callback.every_rank
    train(callback, run, make_record, range(start + 1, start + 6))
    assert traced_steps(run.output_dir / "profile" / "rank-1.json.gz") == expected


def test_a_run_that_ends_early_leaves_what_there_is(make_run, make_record):
    run = make_run()
    callback = Profiler(skip=1, steps=10)
    train(callback, run, make_record, range(1, 4))
    callback.on_run_end(run, None)
    assert traced_steps(run.output_dir / "profile" / "rank-0.json.gz") == [2, 3]


def test_impossible_steps():
    with pytest.raises(ConfigError, match="steps at least 1"):
        Profiler(steps=0)
