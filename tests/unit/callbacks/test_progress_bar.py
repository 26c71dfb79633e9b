"""The progress bar: on a terminal, in a log file, when interrupted; and what it costs."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from unipar.callbacks import History, ProgressBar, RunResult

pytestmark = pytest.mark.usefixtures("forked_programs")

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


def plain_bar():
    out = io.StringIO()
    return ProgressBar(Console(file=out, width=200)), out


def result_of(records, run):
    return RunResult(
        metrics={"train_loss": records[-1].loss},
        history=History(records),
        evaluations=[(50, {"loss": 0.5}), (100, {"loss": 0.25, "accuracy": 0.9375})],
        checkpoint=run.output_dir / "step-00000100",
        items_per_second=64321.0,
        peak_memory=[3 * 2**28, 2**30],
        wall_time=3725.4,
        output_dir=run.output_dir,
    )


def test_a_log_file_gets_a_line_a_tenth_of_the_run(make_run, make_record):
    bar, out = plain_bar()
    run = make_run()
    bar.on_run_start(run)
    for step in range(1, 101):
        bar.on_step_end(run, make_record(step))
    bar.on_evaluate_end(run, 100, {"loss": 0.25, "accuracy": 0.9375})
    bar.on_run_end(run, None)
    lines = out.getvalue().splitlines()
    assert lines[0] == "ddp on 2 x cpu: 1.2M parameters, 100 steps of 64 samples"
    shown = [int(match[1]) for line in lines if (match := re.search(r"step (\d+)/100", line))]
    assert shown == [1, *range(10, 101, 10)]
    assert "epoch 1/2  step 10/100  loss 0.4000  grad norm 0.5  64.0k items/s" in lines[2]
    assert "peak 768 MiB" in lines[2]
    assert "left" in lines[2]
    assert lines[-1] == "step 100: evaluation  loss 0.25  accuracy 0.9375"
    assert "\x1b" not in out.getvalue()


def test_without_a_known_end_the_last_step_is_still_shown(make_run, make_record):
    bar, out = plain_bar()
    run = make_run(total_steps=None, epochs=None, start_step=40)
    bar.on_run_start(run)
    for step in range(41, 48):
        bar.on_step_end(run, make_record(step, grad_norm=None))
    bar.on_run_end(run, None)
    lines = out.getvalue().splitlines()
    assert lines[0].endswith("training from step 40 of 64 samples")
    assert [line.split("  loss")[0] for line in lines[1:]] == [
        "epoch 1  step 41",
        "epoch 1  step 47",
    ]
    assert "grad norm" not in out.getvalue()
    assert "left" not in out.getvalue()


def test_the_closing_table(make_run, make_record):
    bar, out = plain_bar()
    run = make_run()
    records = [make_record(step) for step in range(1, 101)]
    bar.on_run_start(run)
    for record in records:
        bar.on_step_end(run, record)
    bar.on_run_end(run, result_of(records, run))
    rows = dict(re.findall(r"│ (.+?) +│ (.+?) +│", out.getvalue()))
    assert rows == {
        "strategy": "ddp",
        "world size": "2 x cpu",
        "steps": "100",
        "final loss": "0.0400",
        "evaluation loss": "0.25 (step 100)",
        "evaluation accuracy": "0.9375 (step 100)",
        "items/s": "64.3k",
        "peak memory per rank": "768 MiB, 1.0 GiB",
        "wall time": "1:02:05",
    }
    # Below the table, whole however long they are.
    places = [line.split() for line in out.getvalue().splitlines()[-2:]]
    assert places == [
        ["checkpoint", str(run.output_dir / "step-00000100")],
        ["output", str(run.output_dir)],
    ]


def test_a_failed_run_has_no_table(make_run, make_record):
    bar, out = plain_bar()
    run = make_run()
    bar.on_run_start(run)
    bar.on_step_end(run, make_record(1))
    bar.on_step_end(run, make_record(2))
    bar.on_exception(run, RuntimeError("boom"))
    bar.on_run_end(run, None)
    assert "step 2/100" in out.getvalue().splitlines()[-1]
    assert "finished" not in out.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_step_that_draws_nothing_is_cheap(make_run, make_record, terminal):
    bar = ProgressBar(Console(file=io.StringIO(), force_terminal=terminal, width=100))
    run = make_run(total_steps=10**7)
    record = make_record(2)
    bar.on_run_start(run)
    bar.on_step_end(run, make_record(1))
    best = float("inf")
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(500):
            bar.on_step_end(run, record)
        best = min(best, (time.perf_counter() - begin) / 500)
    bar.on_run_end(run, None)
    assert best < 5e-6


WRITE = 0.02


class SlowTerminal(io.StringIO):
    def write(self, text):
        time.sleep(WRITE)
        return super().write(text)


def test_a_slow_terminal_is_drawn_on_less_often(make_run, make_record):
    bar = ProgressBar(Console(file=SlowTerminal(), force_terminal=True, width=100))
    run = make_run(total_steps=10**7)
    bar.on_run_start(run)
    view = bar._view
    assert view is not None
    for step in (1, 2):
        begin = time.monotonic()
        view.show(make_record(step), begin)
        assert view.next_time - begin >= 90 * WRITE
    bar.on_run_end(run, None)


SCRIPT = """
import sys, time
from pathlib import Path
from unipar.callbacks import ProgressBar, RunInfo, StepRecord

