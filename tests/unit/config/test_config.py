"""A run's fields: defaults, what wins over what, and what is said about a mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unipar.config import UNSET, CheckpointConfig, RunConfig
from unipar.errors import ConfigError

CHECKPOINTS = st.one_of(
    st.just(False),
    st.fixed_dictionaries(
        {},
        optional={
            "directory": st.sampled_from(["a", "b/c"]),
            "every_steps": st.integers(1, 100),
            "every_minutes": st.floats(0.5, 60),
            "keep_last": st.none() | st.integers(1, 5),
            "keep_best": st.just({"metric": "loss", "mode": "max"}),
            "async": st.booleans(),
        },
    ),
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "strategy": st.sampled_from(["auto", "ddp", "fsdp:sharding=full", {"name": "ddp", "x": 1}]),
    "devices": st.just("auto") | st.integers(1, 8) | st.sampled_from(["2:8", "1:"]),
    "global_batch_size": st.integers(64, 128),
    "micro_batch_size": st.sampled_from([None, "auto", 1, 64]),
    "eval_every": st.none() | st.integers(1, 9),
    "precision": st.sampled_from(["fp32", "bf16", "fp16", "fp8"]),
    "max_grad_norm": st.none() | st.floats(0.1, 10) | st.just(float("inf")),
    "activation_checkpointing": st.sampled_from(["off", "full", ["Block"]]),
    "compile": st.booleans() | st.just({"mode": "default"}),
    "seed": st.integers(0, 1 << 40),
    "shuffle": st.none() | st.booleans(),
    "checkpoint": CHECKPOINTS,
    "resume": st.sampled_from([None, "some/step-00000001"]),
    "output_dir": st.none() | st.just("out"),
    "loggers": st.lists(st.sampled_from(["tensorboard", "wandb"]), max_size=2),
    "optimizer": st.sampled_from(["adamw", {"name": "sgd", "lr": 0.1, "momentum": 0.9}]),
    "lr_scheduler": st.sampled_from([None, {"name": "cosineannealinglr", "T_max": 10}]),
}
LENGTH = st.one_of(
    st.fixed_dictionaries({"epochs": st.integers(1, 9)}),
    st.fixed_dictionaries({"steps": st.integers(1, 9)}),
    st.just({}),
)


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    return {**draw(st.fixed_dictionaries({}, optional=FIELDS)), **draw(LENGTH)}


@given(runs())
def test_a_config_written_out_reads_back_as_itself(values: dict[str, Any]) -> None:
    config = RunConfig.build(values)
    written = config.model_dump(mode="json", by_alias=True)
    assert RunConfig.build(written).model_dump(mode="json", by_alias=True) == written
    assert RunConfig.build(config) == config
    assert (config.epochs is None) != (config.steps is None)


@given(runs(), runs())
def test_arguments_win_over_the_source_field_by_field(
    under: dict[str, Any], over: dict[str, Any]
) -> None:
    merged, alone = RunConfig.build(under, **over), RunConfig.build(over)
    for field in over:
        ours, theirs = getattr(merged, field), getattr(alone, field)
        if not isinstance(over[field], dict) or "name" in over[field]:
            assert ours == theirs
    for field in set(under) - set(over) - {"epochs", "steps"}:
        assert getattr(merged, field) == getattr(RunConfig.build(under), field)


def test_one_epoch_is_the_default_and_steps_replace_it() -> None:
    assert RunConfig.build().epochs == 1
    config = RunConfig.build({"epochs": 3}, steps=10)
    assert (config.epochs, config.steps) == (None, 10)
    assert RunConfig.build(config, epochs=2).steps is None


def test_arguments_that_were_not_given_do_not_count() -> None:
    assert RunConfig.build({"seed": 3, "steps": 2}, seed=UNSET, steps=UNSET, epochs=UNSET).seed == 3
    assert RunConfig.build({"max_grad_norm": 1.0}, max_grad_norm=None).max_grad_norm is None


def test_options_add_to_what_is_named_and_a_name_replaces_it() -> None:
    under = {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, "checkpoint": "here"}
    config = RunConfig.build(under, optimizer={"lr": 0.5}, checkpoint={"keep_last": 5})
    assert config.optimizer.model_dump() == {"name": "sgd", "lr": 0.5, "momentum": 0.9}
    assert config.checkpoint == CheckpointConfig(directory=Path("here"), keep_last=5)
    replaced = RunConfig.build(under, optimizer={"name": "adamw"})
    assert replaced.optimizer.model_dump() == {"name": "adamw"}
    added = RunConfig.build({"strategy": "fsdp:sharding=full"}, strategy={"cpu_offload": True})
    assert added.strategy == {"name": "fsdp", "sharding": "full", "cpu_offload": True}


def test_module_classes_are_kept_by_name() -> None:
    from torch import nn

    config = RunConfig.build(activation_checkpointing=[nn.Linear, "Block"])
    assert config.activation_checkpointing == ("Linear", "Block")
    assert RunConfig.build(activation_checkpointing=False).activation_checkpointing == "off"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"epochs": 1, "steps": 2}, r"epochs \(1\) and steps \(2\) are both given"),
        (
            {"global_batch_size": 4, "micro_batch_size": 8},
            r"micro_batch_size \(8\) is larger than global_batch_size \(4\)",
        ),
        ({"checkpoint": False, "resume": "auto"}, "nothing to resume from"),
        ({"precision": "bf61"}, r"'bf61' was given\. Allowed: 'fp32', .*Did you mean 'bf16'\?"),
        ({"devices": 0}, r"devices: 0 was given\. Allowed: a whole number above 0, 'auto'"),
        ({"global_batch_size": True}, "global_batch_size: a number is needed, and true is none"),
        ({"checkpoint": {"keep_last": True}}, "keep_last: a number is needed"),
        ({"micro_batch_size": 1.5}, r"1\.5 was given.*'auto' or null"),
        ({"on_nan": "explode"}, "Allowed: 'raise', 'skip' or 'ignore'"),
        ({"checkpoint": {"keep_lst": 1}}, r"'checkpoint\.keep_lst'\. Did you mean 'keep_last'\?"),
        (
            {"checkpoint": {"keep_best": {"mode": "max"}}},
            "'checkpoint.keep_best.metric' is missing",
        ),
        ({"stepz": 1}, r"unknown key 'stepz'\. Did you mean 'steps'\?"),
        ({"strategy": {"sharding": "full"}}, "has no name"),
        ({"optimizer": "admw"}, r"no optimizer 'admw'\. Did you mean 'adamw'\?"),
        ({"optimizer": {"name": "adamw", "lrr": 1}}, r"no argument 'lrr'\. Did you mean 'lr'\?"),
        ({"optimizer": {"name": "adamw", "lr": -1}}, "does not take lr=-1"),
        (
            {"optimizer": {"name": "adam", "fused": True, "foreach": True}},
            "does not take fused=True, foreach=True",
        ),
        (
            {"lr_scheduler": {"name": "cosineannealingwarmrestarts", "T_0": -3}},
            "does not take T_0=-3",
        ),
        ({"optimizer": "lbfgs"}, "several times a step"),
        ({"lr_scheduler": {"name": "cosineannealinglr"}}, "needs T_max"),
        ({"lr_scheduler": "chainedscheduler"}, "made from other schedulers"),
        (
            {"lr_scheduler": {"name": "reducelronplateau", "metric": 3}},
            "metric=3. Give the name of an evaluation metric, or 'loss'",
        ),
        (
            {"lr_scheduler": {"name": "steplr", "step_size": 3, "metric": "loss"}},
            "'steplr' has no argument 'metric'",
        ),
        ({"model": "a:b"}, "'model' is an import path for `unipar train`"),
    ],
)
def test_a_mistake_says_what_was_given_and_what_to_do(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        RunConfig.build(values)
    assert len(str(caught.value)) < 1500


def test_all_mistakes_are_listed_at_once_and_fit_a_screen() -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.build(precision="fp4", devices=-1, seed="x", chekpoint=1, epocs=2)
    said = str(caught.value)
    assert said.startswith("this run cannot start: 5 problems.")
    for part in ("precision: 'fp4'", "devices: -1", "seed: 'x'", "'chekpoint'", "'epocs'"):
        assert part in said
    assert said.count("activation_checkpointing,") == 1
    many = {f"wrong_{number}": 1 for number in range(30)}
    with pytest.raises(ConfigError, match="and 22 more"):
        RunConfig.build(many)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=8) | st.sampled_from(["name", "lr"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted(RunConfig.model_fields)) | st.text(max_size=8), JSON))
def test_anything_at_all_is_a_config_or_a_config_error(values: dict[str, Any]) -> None:
    try:
        config = RunConfig.build(values)
    except ConfigError as error:
        assert str(error)  # noqa: PT017
        return
    assert RunConfig.build(config) == config
