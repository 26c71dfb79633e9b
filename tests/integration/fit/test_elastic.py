"""Runs whose number of ranks changes: the losses are those of a plain loop, each step once."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import build, data, loss_fn, make_scheduler, reference, settings
from torch import nn

from unipar import Callback, RunResult, fit
from unipar.errors import ConfigError, WorkerError
from unipar.launch.elastic import ask
from unipar.launch.failure import Failure
from unipar.launch.group import WorkerGroup
from unipar.train.handover import say_what_changes
from unipar.train.watching.runs import read_run
from unipar.train.watching.show import page

pytestmark = pytest.mark.timeout(300)

Run = Callable[..., RunResult]
HERE = Path(__file__).parent
STEPS = 16


class Asks(Callback):
    """Asks for other numbers of ranks after steps, and leaves the answers."""

    def __init__(self, numbers: dict[int, list[int]], here: Path) -> None:
        self.numbers, self.here = numbers, here

    def on_step_end(self, run: Any, record: Any) -> None:
        for number in self.numbers.get(record.step, ()):
            try:
                said = ask(run.output_dir, number)
            except ConfigError as error:
                said = f"refused: {error}"
            with (self.here / "answers").open("a") as file:
                file.write(f"{said}\n")


class Kills(Callback):
    """Kills ranks of the first group after a step."""

    every_rank = True

    def __init__(self, step: int, *ranks: int) -> None:
        self.step, self.ranks = step, ranks

    def on_step_end(self, run: Any, record: Any) -> None:
        if record.step == self.step and run.rank in self.ranks and not run.restart:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def elastic(tmp_path: Path) -> Run:
    """``elastic(devices, **changes)`` of the small run."""

    def call(devices: str, model: Any = None, **changes: Any) -> RunResult:
        given = {"steps": STEPS, "checkpoint": {}, "log_every": 1, **changes}
        values = settings(tmp_path / "run", devices=devices, **given)
        return fit(build() if model is None else model, data(), **values)

    return call


def worlds(directory: Path) -> list[int]:
    """How many ranks there were, one after the other."""
    return [row["world_size"] for row in events(directory) if row["event"] == "started"]


def events(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / "run" / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def is_undisturbed(result: RunResult, directory: Path, *, scheduler: bool = False) -> None:
    """Every step is there once, everywhere, with the loss of the plain loop."""
    steps = list(range(1, STEPS + 1))
    assert [record.step for record in result.history] == steps
    assert result.losses == pytest.approx(reference(STEPS, scheduler=scheduler)[0], rel=1e-5)
    rows = map(json.loads, (directory / "run" / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows if "loss" in row] == steps
    assert [row["event"] for row in events(directory)].count("ended") == 1
    assert not list(Path("/dev/shm").glob(f"unipar.*/{directory.name}*"))


FOUR = {3: [7, 2], 6: [3], 9: [1], 12: [4]}


@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        *(pytest.param(one, marks=pytest.mark.thorough) for one in ("fsdp", "zero3", "horovod")),
    ],
)
def test_any_sequence_of_ranks_trains_as_one(elastic: Run, tmp_path: Path, strategy: str):
    model = build()
    result = elastic(
        "1:4",
        model,
        strategy=strategy,
        callbacks=[Asks(FOUR, tmp_path)],
        lr_scheduler=make_scheduler,
        eval_data=data(),
        eval_every=4,
    )
    assert worlds(tmp_path) == [4, 2, 3, 1, 4]
    is_undisturbed(result, tmp_path, scheduler=True)
    expected = reference(STEPS, scheduler=True)[1]
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-6)
    assert [step for step, _ in result.evaluations] == [4, 8, 12, 16]
    refused, *answers = (tmp_path / "answers").read_text().splitlines()
    assert refused == "refused: The run cannot be on 7 ranks. It can be on 1, 2, 3, 4."
    assert answers[0] == "The run goes on with 2 ranks, not 4, after its next step."
    changed = [row for row in events(tmp_path) if row["event"] == "changed"]
    assert [row["why"] for row in changed] == ["asked for"] * 4
    assert [row["repeated"] for row in changed] == [0] * 4
    assert all(0 < row["seconds"] < 100 for row in changed)
    # The first start was of four ranks, and the last is.
    shown = read_run(tmp_path / "run")
    assert (shown.ranks, shown.starts, shown.state) == (4, 5, "finished")


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["mesh:tp=2", "fsdp:sharding=hybrid,shard_size=2"])
def test_what_is_divided_stays_so(
    elastic: Run,
    tmp_path: Path,
    strategy: str,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of the three that are left when a rank is lost, one is a spare."""
    result = elastic(
        "1:4",
        strategy=strategy,
        callbacks=[Asks({3: [3, 2], 8: [4]}, tmp_path), KillsOf(2, 13, 3)],
        checkpoint={"every_steps": 4},
        log_level="info",
    )
    assert worlds(tmp_path) == [4, 2, 4, 2]
    is_undisturbed(result, tmp_path)
    answers = (tmp_path / "answers").read_text().splitlines()
    assert answers[0] == "refused: The run cannot be on 3 ranks. It can be on 2, 4."
    assert "2 of 3 devices train. The strategy cannot be on 3, so the other one" in caplog.text
    assert "2 ranks now, from step 12 on" in capfd.readouterr().err


