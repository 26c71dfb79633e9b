"""What cannot be trained is refused with what was given, what is allowed, and what to do."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import Net, Watched, build, data, loss_fn
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from unipar import RunResult, launch
from unipar.errors import CheckpointError, ConfigError, DataError

Run = Callable[..., RunResult]


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be known before is known before."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(launch, "run", refuse)


def frozen() -> Net:
    return build().requires_grad_(False)  # pyright: ignore[reportReturnType]


BEFORE: list[tuple[str, dict[str, Any], str]] = [
    ("unknown strategy", {"strategy": "dpp"}, r"dpp.*Did you mean"),
    (
        "unknown option",
        {"strategy": {"name": "ddp", "bucket_cap": 1}},
        r"bucket_cap.*bucket_cap_mb",
    ),
    ("option's value", {"strategy": "fsdp:sharding=ful"}, r"sharding.*full"),
    ("micro over global", {"micro_batch_size": 9}, r"micro_batch_size \(9\) is larger than.*\(8\)"),
    ("micro over share", {"micro_batch_size": 5}, r"micro_batch_size=5.*leaves each 4"),
    ("no batch size", {"global_batch_size": ...}, r"global_batch_size is not set"),
    ("epochs and steps", {"epochs": 2}, r"epochs \(2\) and steps \(6\) are both given"),
    ("no GPU", {"device": "cuda"}, r"device='cuda' was asked for, and PyTorch sees no GPU.*'cpu'"),
    ("devices", {"devices": 0}, r"devices"),
    (
        "single on two",
        {"strategy": "single"},
        r"'single' runs on one device, and 2",
    ),
    ("precision", {"precision": "fp4"}, r"precision.*fp4.*fp16"),
    ("activations", {"activation_checkpointing": 3}, r"activation_checkpointing"),
    ("compiler", {"compile": {"backend": "nope"}}, r"Invalid backend: 'nope'.*Its .*inductor"),
    (
        "a function of its",
        {"compile": {"backend": print}},
        r"compile: backend: <built-in function print>.*register_backend.*Session\.prepare",
    ),
    ("its argument", {"compile": {"modee": "x"}}, r"torch.compile does not take.*'modee'"),
    (
        "sparse gradients",
        {"model": nn.Embedding(4, 2, sparse=True), "strategy": "fsdp"},
        r"'fsdp': parameter 'weight' has sparse gradients.*sparse=False.*'ddp'",
    ),
    ("optimizer", {"optimizer": "adamwx"}, r"no optimizer 'adamwx'. Did you mean 'adamw'\?"),
    ("its argument", {"optimizer": {"name": "adamw", "lrr": 1}}, r"no argument 'lrr'.*'lr'"),
    ("its value", {"optimizer": {"name": "adamw", "lr": -1}}, r"adamw.*lr=-1"),
    ("its type", {"optimizer": {"name": "adamw", "lr": "1e-3"}}, r"adamw.*lr='1e-3'"),
    (
        "a tensor of its",
        {"optimizer": {"name": "adamw", "lr": torch.tensor(0.1)}},
        r"optimizer: lr: tensor\(0\.1000\).*no plain value.*Pass a function that builds it",
    ),
    ("scheduler", {"lr_scheduler": "cosine"}, r"lr_scheduler 'cosine'"),
    ("logger", {"loggers": ["tensorbord"]}, r"tensorbord.*tensorboard"),
    ("config key", {"config": {"stps": 1}}, r"stps.*steps"),
    ("shard size", {"strategy": "fsdp:sharding=hybrid,shard_size=3"}, r"does not divide 2"),
    ("nothing to resume", {"resume": "auto", "checkpoint": False}, r"resume.*nothing to resume"),
    (
        "peers of one host",
        {"checkpoint": {"directory": "memory://there", "every_steps": 2, "peers": 1}},
        r"peers=1 .*this run is on one host\. Set checkpoint\.peers=0",
    ),
    (
        "an optimizer",
        {"optimizer": torch.optim.SGD(build().parameters())},
        r"built already.*function",
    ),
]


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(
    ("changes", "message"),
    [pytest.param(changes, message, id=name) for name, changes, message in BEFORE],
)
def test_settings_are_refused_before_any_process_starts(
    run: Run, changes: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=rf"(?s){message}") as caught:
        run(**{"devices": 2, "strategy": "ddp", **changes})
    assert len(str(caught.value).splitlines()) < 20


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("strategy", ["dp", {"name": "dp"}])
def test_data_parallel_on_a_cpu_points_to_ddp(run: Run, strategy: Any):
    with pytest.raises(ConfigError, match=r"strategy 'dp' .* no GPU here. Use strategy='ddp'"):
        run(strategy=strategy)


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        yield 0


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(
    ("samples", "changes", "message"),
    [
        ([], {}, r"is empty: it has 0 samples"),
        (data(5), {}, r"5 samples, fewer than one global batch of 8.*at most 5"),
        (data().tensors[0][:0], {}, r"is empty"),
        (object(), {}, r"the data is a object"),
        (None, {"eval_data": []}, r"is empty"),
        (None, {"eval_data": 3}, r"the data is a int"),
        (DataLoader(data(), batch_size=None), {}, r"batch_size=None"),
        (
            DataLoader(data(), batch_sampler=[[0, 1], [2]]),
            {"global_batch_size": ...},
            r"the DataLoader has batch_sampler=list, .* Pass the dataset, and express the choice",
        ),
    ],
)
def test_data_is_refused_before_any_process_starts(
    run: Run, samples: Any, changes: dict[str, Any], message: str
):
    with pytest.raises(DataError, match=message):
        run(None, samples, devices=2, strategy="ddp", **changes)


@pytest.mark.usefixtures("no_processes")
def test_a_shuffled_stream_is_refused(run: Run):
    with pytest.raises(ConfigError, match="shuffle=True needs a dataset with indices"):
        run(None, Endless(), shuffle=True, devices=2, strategy="ddp")


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (frozen(), r"model \(Net\) has no trainable parameter: all 12 parameters are frozen"),
        (nn.ReLU(), r"model \(ReLU\) has no trainable parameter: it has none"),
        ("gpt2", r"model.*str"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(run: Run, model: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        run(model, devices=2, strategy="ddp")


def test_a_model_function_that_returns_something_else_is_refused(run: Run):
    with pytest.raises(ConfigError, match=r"model function returned a dict"):
        run(dict)


def test_a_model_function_that_returns_a_frozen_model_is_refused(run: Run):
    with pytest.raises(ConfigError, match=r"has no trainable parameter"):
        run(frozen)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, b: m(b[0]), r"the loss has shape \(8, 3\), and must be a scalar.*LossSum"),
        (lambda m, b: loss_fn(m, b).item(), r"the loss function returned float"),
        (lambda m, b: None, r"the loss function returned NoneType"),
        (lambda m, b: loss_fn(m, b).detach(), r"does not require grad.*without .detach\(\)"),
    ],
    ids=["vector", "number", "none", "detached"],
)
def test_what_is_no_loss_is_refused(run: Run, strategy: str, loss: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        run(loss=loss, strategy=strategy)


def test_a_model_without_a_loss_of_its_own_is_refused(run: Run):
    with pytest.raises(ConfigError, match=r"no loss was given, and .* has no `.loss`. Pass loss="):
        run(
            None,
            [{"x": torch.zeros(4)}] * 8,
            loss=...,
        )


def test_metrics_need_to_know_what_to_compare(run: Run):
    rows = [{"x": x, "y": y} for x, y in zip(*data().tensors, strict=True)]
    with pytest.raises(ConfigError, match=r"metrics need predictions and targets.*predict=f"):
        run(
            None,
            rows,
            loss=lambda m, b: loss_fn(m, (b["x"], b["y"])),
            eval_data=rows,
            metrics={"accuracy": lambda p, t: 0.0},
        )


def test_metrics_without_data_to_compute_them_on_are_refused(run: Any) -> None:
    with pytest.raises(ConfigError, match=r"metrics \(accuracy\) are computed on eval_data"):
        run(None, data(), metrics={"accuracy": lambda p, t: torch.zeros(())})


def test_evaluations_without_data_are_refused(run: Any) -> None:
    with pytest.raises(ConfigError, match="eval_every is 2, and there is no eval_data"):
        run(None, data(), eval_every=2)


class Confused:
    """A metric that accumulates, and ends as several numbers."""

    def reset(self) -> None: ...

    def update(self, preds: Any, target: Any) -> None: ...

    def compute(self) -> dict[str, float]:
        return {"first": 1.0}


@pytest.mark.parametrize(
    ("metric", "found"),
    [
        (lambda p, t: p.argmax(-1) == t, r"a Tensor \(shape \(8,\)\)"),
        (lambda p, t: {"a": 1}, r"a dict \(\{'a': 1\}\)"),
        (Confused(), r"a dict \(\{'first': 1.0\}\)"),
    ],
    ids=["vector", "mapping", "accumulating"],
)
def test_a_metric_is_one_number(run: Run, metric: Any, found: str):
    with pytest.raises(ConfigError, match=rf"metric 'm' must be one number, and it is {found}"):
        run(eval_data=data(8), metrics={"m": metric}, steps=1)


@pytest.mark.parametrize(
    ("evaluated", "message"),
    [
        (None, r"keep_best goes by .* 'los', and nothing is evaluated. Pass eval_data"),
        (data(), r"keep_best goes by 'los', which is no .* Did you mean 'loss'\? Known: loss"),
    ],
)
def test_the_best_by_an_unknown_metric_is_refused(run: Run, evaluated: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        run(checkpoint={"keep_best": {"metric": "los"}}, eval_data=evaluated)


def test_batches_that_differ_are_described(run: Run):
    samples = [(torch.zeros(4), 0)] * 8 + [(torch.zeros(4), 0.5)] * 8
    with pytest.raises(DataError, match=r"batch 1 of epoch 0 is made differently"):
        run(None, samples, shuffle=False)


def broken() -> None:
    raise ValueError("pixel data is truncated")


def test_a_sample_that_raises_is_named(run: Run):
    with pytest.raises(
        DataError, match=r"rank 0: sample 9 of Watched raised ValueError: pixel data is truncated"
    ):
        run(None, Watched(9, broken))


def test_a_wrong_key_in_a_file_is_named_with_its_line(run: Run, tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("seed: 1\n\nmicro_batchsize: 4\n")
    with pytest.raises(
        ConfigError, match=r"run.yaml, line 3: unknown key 'micro_batchsize"
    ) as caught:
        run(config=file)
    assert "micro_batch_size" in str(caught.value)


@pytest.mark.usefixtures("no_processes")
def test_a_directory_that_cannot_be_written_is_refused(run: Run, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written.*Choose another output_dir \(or"):
        run(output_dir=tmp_path / "file" / "run", devices=2, strategy="ddp")


def test_several_machines_need_their_launcher(run: Run):
    with pytest.raises(ConfigError, match=r"(?s)num_nodes=2.*torchrun --nnodes=2"):
        run(devices=2, num_nodes=2, strategy="ddp")


def test_data_that_cannot_be_sent_to_processes_is_refused(run: Run):
    samples = Watched(0, (x for x in "a").__next__)
    with pytest.raises(ConfigError, match=r"cannot be sent what they need: .*generator"):
        run(None, samples, devices=2, strategy="ddp")


@pytest.mark.parametrize("resume", ["nowhere", "empty"])
def test_a_path_to_resume_from_that_holds_nothing_is_named(run: Run, tmp_path: Path, resume: str):
    (tmp_path / "empty").mkdir()
    with pytest.raises((CheckpointError, ConfigError), match=resume):
        run(resume=tmp_path / resume)


def test_a_checkpoint_of_another_model_lists_the_differences(run: Run, tmp_path: Path):
    result = run(checkpoint={}, steps=1)

    class Other(Net):
        def __init__(self) -> None:
            super().__init__()
            self.outward = nn.Linear(8, 5)
            self.added = nn.Linear(2, 2)

    with pytest.raises(CheckpointError) as caught:
        run(Other(), resume=result.checkpoint, output_dir=tmp_path / "other")
    for part in ("added.weight", "outward.weight", "(3, 8)", "(5, 8)"):
        assert part in str(caught.value).replace("[", "(").replace("]", ")")


FULL_DISK = """
import resource, signal, sys
sys.path.insert(0, {here!r})
from pathlib import Path
from small_run import build, reference, settings, data
from unipar import Callback, fit, checkpoint

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
directory = Path({directory!r})

class Fill(Callback):
    every_rank = True
    def on_checkpoint(self, run, step, path):
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))

model = build()
saves = {{"every_steps": 2, "async": {background}}}
values = settings(directory, steps=8, log_every=99, checkpoint=saves)
try:
    fit(model, data(), callbacks=[Fill()], **values)
except Exception as error:
    print(type(error).__name__, error)
print(checkpoint.newest(directory / "checkpoints").name)
print([p.name for p in (directory / "checkpoints").iterdir()])
"""


@pytest.mark.parametrize("background", [False, True], ids=["waits", "async"])
def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path: Path, background: bool):
    script = FULL_DISK.format(
        here=str(Path(__file__).parent),
        directory=str(tmp_path / "run"),
        background=background,
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines = done.stdout.splitlines()
    assert "CheckpointError" in done.stdout, done.stdout + done.stderr
    assert "File too large" in done.stdout
    # In the background, the next one may be written before the disk is full.
    assert lines[-2] == "step-00000002" or (background and lines[-2] == "step-00000004")
    left = ast.literal_eval(lines[-1])
    assert all(name.startswith("step-") for name in left)