run = RunInfo("fsdp", 4, "cpu", {total}, 3, 64, 5_000_000, Path("runs/x"))
bar = ProgressBar()
bar.on_run_start(run)
try:
    for step in range(1, 21):
        time.sleep(0.03)
        bar.on_step_end(run, StepRecord(step, 0, 1.5, 0.25, 1e-3, 64, 64, 0.03, 2**30))
        if step == 3:
            print("said by the script")
        {middle}
    bar.on_evaluate_end(run, 20, {{"loss": 1.25}})
except BaseException as error:
    bar.on_exception(run, error)
    raise
finally:
    {end}
print("the end", file=sys.stderr)
"""


class Terminal:
    """A script whose standard error is a terminal; its standard output too, or a file."""

    def __init__(self, script: str, stdout: Path | None = None) -> None:
        self.own, child = pty.openpty()
        environment = os.environ | {"COLUMNS": "100", "LINES": "30", "TERM": "xterm-256color"}
        with open(stdout, "wb") if stdout else os.fdopen(os.dup(child), "wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", script],
                stdin=child,
                stdout=out,
                stderr=child,
                env=environment,
                start_new_session=True,
            )
        os.close(child)
        self.text = ""

    def read(self, until: str = "", timeout: float = 60) -> str:
        end = time.monotonic() + timeout
        while time.monotonic() < end and (not until or until not in self.text):
            if not select.select([self.own], [], [], 0.2)[0]:
                continue
            try:
                data = os.read(self.own, 65536)
            except OSError:  # what Linux says when the other side has closed
                break
            if not data:
                break
            self.text += data.decode(errors="replace")
        return self.text

    def close(self) -> int:
        self.read()
        os.close(self.own)
        return self.process.wait(10)


def cursor_is_visible(text: str) -> bool:
    return text.rfind(HIDE) < text.rfind(SHOW)


def test_on_a_terminal(tmp_path):
    script = SCRIPT.format(total=20, middle="pass", end="bar.on_run_end(run, None)")
    terminal = Terminal(script)
    assert terminal.close() == 0
    lines = [line.rstrip() for line in ESCAPE.sub("", terminal.text).splitlines()]
    assert "said by the script" in lines
    assert "step 20: evaluation  loss 1.25" in lines
    assert lines[-1] == "the end"
    last = [line for line in lines if "step 20/20" in line][-1]
    assert last.startswith("epoch 1/3  step 20/20")
    assert "elapsed, 0:00 left" in last
    assert any("loss 1.5000  grad norm 0.25" in line and "peak 1.0 GiB" in line for line in lines)
    assert cursor_is_visible(terminal.text)


def test_output_sent_to_a_file_stays_there(tmp_path):
    script = SCRIPT.format(total=20, middle="pass", end="bar.on_run_end(run, None)")
    terminal = Terminal(script, tmp_path / "out.txt")
    assert terminal.close() == 0
    assert (tmp_path / "out.txt").read_text() == "said by the script\n"
    assert "said by the script" not in terminal.text


@pytest.mark.parametrize(
    ("number", "end"),
    [
        (signal.SIGINT, "bar.on_run_end(run, None)"),
        (signal.SIGINT, "pass"),
        (signal.SIGKILL, "pass"),
    ],
    ids=["ctrl-c", "ctrl-c without an end", "kill -9"],
)
def test_the_terminal_is_sane_after(number, end):
    script = SCRIPT.format(total=10_000, middle="step > 5 and time.sleep(60)", end=end)
    terminal = Terminal(script)
    assert "step 1/10000" in terminal.read(until="step 1/10000")
    time.sleep(0.3)
    terminal.process.send_signal(number)
    assert terminal.close() == -number
    assert cursor_is_visible(terminal.text)
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in terminal.text


def test_the_terminal_is_sane_after_an_exception():
    script = SCRIPT.format(total=10_000, middle="1 / (5 - step)", end="pass")
    terminal = Terminal(script)
    assert terminal.close() == 1
    assert cursor_is_visible(terminal.text)
    text = ESCAPE.sub("", terminal.text)
    assert text.index("step 5/10000") < text.index("ZeroDivisionError")


def test_names_are_shown_as_they_are(make_run, make_record):
    bar, out = plain_bar()
    run = make_run(strategy="ddp:a=[red]")
    bar.on_run_start(run)
    bar.on_step_end(run, make_record(100))
    bar.on_evaluate_end(run, 100, {":bug:[/]": 0.5})
    result = result_of([make_record(100)], run)
    result.evaluations.append((100, {":bug:[/]": 0.5}))
    bar.on_run_end(run, result)
    text = out.getvalue()
    assert "step 100: evaluation  :bug:[/] 0.5\n" in text
    assert "evaluation :bug:[/]  " in text
    assert text.count("ddp:a=[red]") == 2