class KillsOf(Kills):
    """The same of a later group."""

    def __init__(self, restart: int, step: int, *ranks: int) -> None:
        super().__init__(step, *ranks)
        self.restart = restart

    def on_step_end(self, run: Any, record: Any) -> None:
        if record.step == self.step and run.rank in self.ranks and run.restart == self.restart:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_lost_rank_leaves_the_others_with_the_state_in_their_memory(
    elastic: Run,
    tmp_path: Path,
    rank: int,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without a checkpoint of the run's own."""
    result = elastic(
        "1:3", strategy="ddp", callbacks=[Kills(5, rank)], checkpoint=False, log_level="info"
    )
    assert worlds(tmp_path) == [3, 2]
    is_undisturbed(result, tmp_path)
    [changed] = [row for row in events(tmp_path) if row["event"] == "changed"]
    assert changed["why"].startswith(f"rank {rank} was killed by SIGKILL")
    assert (changed["before"], changed["after"], changed["repeated"]) == (3, 2, 0)
    assert f"The run goes on with 2 ranks, not 3: rank {rank} was killed by SIGKILL" in caplog.text
    said = capfd.readouterr().err
    assert "2 ranks now, from step 5 on" in said
    assert "Traceback" not in said


def test_a_rank_that_is_lost_between_two_looks_ends_no_other(
    elastic: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's agent, which looks after unipar's, would end the one that holds the state."""
    look, missed = WorkerGroup.failures, list[object]()

    def late(group: WorkerGroup) -> list[Failure]:
        found = look(group)
        if found and not missed:
            missed.append(found)
            return []
        return found

    monkeypatch.setattr(WorkerGroup, "failures", late)
    elastic("1:2", strategy="ddp", callbacks=[Kills(5, 1)], checkpoint=False)
    assert missed
    [changed] = [row for row in events(tmp_path) if row["event"] == "changed"]
    assert (changed["step"], changed["repeated"]) == (5, 0)


@pytest.mark.parametrize("saves", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_where_ranks_hold_parts_the_newest_checkpoint_is_taken(
    elastic: Run, tmp_path: Path, saves: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Or there is none, and it begins from the start."""
    # Not in the background: it may be complete when the rank is killed, or not.
    settings = {"every_steps": 2, "save_final": False, "async": False}
    checkpoint = settings if saves else False
    result = elastic(
        "1:2", strategy="fsdp", callbacks=[Kills(5, 1)], checkpoint=checkpoint, log_level="info"
    )
    assert worlds(tmp_path) == [2, 1]
    is_undisturbed(result, tmp_path)
    [changed] = [row for row in events(tmp_path) if row["event"] == "changed"]
    begins, repeated = (4, 1) if saves else (0, 5)
    assert changed["repeated"] == repeated
    said = capfd.readouterr().err
    assert f"1 rank now, from step {begins} on" in said
    assert f"and {repeated} steps were lost" in said


@pytest.mark.thorough
def test_buffers_that_training_changes_are_not_taken_from_memory(
    elastic: Run,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    result = elastic(
        "1:2",
        model,
        strategy="ddp",
        callbacks=[Kills(5, 1)],
        checkpoint={"every_steps": 2, "async": False},
    )
    assert len(result.losses) == STEPS
    said = capfd.readouterr().err
    assert "the model has BatchNorm, whose statistics are those of a rank's micro-batch" in said
    assert "is not taken: the model has buffers that training changes" in caplog.text
    [changed] = [row for row in events(tmp_path) if row["event"] == "changed"]
    assert changed["repeated"] == 1


def test_fewer_than_the_least_end_the_run(elastic: Run, tmp_path: Path):
    with pytest.raises(WorkerError) as caught:
        elastic("2:3", strategy="ddp", callbacks=[Kills(3, 1, 2)])
    assert "was killed by SIGKILL" in str(caught.value)
    assert str(caught.value).endswith("devices='2:3': 1 are left, and the run needs 2 at least.")
    assert [row.get("how") for row in events(tmp_path)][-1] == "failed"
    assert worlds(tmp_path) == [3]


@pytest.mark.thorough
def test_an_error_of_the_users_own_is_not_a_lost_rank(elastic: Run, tmp_path: Path):
    class Fails(Callback):
        every_rank = True

        def on_step_end(self, run: Any, record: Any) -> None:
            if run.rank == 1 and record.step == 3:
                raise ValueError("my own")

    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"(?s)Rank 1 of 3 .*ValueError: my own"):
        elastic("1:3", strategy="ddp", callbacks=[Fails()])
    assert worlds(tmp_path) == [3]
    assert time.monotonic() - began < 60


def test_of_two_requests_at_once_the_last_counts(elastic: Run, tmp_path: Path):
    result = elastic("1:3", strategy="ddp", callbacks=[Asks({3: [1, 2]}, tmp_path)])
    assert worlds(tmp_path) == [3, 2]
    is_undisturbed(result, tmp_path)


@pytest.mark.thorough
def test_a_request_may_be_taken_back(elastic: Run, tmp_path: Path):
    result = elastic("1:2", strategy="ddp", callbacks=[Asks({3: [1, 2]}, tmp_path)])
    assert worlds(tmp_path) == [2]
    is_undisturbed(result, tmp_path)


def interrupting_model() -> nn.Module:
    """Sends SIGINT to the launching process from the ranks of the second group."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "1":
        if os.environ["RANK"] == "0":
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(20)
    return build()


def test_ctrl_c_during_a_change_keeps_every_step(elastic: Run, tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        elastic(
            "1:2",
            interrupting_model,
            strategy="fsdp",
            callbacks=[Asks({3: [1]}, tmp_path)],
            checkpoint={"every_steps": 3},
        )
    last = events(tmp_path)[-1]
    assert (last["event"], last["how"], last["step"]) == ("ended", "interrupted", 4)
    rest = fit(
        build(),
        data(),
        **settings(tmp_path / "run", checkpoint={}, resume="auto", steps=STEPS),
    )
    assert [record.step for record in rest.history] == list(range(5, STEPS + 1))
    assert rest.losses == pytest.approx(reference(STEPS)[0][4:], rel=1e-5)


def interrupt(record: logging.LogRecord) -> bool:
    """Sends SIGINT to the launching process when it says with how many ranks the run goes on."""
    if "goes on with" in record.getMessage():
        os.kill(os.getpid(), signal.SIGINT)
    return True


@pytest.mark.parametrize(
    ("model", "killed"),
    [(build, 0), (interrupting_model, 1)],
    ids=["ranks are ending", "ranks have come"],
)
def test_ctrl_c_during_a_change_that_repeats_steps_says_where_to_go_on(
    elastic: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, model: Any, killed: int
):
    """There is nothing newer to keep than what the run has saved."""
    settings = {"strategy": "fsdp", "checkpoint": {"every_steps": 2, "async": False}}
    logger = logging.getLogger("unipar.launch")
    if model is build:
        logger.addFilter(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            elastic("1:2", model, callbacks=[Kills(5, killed)], **settings)
    finally:
        logger.removeFilter(interrupt)
    found = read_run(tmp_path / "run")
    assert (found.state, found.why) == ("interrupted", "SIGINT")
    assert re.search(
        r"interrupted before all ranks had saved; the newest checkpoint is .*step-00000004, "
        r"continue with resume='auto'",
        caplog.text,
    )


class Watches(threading.Thread):
    """Lists the states of a run that there are from its first start on, until it is ended."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory, self.states, self.over = directory, [], threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.01):
            found = read_run(self.directory)
            if found.starts:
                self.states.append(found.state)

    def __enter__(self) -> Watches:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.join()


def test_a_run_is_running_and_nobody_elses_while_it_changes(elastic: Run, tmp_path: Path):
    (tmp_path / "run").mkdir()
    with Watches(tmp_path / "run") as watches:
        elastic("1:2", strategy="ddp", callbacks=[Kills(3, 0), Asks({9: [2]}, tmp_path)])
    assert worlds(tmp_path) == [2, 1, 2]
    last = watches.states.index("finished") if "finished" in watches.states else None
    assert set(watches.states[:last]) == {"running"}


class SaysKilled(Kills):
    """Leaves a file before it kills."""

    def __init__(self, step: int, rank: int, here: Path) -> None:
        super().__init__(step, rank)
        self.here = here

    def on_step_end(self, run: Any, record: Any) -> None:
        if record.step == self.step and run.rank in self.ranks and not run.restart:
            (self.here / "killed").touch()
        super().on_step_end(run, record)


def test_a_run_that_has_lost_ranks_may_be_asked_at_once(elastic: Run, tmp_path: Path):
    from unipar.cli.runs import resize

    said: list[object] = []

    def asks() -> None:
        while not (tmp_path / "killed").exists():
            time.sleep(0.01)
        try:
            resize("run", 1, directory=tmp_path)
        except ConfigError as error:
            said.append(error)

    asking = threading.Thread(target=asks, daemon=True)
    asking.start()
    result = elastic("1:3", strategy="ddp", callbacks=[SaysKilled(3, 0, tmp_path)])
    asking.join()
    assert said == []
    assert worlds(tmp_path) in ([3, 1], [3, 2, 1])
    is_undisturbed(result, tmp_path)


class DiesHandingOver(Callback):
    """Kills ranks of a group where they are to hand over, or have done it."""

    every_rank = True

    def __init__(self, *ranks: int, restart: int = 0, late: bool = False) -> None:
        self.ranks, self.restart, self.late = ranks, restart, late

    def on_run_start(self, run: Any) -> None:
        from unipar.train.handover import Handover

        if run.rank not in self.ranks or run.restart != self.restart:
            return
        hand_over, late = Handover.hand_over, self.late

        def dies(self: Handover, *given: Any) -> bool:
            if late:
                hand_over(self, *given)
                self.session.world.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
            return True

        Handover.hand_over = dies  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.thorough
@pytest.mark.parametrize(("strategy", "repeated"), [("ddp", 0), ("fsdp", 2)])
def test_a_rank_that_is_lost_during_a_handover(
    elastic: Run, tmp_path: Path, strategy: str, repeated: int
) -> None:
    result = elastic(
        "1:3",
        strategy=strategy,
        callbacks=[DiesHandingOver(1), Asks({4: [1]}, tmp_path)],
        checkpoint={"every_steps": 3},
        log_level="info",
    )
    assert worlds(tmp_path) == [3, 1]
    is_undisturbed(result, tmp_path)
    [changed] = [row for row in events(tmp_path) if row["event"] == "changed"]
    assert changed["repeated"] == repeated


@pytest.mark.parametrize(
    ("dies", "why"),
    [
        (DiesHandingOver(1, restart=1), "rank 1 was killed by SIGKILL, as .*; 3 were asked for"),
        pytest.param(
            DiesHandingOver(0, 1, restart=1, late=True),
            "ranks 0, 1 were killed by SIGKILL, as .*; 3 were asked for",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_what_was_asked_for_counts_where_ranks_are_lost_meanwhile(
    elastic: Run, tmp_path: Path, dies: DiesHandingOver, why: str
) -> None:
    result = elastic("1:3", strategy="ddp", callbacks=[dies, Asks({3: [2], 6: [3]}, tmp_path)])
    assert worlds(tmp_path) == [3, 2, 3]
    is_undisturbed(result, tmp_path)
    changed = [row for row in events(tmp_path) if row["event"] == "changed"]
    assert re.fullmatch(why, changed[-1]["why"])


@pytest.mark.thorough
def test_an_evaluation_that_a_loss_has_cut_off_is_made_once(elastic: Run, tmp_path: Path):
    def dies(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if first and os.environ["RANK"] == "1" and (tmp_path / "evaluated").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        (tmp_path / "evaluated").touch()
        return torch.tensor(1.0)

    settings: dict[str, Any] = {"eval_data": data(), "eval_every": 4, "metrics": {"one": dies}}
    result = elastic("1:2", strategy="ddp", checkpoint=False, **settings)
    is_undisturbed(result, tmp_path)
    assert [step for step, _ in result.evaluations] == [4, 8, 12, 16]


class LostEvaluating(Callback):
    """Ranks of which one is lost in what is called after an evaluation, where the others wait."""

    every_rank = True

    def on_evaluate_end(self, run: Any, step: int, metrics: Any) -> None:
        if step == 4 and not run.restart:
            if run.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            torch.distributed.barrier()


@pytest.mark.thorough
def test_a_loss_after_an_evaluation_steps_no_scheduler_twice(
    elastic: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plateau = {"name": "reducelronplateau", "patience": 0, "threshold": 10.0, "factor": 0.5}
    result = elastic(
        "2:4",
        strategy="ddp",
        checkpoint=False,
        optimizer={"name": "sgd", "lr": 0.02},
        lr_scheduler=plateau,
        eval_data=data(),
        eval_every=2,
        callbacks=[LostEvaluating()],
    )
    assert worlds(tmp_path) == [4, 3]
    # By so large a threshold no evaluation is better than the one before.
    rates = [record.lr for record in result.history]
    assert rates == [0.02 * 0.5 ** ((step - 1) // 2) for step in range(1, STEPS + 1)]
    assert [step for step, _ in result.evaluations] == list(range(2, STEPS + 1, 2))
    assert "not those given" not in caplog.text


def test_ranks_that_are_lost_together_are_named_as_several(
    elastic: Run, caplog: pytest.LogCaptureFixture
) -> None:
    elastic("1:3", strategy="ddp", callbacks=[Kills(3, 1, 2)], steps=5)
    assert "1 rank, not 3: ranks 1, 2 were killed by SIGKILL" in caplog.text


@pytest.mark.parametrize(
    ("layer", "drops"),
    [
        (nn.LSTM(4, 4, num_layers=2, dropout=0.1), True),
        (nn.MultiheadAttention(4, 2, dropout=0.1), True),
        (nn.LSTM(4, 4, dropout=0.0), False),
        (nn.MultiheadAttention(4, 2), False),
        (nn.Dropout(0.0), False),
    ],
    ids=str,
)
def test_layers_whose_dropout_changes_are_named(
    layer: nn.Module, drops: bool, caplog: pytest.LogCaptureFixture
) -> None:
    say_what_changes(nn.Sequential(layer), "rank")
    assert ("the model has dropout" in caplog.text) == drops


@pytest.mark.thorough
def test_micro_batches_stay_as_large_as_with_the_most_ranks(elastic: Run, tmp_path: Path):
    def counted(model: Any, batch: Any) -> torch.Tensor:
        assert len(batch[0]) <= 2
        return loss_fn(model, batch)

    result = elastic("1:4", strategy="ddp", loss=counted, callbacks=[Asks({3: [1]}, tmp_path)])
    is_undisturbed(result, tmp_path)


SCRIPT = """
    import os
    from pathlib import Path
    from small_run import build, data, settings
    from unipar import fit

    steps = int(os.environ["STEPS"])
    values = settings(Path(os.environ["HERE"], "run"), strategy="fsdp", devices="1:2", steps=steps,
                      checkpoint={"every_steps": 2})
    result = fit(build(), data(), **values)
    print(os.environ["RANK"], [record.step for record in result.history])
"""


@pytest.mark.thorough
def test_ranks_of_another_launcher_go_on_by_themselves(tmp_path: Path):
    """As torchrun --nnodes=1:2 starts them again: on another number, its count of restarts 0."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))

    def torchrun(ranks: int, steps: int, code: int = 0) -> str:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        done = subprocess.run(
            [*command, "--nproc-per-node", str(ranks), str(script)],
            text=True,
            capture_output=True,
            timeout=120,
            env={
                **os.environ,
                "HERE": str(tmp_path),
                "STEPS": str(steps),
                "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
            },
        )
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    assert "0 [1, 2, 3]" in torchrun(2, 3)
    assert "0 [4, 5]" in torchrun(1, 5)
    said = torchrun(3, 6, code=1)
    assert "devices='1:2', and there are 3: strategy 'fsdp' can be on 1, 2" in said


@pytest.mark.parametrize(
    ("devices", "changes", "message"),
    [
        (
            "1:4",
            {"strategy": "single"},
            r"strategy 'single'.*can be on 1 rank alone\. Give devices=1 .*runs on one device",
        ),
        (
            "1:4",
            {"strategy": "mesh:tp=2,dp_shard=2"},
            r"strategy 'mesh'.*can be on 4 ranks alone",
        ),
        ("2:3", {"strategy": "mesh:tp=4"}, r"strategy 'mesh'.*can be on none of these numbers"),
        ("1:3", {"strategy": "mesh:pp=2"}, r"'mesh'.*can be on 2 ranks alone\. Give devices=2 "),
        (
            "1:2",
            {"strategy": "ddp", "shares": "auto", "micro_batch_size": 1},
            r"shares='auto' with micro_batch_size=1: .*Raise micro_batch_size, to 4 or more",
        ),
        ("1:2", {"strategy": "ddp", "launcher": "torchrun"}, r"launcher 'torchrun' starts as many"),
        ("1:2", {"strategy": "ddp", "launcher": "slurm"}, r"launcher 'slurm' .*such as devices=1"),
        ("1:2", {"strategy": "ddp", "launcher": "ray"}, r"'ray' has no cluster but this machine"),
        ("2:", {"strategy": "ddp", "launcher": "ray:address=auto"}, r"Say the most.*'2:4'"),
        (
            "1:2",
            {"strategy": "ddp", "launcher": "ray:address=auto", "num_nodes": 2},
            r"all nodes together.*num_nodes=2\. Leave num_nodes out",
        ),
        ("1:2", {"strategy": "ddp", "num_nodes": 2}, r"of one machine, and num_nodes=2"),
        ("1:2", {"strategy": "ddp", "shares": [2, 1]}, r"shares has 2 numbers.*leave it out"),
        ("4:2", {}, r"first number is the least and the second the most, such as '2:4'"),
        ("2:", {"strategy": "ddp"}, r"a CPU has no number of them.*such as devices='2:4'"),
        ("many", {}, r"'many' was given. Allowed: a whole number above 0, 'auto', or a range such"),
    ],
)
def test_a_range_that_cannot_be_is_refused_before_any_process_starts(
    elastic: Run,
    monkeypatch: pytest.MonkeyPatch,
    devices: str,
    changes: dict[str, Any],
    message: str,
):
    monkeypatch.setattr("unipar.launch.run", lambda *_, **__: pytest.fail("processes were started"))
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        elastic(devices, **{"device": "cpu", **changes})


def test_a_run_that_does_not_answer_is_not_waited_for(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"does not answer within 0\.1 s.*devices='MIN:MAX'"):
        ask(tmp_path, 2, patience=0.1)
    assert list(tmp_path.iterdir()) == []


def test_a_page_of_a_run_shows_its_changes(tmp_path: Path):
    from rich.console import Console

    rows = [
        {"event": "started", "step": 0, "world_size": 4},
        {"event": "started", "step": 5, "world_size": 3, "restart": 1},
        {"event": "changed", "step": 5, "before": 4, "after": 3, "why": "rank 1 was killed",
         "seconds": 6.25, "repeated": 2},
    ]  # fmt: skip
    common = {"format": 1, "time": 1e9}
    text = "".join(json.dumps({**common, **row}) + "\n" for row in rows)
    (tmp_path / "events.jsonl").write_text(text)
    console = Console(width=120, record=True)
    console.print(page(read_run(tmp_path), 120, plain=True))
    shown = console.export_text()
    assert "at step 5: 4 -> 3 ranks, rank 1 was killed; 6.2 s and 2 steps lost" in shown


def test_only_a_run_that_goes_on_is_asked(tmp_path: Path):
    from unipar.cli.runs import resize

    rows = [{"event": "started", "step": 0}, {"event": "ended", "how": "finished", "step": 5}]
    text = "".join(json.dumps({"format": 1, "time": 1e9, **row}) + "\n" for row in rows)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "events.jsonl").write_text(text)
    with pytest.raises(ConfigError, match="run 'mine' is not running: it is finished"):
        resize("mine", 2, directory=tmp_path)
