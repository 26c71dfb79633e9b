"""The self-test: what is said of two lists of losses, and when runs do it by themselves."""

from __future__ import annotations

import io
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from unipar import Session, launch
from unipar.cli.doctor import doctor
from unipar.cli.selftest import show
from unipar.errors import ConfigError
from unipar.launch import once
from unipar.launch.comparison import Comparison
from unipar.launch.detection import launcher_variables
from unipar.launch.selftest import Outcome, compare
from unipar.strategy import registry
from unipar.world import Placement

DDP = registry.resolve("ddp")
GPU = Placement(device_type="cuda")


def compared(*losses: float, strategy: str = "ddp") -> Comparison:
    return Comparison(
        strategy=strategy,
        device="cpu",
        devices=1,
        precision="fp32",
        losses=list(losses),
        expected=[1.0] * len(losses),
        tolerance=1e-5,
    )


def outcome(*losses: float, strategy: str = "ddp") -> Outcome:
    found = compared(*losses, strategy=strategy)
    verdict = "agrees" if found.agrees else "differs"
    return Outcome(strategy=strategy, verdict=verdict, compared=found)


GOOD, BAD = outcome(1.0, 1.0), outcome(1.0, 1.25)


class Counting:
    """Stands for the comparison, which takes seconds; says what it is told to."""

    def __init__(self, *outcomes: Outcome, seconds: float = 0.0) -> None:
        self.asked: list[tuple[str, str, int]] = []
        self._outcomes, self._seconds = outcomes, seconds

    def __call__(self, strategy: str, device: str, devices: int) -> Outcome:
        self.asked.append((strategy, device, devices))
        time.sleep(self._seconds)
        return self._outcomes[min(len(self.asked), len(self._outcomes)) - 1]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "unipar" / "self-tests"


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Let ``nvidia-smi`` say what it is given."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)

    def say(text: str) -> None:
        program = programs / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho '{text}'\n")
        program.chmod(0o755)
        once.hardware.cache_clear()

    yield say
    once.hardware.cache_clear()


def test_the_step_that_is_told_is_the_first_that_differs_or_the_farthest() -> None:
    near = compared(1.0, 1.0 + 5e-6, 1.0 + 2e-6)
    assert near.agrees
    assert (near.step, near.apart) == (2, pytest.approx(5e-6))
    far = compared(1.0, 1.1, 2.0)
    assert not far.agrees
    assert (far.step, far.loss, far.expected_loss) == (2, 1.1, 1.0)
    assert "has loss 1.1; plain PyTorch has 1.0" in str(far)
    assert not compared(1.0, float("nan")).agrees
    assert not compared(1.0, float("inf")).agrees


def test_what_agrees_is_tried_once_for_each_strategy_and_size() -> None:
    test = Counting(GOOD)
    two = Placement(local_size=2)
    for strategy, placement in ((DDP, two), (DDP, two), (DDP, Placement())):
        once.ensure(strategy, placement, True, test=test)
    once.ensure(registry.resolve("ddp:static_graph=true"), two, True, test=test)
    assert test.asked == [("ddp", "cpu", 2), ("ddp", "cpu", 1), ("ddp:static_graph=true", "cpu", 2)]


def test_on_a_cpu_runs_do_it_only_where_they_are_asked_to(gpus: Callable[[str], None]) -> None:
    test = Counting(GOOD)
    once.ensure(DDP, Placement(), "auto", test=test)
    once.ensure(DDP, GPU, False, test=test)
    assert not test.asked
    gpus("NVIDIA H100 80GB HBM3, 580.159.04")
    once.ensure(DDP, GPU, "auto", test=test)
    assert test.asked == [("ddp", "cuda", 1)]


