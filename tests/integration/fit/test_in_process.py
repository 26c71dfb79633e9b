"""``fit`` in one process equals the plain loop, in every way of asking for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
import yaml
from small_run import (
    BATCH,
    SAMPLES,
    STEPS,
    Net,
    accuracy,
    build,
    data,
    loss_fn,
    make_adamw,
    make_scheduler,
    reference,
)
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from unipar import Callback, LossSum, RunConfig, RunResult, load_model
from unipar.data.order import epoch_order
from unipar.errors import ConfigError
from unipar_torch.fsdp import FSDPOptions

Run = Callable[..., RunResult]


def assert_same_run(result: RunResult, losses: list[float]) -> None:
    assert result.losses == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("strategy", ["single", "ddp", "ddp:shard_optimizer=true", "fsdp", "auto"])
def test_the_callers_module_holds_the_weights_of_the_plain_loop(run: Run, strategy: str):
    model = build()
    result = run(model, strategy=strategy)
    losses, expected = reference()
    assert_same_run(result, losses)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)
    # Usable as any module, whatever the strategy had done to it.
    assert type(model(torch.zeros(2, 4))) is torch.Tensor
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert model.training


@pytest.mark.parametrize(
    "strategy",
    [
        {"name": "fsdp", "sharding": "grad_op"},
        FSDPOptions.model_validate({"sharding": "grad_op"}),
        "fsdp:sharding=grad_op",
    ],
    ids=["mapping", "options", "text"],
)
def test_a_strategy_is_named_in_any_form(run: Run, tmp_path: Path, strategy: Any):
    assert run(strategy=strategy, steps=1).strategy == "fsdp"
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert written["strategy"] == {"name": "fsdp", "sharding": "grad_op"}


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_a_model_function_is_built_under_the_runs_seed(run: Run, strategy: str):
    torch.manual_seed(7)
    expected = Net()
    losses, _ = reference(model=expected, seed=7)
    assert_same_run(run(Net, strategy=strategy, seed=7), losses)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize("micro_batch_size", [1, 3, 4])
def test_micro_batches_add_up_to_the_global_batch(run: Run, strategy: str, micro_batch_size: int):
    result = run(strategy=strategy, micro_batch_size=micro_batch_size)
    assert_same_run(result, reference()[0])


def test_a_scheduler_takes_a_step_a_step(run: Run):
    result = run(lr_scheduler=make_scheduler, micro_batch_size=2)
    assert_same_run(result, reference(scheduler=True)[0])
    assert [r.lr for r in result.history] == pytest.approx([0.02, 0.02, 0.01, 0.01, 0.005, 0.005])


def test_optimizers_and_schedulers_go_by_name(run: Run):
    result = run(
        optimizer={"name": "adamw", "lr": 0.02},
        lr_scheduler={"name": "steplr", "step_size": 2, "gamma": 0.5},
    )
    assert_same_run(result, reference(scheduler=True)[0])


def test_a_config_file_gives_what_the_call_leaves_out(run: Run, tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("steps: 2\nseed: 3\noptimizer: {name: adamw, lr: 0.02}\n")
    result = run(config=file, steps=..., optimizer=...)
    assert_same_run(result, reference(2, seed=3)[0])
    again = run(config=file, steps=1, optimizer=..., output_dir=tmp_path / "again")
    assert_same_run(again, reference(1, seed=3)[0])
    config = RunConfig(steps=2, seed=3)
    assert_same_run(run(config=config, steps=..., output_dir=tmp_path / "c"), result.losses)


def test_epochs_are_passes_over_all_samples(run: Run):
    result = run(epochs=2, steps=...)
    assert [r.num_samples for r in result.history] == [8, 8, 8, 4] * 2
    assert [r.epoch for r in result.history] == [0] * 4 + [1] * 4
    assert_same_run(result, reference(8)[0])


def test_one_epoch_is_the_default(run: Run):
    assert len(run(steps=...).history) == 4


def test_a_data_loader_brings_its_batch_size(run: Run):
    given = DataLoader(data(), batch_size=BATCH, shuffle=True)
    assert_same_run(run(None, given, global_batch_size=...), reference()[0])


def test_a_stream_runs_for_steps(run: Run):
    class Endless(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            while True:
                order = epoch_order(SAMPLES, seed=0, epoch=0, shuffle=False)
                yield from (data()[i] for i in order.tolist())

    result = run(None, Endless(), steps=5)
    assert [r.num_samples for r in result.history] == [BATCH] * 5


def test_evaluation_counts_every_sample_once(run: Run):
    model = build()
    result = run(
        model,
        eval_data=data(),
        metrics={
            "accuracy": accuracy,
            "theirs": torchmetrics.Accuracy("multiclass", num_classes=3),
        },
        eval_every=4,
        micro_batch_size=3,
    )
    assert [step for step, _ in result.evaluations] == [4, 6]
    x, y = data().tensors
    with torch.no_grad():
        predictions = model(x)
    expected = {
        "loss": nn.functional.cross_entropy(predictions, y).item(),
        "accuracy": accuracy(predictions, y).item(),
        "theirs": accuracy(predictions, y).item(),
    }
    assert result.evaluations[-1][1] == pytest.approx(expected, rel=1e-5)
    assert result.metrics == pytest.approx({**expected, "train_loss": result.losses[-1]})


def test_evaluation_is_at_each_epochs_end_by_default(run: Run):
    result = run(eval_data=data(), epochs=2, steps=...)
    assert [step for step, _ in result.evaluations] == [4, 8]


@pytest.mark.parametrize(
    "given",
    [
        DataLoader(data(), batch_size=5, shuffle=True),
        data().tensors,
        data(3),
        list(data()),  # pyright: ignore[reportArgumentType]
    ],
    ids=["DataLoader", "columns", "few", "list"],
)
def test_evaluation_data_comes_in_any_form(run: Run, given: Any):
    model = build()
    result = run(model, eval_data=given, metrics={"accuracy": accuracy}, steps=1)
    x, y = data(3 if len(given) == 3 else SAMPLES).tensors
    with torch.no_grad():
        expected = accuracy(model(x), y).item()
    assert result.metrics["accuracy"] == pytest.approx(expected)


def test_evaluation_on_a_stream_in_a_data_loader(run: Run):
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return (data()[i] for i in range(11))

    result = run(eval_data=DataLoader(Stream(), batch_size=4), steps=1)
    assert "loss" in result.metrics


def test_a_predict_function_says_what_is_compared(run: Run):
    def predict(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch[0]), torch.zeros_like(batch[1])

    result = run(eval_data=data(), metrics={"accuracy": accuracy}, predict=predict, steps=1)
    assert result.metrics["accuracy"] < 0.7


def test_evaluation_leaves_dropout_as_it_was(run: Run, tmp_path: Path):
    def losses(name: str, **changes: Any) -> list[float]:
        return run(build(dropout=0.5), output_dir=tmp_path / name, **changes).losses

    plain = losses("plain")
    assert plain == losses("evaluated", eval_data=data(), eval_every=1)
    assert plain != losses("other seed", seed=1)
    assert plain[0] != run(output_dir=tmp_path / "none").losses[0]


def test_a_run_leaves_its_config_and_metrics(run: Run, tmp_path: Path):
    result = run(eval_data=data(), log_every=2, checkpoint={})
    directory = tmp_path / "run"
    assert result.output_dir == directory
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    logged = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert list(logged) == [1, 2, 4, 6]
    assert logged[6] == pytest.approx(result.losses[-1])
    assert any("eval/loss" in line for line in lines)
    written = RunConfig.build(directory / "config.yaml")
    assert (written.steps, written.global_batch_size) == (STEPS, BATCH)
    assert result.checkpoint == directory / "checkpoints" / "step-00000006"


def test_a_checkpoint_serves_for_inference(run: Run):
    model = build()
    result = run(model, checkpoint={})
    assert result.checkpoint is not None
    loaded = load_model(result.checkpoint, build())
    x = data().tensors[0]
    assert torch.equal(loaded(x), model(x))


def test_no_checkpoint_is_written_where_none_is_wanted(run: Run, tmp_path: Path):
    assert run(checkpoint=False).checkpoint is None
    assert not list(tmp_path.rglob("step-*"))


class Recorder(Callback):
    def __init__(self, into: list[str], name: str) -> None:
        self.into, self.name = into, name

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *_: self.into.append(f"{self.name}.{name[3:]}")
        return super().__getattribute__(name)


def test_callbacks_are_called_in_order(run: Run):
    calls: list[str] = []
    run(
        steps=2,
        eval_data=data(),
        eval_every=2,
        checkpoint={"every_steps": 2},
        callbacks=[Recorder(calls, "a"), Recorder(calls, "b")],
    )
    events = ["run_start", "step_end", "step_end", "evaluate_end", "checkpoint", "run_end"]
    assert calls == [f"{who}.{event}" for event in events for who in "ab"]


def test_a_failing_run_tells_its_callbacks(run: Run):
    calls: list[str] = []

    def broken(model: Any, batch: Any) -> torch.Tensor:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        run(loss=broken, callbacks=[Recorder(calls, "a")])
    assert calls == ["a.run_start", "a.exception", "a.run_end"]


@pytest.mark.parametrize("policy", ["full", ("Block",), [nn.Linear]])
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_recomputed_activations_change_nothing(run: Run, strategy: str, policy: Any):
    model = build()
    result = run(model, strategy=strategy, activation_checkpointing=policy)
    assert_same_run(result, reference()[0])
    assert "forward" not in model.blocks[0].__dict__


@pytest.mark.slow
@pytest.mark.thorough
def test_compiling_changes_nothing(run: Run):
    model = build()
    assert_same_run(run(model, compile=True, steps=3), reference(3)[0])
    assert list(model.state_dict()) == list(build().state_dict())


@pytest.mark.parametrize("limit", [1, 3])
def test_the_largest_micro_batch_is_found_by_trying(run: Run, limit: int):
    sizes: list[int] = []

    class Narrow(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sizes.append(len(x))
            if len(x) > limit:
                raise torch.OutOfMemoryError(f"no room for {len(x)}")
            return super().forward(x)

    torch.manual_seed(1)
    result = run(Narrow(), micro_batch_size="auto")
    assert_same_run(result, reference()[0])
    tried = [8, 4, 2] if limit == 3 else [8, 4, 2, 1]
    assert sizes[: len(tried)] == tried
    assert set(sizes[len(tried) :]) <= set(range(1, limit + 1))


def test_a_model_that_never_fits_says_what_to_do(run: Run):
    class Never(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("no room")

    with pytest.raises(ConfigError, match=r"not even one sample .* fits in memory") as caught:
        run(Never(), micro_batch_size="auto")
    assert "strategy='fsdp'" in str(caught.value)


def test_a_weighted_loss_is_a_sum_over_a_count(run: Run):
    """Samples of class 0 count nothing, so micro-batches hold unequal counts."""

    def weighted(model: Any, batch: Any) -> LossSum:
        kept = batch[1] != 0
        each = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return LossSum((each * kept).sum(), kept.sum())

    def plain(model: Any, batch: Any) -> torch.Tensor:
        kept = batch[1] != 0
        return nn.functional.cross_entropy(model(batch[0])[kept], batch[1][kept])

    result = run(loss=weighted, micro_batch_size=3)
    assert_same_run(result, reference(loss=plain)[0])


@pytest.mark.parametrize("micro_batch_size", [8, 3, 1])
def test_a_language_models_own_loss_is_a_mean_over_tokens(run: Run, micro_batch_size: int):
    from transformers import GPT2Config, GPT2LMHeadModel

    def gpt() -> nn.Module:
        torch.manual_seed(3)
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=19, n_positions=8, n_embd=8, n_layer=1, n_head=2,
                resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
            )
        )  # fmt: skip

    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(19, (SAMPLES, 8), generator=generator)
    labels = tokens.clone()
    lengths = torch.randint(2, 9, (SAMPLES,), generator=generator)
    labels[torch.arange(8)[None] >= lengths[:, None]] = -100
    rows = [{"input_ids": t, "labels": one} for t, one in zip(tokens, labels, strict=True)]
    result = run(gpt, rows, loss=..., micro_batch_size=micro_batch_size, steps=4, shuffle=False)

    torch.manual_seed(0)
    model = gpt()
    optimizer = make_adamw(model.named_parameters())
    expected = []
    for first in range(0, SAMPLES, BATCH):
        chosen = slice(first, first + BATCH)
        logits = model(input_ids=tokens[chosen]).logits[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, labels[chosen, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert_same_run(result, expected)


def test_the_same_call_gives_the_same_bits(run: Run, tmp_path: Path):
    runs = [run(build(0.3), output_dir=tmp_path / name).losses for name in "ab"]
    assert runs[0] == runs[1]


def test_loss_fn_of_the_caller_sees_the_module_itself(run: Run):
    def uses_attribute(model: Any, batch: Any) -> torch.Tensor:
        assert len(model.blocks) == 2
        return loss_fn(model, batch)

    for strategy in ("single", "fsdp"):
        run(loss=uses_attribute, strategy=strategy, steps=1)


def test_memory_is_looked_at_as_often_as_metrics_are_logged(
    run: Run, monkeypatch: pytest.MonkeyPatch
):
    asked: list[int] = []

    def peak(device_type: str) -> int:
        asked.append(len(asked) + 1)
        return asked[-1]

    for module in ("loop", "recording"):
        monkeypatch.setattr(f"unipar.train.{module}.peak_memory", peak)
    result = run(strategy="single", steps=8, log_every=3)
    # In the first step, the third, the sixth and the last one; and once for the whole run.
    assert [r.peak_memory for r in result.history] == [1, 1, 2, 2, 2, 3, 3, 4]
    assert result.peak_memory == [5]
