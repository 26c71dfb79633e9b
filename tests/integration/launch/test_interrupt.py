"""Ctrl-C, and the end of the launching process."""

from __future__ import annotations

import signal
import time

import pytest
from interrupting import interrupt

pytestmark = pytest.mark.timeout(120)

PLAIN = """
def fn(placement):
    with joined(placement) as world:
        for step in range(1, 10**6):
            dist.all_reduce(torch.ones(1))
            (here / f"ready-{world.rank}").touch()
            time.sleep(0.01)
run(fn, devices=2)
"""
SAVING = """
def fn(placement):
    stop = []
    signal.signal(signal.SIGINT, lambda *_: stop.append(1))
    with joined(placement) as world:
        flag = torch.zeros(1)
        while not flag.item():
            flag.fill_(len(stop))
            dist.all_reduce(flag)
            (here / f"ready-{world.rank}").touch()
            time.sleep(0.01)
        time.sleep(0.5)
        (here / f"saved-{world.rank}").touch()
try:
    run(fn, devices=2)
except KeyboardInterrupt:
    print("interrupted")
"""
STUBBORN = """
def fn(placement):
    signal.signal(signal.SIGINT, lambda *_: (here / f"asked-{placement.rank}").touch())
    (here / f"ready-{placement.rank}").touch()
    while True:
        time.sleep(1)
try:
    run(fn, devices=2)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_ends_a_plain_function_without_noise(script):
    process = script.start(
        "try:\n"
        + "".join(f"    {line}\n" for line in PLAIN.splitlines())
        + "except KeyboardInterrupt:\n    print('interrupted')\n"
    )
    script.wait_for("ready-0", "ready-1")
    interrupt(process)
    out, err = process.communicate(timeout=60)
    assert (out, err) == ("interrupted\n", "")


def test_workers_may_finish_their_step_and_save(script, tmp_path):
    process = script.start(SAVING)
    script.wait_for("ready-0", "ready-1")
    interrupt(process)
    assert process.communicate(timeout=60) == ("interrupted\n", "")
    assert (tmp_path / "saved-0").exists()
    assert (tmp_path / "saved-1").exists()


def test_ctrl_c_while_the_workers_start(script):
    process = script.start("(here / 'main').touch()\n" + STUBBORN)
    script.wait_for("main")
    time.sleep(0.8)
    interrupt(process)
    time.sleep(1.5)
    interrupt(process)
    out, err = process.communicate(timeout=60)
    assert (out, err) == ("interrupted\n", "")


def test_the_second_ctrl_c_ends_at_once(script):
    process = script.start(STUBBORN)
    script.wait_for("ready-0", "ready-1")
    interrupt(process)
    script.wait_for("asked-0", "asked-1")
    assert process.poll() is None
    interrupt(process)
    assert process.communicate(timeout=60) == ("interrupted\n", "")


def test_an_error_while_saving_is_not_hidden_by_the_interrupt(script):
    process = script.start("""
        def fn(placement):
            try:
                (here / f"ready-{placement.rank}").touch()
                time.sleep(60)
            except KeyboardInterrupt:
                raise CheckpointError("disk is full")
        try:
            run(fn, devices=2)
        except CheckpointError as error:
            print(error)
    """)
    script.wait_for("ready-0", "ready-1")
    interrupt(process)
    assert process.communicate(timeout=60) == ("disk is full\n", "")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGQUIT, 131)]
)
def test_workers_end_with_the_launching_process(script, number, code):
    process = script.start(PLAIN)
    script.wait_for("ready-0", "ready-1")
    process.send_signal(number)
    assert process.wait(timeout=60) == code