@pytest.mark.usefixtures("cache")
def test_another_driver_torch_or_version_is_another_machine(
    gpus: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    test = Counting(GOOD)
    gpus("NVIDIA H100 80GB HBM3, 580.159.04")
    once.ensure(DDP, GPU, "auto", test=test)
    gpus("NVIDIA H100 80GB HBM3, 581.0")
    once.ensure(DDP, GPU, "auto", test=test)
    monkeypatch.setattr("torch.__version__", "2.99.0")
    once.ensure(DDP, GPU, "auto", test=test)
    monkeypatch.setattr(registry, "versions", lambda name: {"unipar": "9.9"})
    once.ensure(DDP, GPU, "auto", test=test)
    once.ensure(DDP, GPU, "auto", test=test)
    assert len(test.asked) == 4


def test_what_differs_is_refused_with_both_losses_and_tried_again(cache: Path) -> None:
    test = Counting(BAD, GOOD)
    with pytest.raises(ConfigError) as refused:
        once.ensure(DDP, Placement(), True, test=test)
    for said in ("loss 1.25", "has 1.0", "step 2", "doctor --self-test", "self_test=False"):
        assert said in str(refused.value)
    assert len(list(cache.glob("*.json"))) == 1
    # What was wrong may have been put right.
    once.ensure(DDP, Placement(), True, test=test)
    once.ensure(DDP, Placement(), True, test=test)
    assert len(test.asked) == 2


def test_what_fails_is_refused_with_what_it_said() -> None:
    test = Counting(Outcome(strategy="ddp", verdict="failed", why="took longer than 3 s"))
    with pytest.raises(ConfigError, match=r"failed on this machine: took longer than 3 s"):
        once.ensure(DDP, Placement(), True, test=test)


def test_a_strategy_that_will_not_train_the_small_model_is_let_go_and_said_to_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    test = Counting(Outcome(strategy="ddp", verdict="refused", why="it takes Llama only"))
    with caplog.at_level(logging.WARNING, "unipar"):
        once.ensure(DDP, Placement(), True, test=test)
        once.ensure(DDP, Placement(), True, test=test)
    assert caplog.text.count("no self-test of 'ddp': it takes Llama only") == 2
    assert len(test.asked) == 1


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": {}, "at": 0}', "\0" * 99])
def test_a_damaged_file_means_that_it_is_tried_again(cache: Path, damage: str) -> None:
    test = Counting(GOOD)
    once.ensure(DDP, Placement(), True, test=test)
    (file,) = cache.glob("*.json")
    file.write_text(damage)
    once.ensure(DDP, Placement(), True, test=test)
    once.ensure(DDP, Placement(), True, test=test)
    assert len(test.asked) == 2


def test_a_file_of_something_else_is_not_believed(cache: Path) -> None:
    test = Counting(GOOD)
    once.ensure(DDP, Placement(), True, test=test)
    (file,) = cache.glob("*.json")
    record = json.loads(file.read_text())
    record["key"]["host"] = "elsewhere"
    file.write_text(json.dumps(record))
    once.ensure(DDP, Placement(), True, test=test)
    assert len(test.asked) == 2


@pytest.mark.parametrize("found", [GOOD, BAD], ids=["agrees", "differs"])
def test_of_the_processes_of_a_run_one_tries_it_and_all_are_told(found: Outcome) -> None:
    test = Counting(found, seconds=0.2)
    refused: list[bool] = []
    ready = threading.Barrier(3)

    def rank() -> None:
        ready.wait()
        try:
            once.ensure(DDP, Placement(local_size=3), True, test=test)
        except ConfigError:
            refused.append(True)
        else:
            refused.append(False)

    threads = [threading.Thread(target=rank) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(test.asked) == 1
    assert refused == [found is BAD] * 3


def test_where_nothing_can_be_kept_it_is_left_out_and_said_to_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    test = Counting(GOOD)
    with caplog.at_level(logging.WARNING, "unipar"):
        once.ensure(DDP, Placement(), True, test=test)
    assert not test.asked
    assert "no self-test of 'ddp': its outcome cannot be kept" in caplog.text
    assert "XDG_CACHE_HOME" in caplog.text


def test_what_cannot_be_written_down_counts_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(once, "_write", full)
    with pytest.raises(ConfigError, match="does not train on this machine as a plain loop does"):
        once.ensure(DDP, Placement(), True, test=Counting(BAD))
    assert "no space left on device" in caplog.text


def test_a_user_without_a_home_trains_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def homeless() -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("pathlib.Path.home", homeless)
    once.ensure(DDP, Placement(), True, test=Counting(GOOD))
    assert "Could not determine home directory. Set HOME" in caplog.text


def test_what_doctor_has_seen_runs_need_not_try() -> None:
    test = Counting(BAD)
    once.keep(DDP, GOOD)
    once.ensure(DDP, Placement(), True, test=test)
    # As it is typed, and as the option holds it.
    tuned = registry.resolve("ddp:bucket_cap_mb=3")
    once.keep(tuned, outcome(1.0, strategy="ddp:bucket_cap_mb=3"))
    once.ensure(tuned, Placement(), True, test=test)
    assert not test.asked


def test_a_session_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(once, "ensure", lambda *args: asked.append(args[2]))
    for wanted in (True, False):
        with Session("single", device="cpu", self_test=wanted):
            pass
    with Session("single", device="cpu"):
        pass
    assert asked == [True, False, "auto"]


def test_nvidia_smi_is_asked_for_names_and_driver(gpus: Callable[[str], None]) -> None:
    gpus("NVIDIA A100, 550.1\nNVIDIA A100, 550.1")
    assert once.hardware() == ["NVIDIA A100, 550.1", "NVIDIA A100, 550.1"]


def test_without_nvidia_smi_torch_is_asked(
    gpus: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus("'; exit 9; '")
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: f"GPU {index}")
    assert once.hardware() == ["GPU 0"]


def test_a_process_that_takes_too_long_is_ended() -> None:
    found = compare("single", "cpu", 1, time_limit=0.5)
    assert found.verdict == "failed"
    assert "took longer than 0.5 s" in found.why


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"},
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
    ],
    ids=lambda variables: next(iter(variables)),
)
def test_a_self_test_is_no_rank_of_the_run_that_asks_for_it(variables: dict[str, str]) -> None:
    without = launcher_variables(variables)
    left = {name: value for name, value in variables.items() if name not in without}
    assert launch.detect(left) is None


def test_flags_of_the_self_test_go_with_it() -> None:
    with pytest.raises(ConfigError, match="--strategy goes with --self-test"):
        doctor(strategy=("ddp",))
    with pytest.raises(ConfigError, match="--time-limit -1: give a number above 0"):
        doctor(self_test=True, time_limit=-1.0)
    with pytest.raises(ConfigError, match="no strategy 'dpd'"):
        doctor(self_test=True, strategy=("dpd",))


def test_the_table_has_both_losses_and_below_it_is_why_others_have_none() -> None:
    shown = io.StringIO()
    absent = Outcome(strategy="absent", verdict="not run", why="Absent is not installed. Get it.")
    show([GOOD, outcome(1.5, strategy="bad"), absent], Console(file=shown, width=200))
    lines = shown.getvalue().splitlines()
    assert lines[-3] == "absent cannot run here: Absent is not installed. Get it."
    (bad,) = [" ".join(line.split()) for line in lines if line.split()[:1] == ["bad"]]
    assert bad == "bad 1 x cpu differs 1 1.5 1 5.0e-01 1e-05"
