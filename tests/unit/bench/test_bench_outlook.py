"""How many trials are done, and how long the rest takes."""

from __future__ import annotations

import os
from pathlib import Path

from unipar.benchmark.time_left import Tally, duration


def test_the_time_left_is_that_of_the_trials_that_have_ended(tmp_path: Path) -> None:
    trials = [tmp_path / str(number) for number in range(5)]
    tally = Tally(trials, least=3.0)
    assert tally.outlook.words == "0 of 5, at least 15 s left"
    tally.ended(trials[:1], 40.0)
    assert tally.outlook.words == "1 of 5, about 3 min left"
    # What has failed is not tried again.
    tally.ended(trials[1:4])
    assert tally.outlook.words == "4 of 5, about 40 s left"
    tally.ended(trials[4:], 50.0)
    assert tally.outlook.words == "5 of 5"


def test_an_earlier_call_says_how_long_a_trial_takes(tmp_path: Path) -> None:
    done = tmp_path / "done"
    done.mkdir()
    for name, when in (("request", 1000.0), ("answer", 1020.0)):
        (done / f"{name}.json").write_text("{}")
        os.utime(done / f"{name}.json", (when, when))
    assert Tally([done, tmp_path / "new"], least=1.0).outlook.words == "1 of 2, about 20 s left"


def test_durations_are_as_long_as_people_say_them() -> None:
    assert [duration(one) for one in (40, 700, 12600)] == ["40 s", "12 min", "3.5 h"]
