"""Run files, the environment and flags: which wins, and where a mistake is said to stand."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unipar.config import OptimizerConfig
from unipar.config.settings import load_settings
from unipar.errors import ConfigError
from unipar.optimizers.groups import GroupedOptimizer, GroupedScheduler, factories
from unipar.optimizers.named import NamedOptimizer, NamedScheduler
from unipar.utils.documents import parse_value, read_document

MODULE = """
from torch import nn

from unipar import Objective

built = []


def build(depth=2):
    return nn.Linear(depth, depth)


def data(size=8):
    built.append(size)
    return list(range(size))


ready = [1, 2, 3]


def loss(model, batch):
    return model(batch).mean()


in_parts = Objective(lambda batch: batch, lambda output, batch: output.mean())


class Watch:
    def __init__(self, every=1):
        self.every = every


def adamw(named_parameters):
    raise AssertionError
"""


@pytest.fixture
def directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Path]:
    (tmp_path / "parts_of_a_run.py").write_text(MODULE)
    (tmp_path / "broken_part.py").write_text("x = 1\nundefined_name\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("parts_of_a_run", "broken_part"):
        sys.modules.pop(name, None)


def write(directory: Path, text: str, name: str = "run.yaml") -> Path:
    path = directory / name
    path.write_text(text)
    return path


BASE = "model: parts_of_a_run:build\ndata: parts_of_a_run:data\n"


def test_a_file_beside_its_module_gives_the_arguments_of_fit(directory: Path) -> None:
    path = write(
        directory,
        """
model: {target: "parts_of_a_run:build", depth: 3}
data: {target: "parts_of_a_run:data", size: 5}
eval_data: parts_of_a_run:ready
loss: parts_of_a_run:loss
metrics: {mean: "parts_of_a_run:loss"}
callbacks: [{target: "parts_of_a_run:Watch", every: 4}]
optimizer: parts_of_a_run:adamw
lr_scheduler: {name: steplr, step_size: 2}
strategy: ddp
""",
    )
    arguments = load_settings(path, environ={}).run.arguments()
    assert isinstance(arguments["model"], functools.partial)
    assert arguments["model"]().in_features == 3
    assert arguments["data"] == [0, 1, 2, 3, 4]
    assert arguments["eval_data"] == [1, 2, 3]
    assert arguments["metrics"]["mean"] is arguments["loss"]
    assert arguments["callbacks"][0].every == 4
    assert arguments["optimizer"].__name__ == "adamw"
    assert arguments["lr_scheduler"].name == "steplr"
    assert (arguments["strategy"], arguments["epochs"], arguments["steps"]) == ("ddp", 1, None)


def test_several_optimizers_are_of_names_and_import_paths(directory: Path) -> None:
    text = """
optimizer:
  matrices: {target: "parts_of_a_run:adamw", params: "*.weight", lr_scheduler: steplr}
  rest: {name: sgd, lr: 0.1, lr_scheduler: {name: steplr, step_size: 2}}
"""
    with pytest.raises(
        ConfigError, match=r"run.yaml, line 5: optimizer.matrices.lr_scheduler.*step_size"
    ):
        load_settings(write(directory, BASE + text), environ={})
    path = write(directory, BASE + text.replace(", lr_scheduler: steplr", ""))
    run = load_settings(path, environ={}, sets=["optimizer.rest.lr=0.5"]).run
    asked = run.arguments()["optimizer"]
    build, schedule = factories(asked, None)
    assert isinstance(build, GroupedOptimizer)
    assert build.groups[0].build is sys.modules["parts_of_a_run"].adamw
    assert build.groups[1].build == NamedOptimizer("sgd", {"lr": 0.5})
    assert isinstance(schedule, GroupedScheduler)
    assert schedule.builds == (NamedScheduler("steplr", {"step_size": 2}),)


def test_a_loss_in_parts_is_imported_as_it_is(directory: Path) -> None:
    path = write(directory, BASE + "loss: parts_of_a_run:in_parts\n")
    loss = load_settings(path, environ={}).run.arguments()["loss"]
    assert loss is sys.modules["parts_of_a_run"].in_parts


def test_a_model_without_arguments_is_the_function_itself(directory: Path) -> None:
    arguments = load_settings(write(directory, BASE), environ={}).run.arguments()
    assert arguments["model"] is sys.modules["parts_of_a_run"].build
    assert arguments["optimizer"] == OptimizerConfig(name="adamw")


KEYS: dict[str, tuple[str, st.SearchStrategy[Any]]] = {
    "seed": ("seed", st.integers(0, 99)),
    "steps": ("steps", st.integers(1, 99)),
    "precision": ("precision", st.sampled_from(["fp32", "bf16", "fp16"])),
    "checkpoint.keep_last": ("checkpoint__keep_last", st.integers(1, 99)),
    "optimizer.lr": ("optimizer__lr", st.floats(1e-6, 0.5)),
    "max_grad_norm": ("max_grad_norm", st.floats(0.1, 10)),
}
LAYER = st.fixed_dictionaries({}, optional={key: values for key, (_, values) in KEYS.items()})


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(file=LAYER, environment=LAYER, flags=LAYER)
def test_flags_win_over_the_environment_and_that_over_the_file(
    directory: Path, file: dict[str, Any], environment: dict[str, Any], flags: dict[str, Any]
) -> None:
    nested: dict[str, Any] = {}
    for key, value in file.items():
        parent, _, child = key.rpartition(".")
        (nested.setdefault(parent, {}) if parent else nested)[child] = value
    path = write(directory, BASE + yaml.safe_dump(nested or {"seed": 0}))
    loaded = load_settings(
        path,
        environ={f"UNIPAR_{KEYS[key][0].upper()}": str(v) for key, v in environment.items()},
        sets=[f"{key}={value}" for key, value in flags.items()],
    )
    for key, value in {**file, **environment, **flags}.items():
        found: Any = loaded.run.model_dump()
        for part in key.split("."):
            found = found[part]
        assert found == pytest.approx(value) if isinstance(value, float) else found == value


def test_a_flag_for_steps_replaces_a_files_epochs(directory: Path) -> None:
    run = load_settings(write(directory, BASE + "epochs: 3\n"), flags={"steps": 5}, environ={}).run
    assert (run.epochs, run.steps) == (None, 5)


def test_flags_that_were_not_given_do_not_count(directory: Path) -> None:
    path = write(directory, BASE + "precision: bf16\n")
    assert load_settings(path, flags={"precision": None}, environ={}).run.precision == "bf16"


def test_a_new_name_leaves_the_old_ones_options_behind(directory: Path) -> None:
    path = write(directory, BASE + "strategy: {name: fsdp, sharding: hybrid}\n")
    kept = load_settings(path, sets=["strategy.cpu_offload=true"], environ={}).run.strategy
    assert kept == {"name": "fsdp", "sharding": "hybrid", "cpu_offload": True}
    assert load_settings(path, flags={"strategy": "ddp"}, environ={}).run.strategy == "ddp"


def test_variables_keep_the_case_of_a_level_that_is_not_all_upper(directory: Path) -> None:
    environ = {"UNIPAR_LR_SCHEDULER__NAME": "cosineannealinglr", "UNIPAR_LR_SCHEDULER__T_max": "9"}
    run = load_settings(write(directory, BASE), environ=environ).run
    assert run.lr_scheduler is not None
    assert run.model_dump()["lr_scheduler"] == {"name": "cosineannealinglr", "T_max": 9}


WRONG = """\
model: parts_of_a_run:build
data: parts_of_a_run
eppchs: 3
checkpoint:
  keep_last: 2
  every_steps: -1
  keep_lst: 4
"""


def test_every_mistake_is_given_its_place(directory: Path) -> None:
    path = write(directory, WRONG)
    with pytest.raises(ConfigError) as caught:
        load_settings(
            path,
            environ={"UNIPAR_PRECISION": "fp17", "UNIPAR_STEPZ": "1", "HOME": "/"},
            flags={"devices": 0},
            sets=["lr_scheduler.name=cosine"],
        )
    said = str(caught.value)
    for part in (
        "8 problems",
        f"{path}, line 2: data: 'parts_of_a_run' was given. Allowed: text like "
        "'package.module:name'",
        f"{path}, line 3: unknown key 'eppchs'. Did you mean 'epochs'?",
        f"{path}, line 6: checkpoint.every_steps: -1",
        f"{path}, line 7: unknown key 'checkpoint.keep_lst'. Did you mean 'keep_last'?",
        "environment variable UNIPAR_PRECISION: precision: 'fp17'",
        "environment variable UNIPAR_STEPZ: unknown key 'stepz'. Did you mean 'steps'?",
        "--devices: devices: 0",
        "--set lr_scheduler.name=cosine: lr_scheduler: there is no lr_scheduler 'cosine'",
    ):
        assert part in said
    assert len(said.splitlines()) <= 10


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("run.yaml", BASE + "strategy:\n  name: ddp\n  bucket_mb: 3\n", 5),
        ("run.yaml", BASE + "strategy: {name: ddp,\n  bucket_mb: 3}\n", 4),
        ("run.toml", 'model = "a:b"\ndata = "a:b"\n\n[strategy]\nname = "ddp"\nbucket_mb = 3\n', 6),
        ("run.toml", 'model = "a:b"\ndata="a:b"\nstrategy = {name = "ddp", bucket_mb = 3}\n', 3),
        ("run.toml", 'strategy.name = "ddp"\nstrategy.bucket_mb = 3\nmodel="a:b"\ndata="a:b"\n', 2),
    ],
)
def test_a_wrong_strategy_option_is_found_in_the_file(
    directory: Path, name: str, text: str, line: int
) -> None:
    path = write(directory, text, name)
    says = f"{path}, line {line}: unknown key 'bucket_mb'. Did you mean 'bucket_cap_mb'?"
    with pytest.raises(ConfigError) as caught:
        load_settings(path, environ={})
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ({"flags": {"strategy": "ddp:bucket_mb=3"}}, "--strategy"),
        ({"flags": {"launcher": "slurm:partitoin=gpu"}}, "--launcher"),
        ({"sets": ["strategy=ddp:bucket_mb=3"]}, "--set strategy=ddp:bucket_mb=3"),
        (
            {"environ": {"UNIPAR_STRATEGY": "ddp:bucket_mb=3"}},
            "environment variable UNIPAR_STRATEGY",
        ),
    ],
)
def test_an_option_that_is_written_inline_is_found_where_that_is(
    directory: Path, source: dict[str, Any], place: str
) -> None:
    text = BASE + "strategy: {name: ddp, bucket_cap_mb: 3}\nlauncher: {name: slurm, time: '30'}\n"
    path = write(directory, text)
    with pytest.raises(ConfigError) as caught:
        load_settings(path, **{"environ": {}, **source})
    assert f": {place}: unknown key" in str(caught.value)
    assert str(path) not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("data", "parts_of_a_run:dat", "'parts_of_a_run' has no 'dat'. Did you mean 'data'?"),
        ("data", "no_such_module:dat", "there is no module 'no_such_module'"),
        ("data", "broken_part:dat", "importing 'broken_part' failed: NameError"),
        (
            "model",
            "{target: 'parts_of_a_run:build', dpth: 1}",
            "unexpected keyword argument 'dpth'",
        ),
        ("data", "{target: 'parts_of_a_run:ready', size: 1}", "is an object, not a function"),
    ],
)
def test_what_cannot_be_imported_or_called_is_given_its_place(
    directory: Path, key: str, value: str, says: str
) -> None:
    lines = {"model": "parts_of_a_run:build", "data": "parts_of_a_run:data"} | {key: value}
    path = write(directory, "".join(f"{name}: {text}\n" for name, text in lines.items()))
    loaded = load_settings(path, environ={})
    with pytest.raises(ConfigError) as caught:
        loaded.run.arguments(loaded.where)
    said = str(caught.value)
    assert said.startswith(f"{path}, line {list(lines).index(key) + 1}: {key}: ")
    assert says in said
    if "broken" in value:
        assert f"{directory / 'broken_part.py'}, line 2" in said


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("run.yaml", "model: [1, 2\n", "line 2: this is not valid YAML"),
        ("run.yaml", "steps: 1\nseed: 2\nsteps: 3\n", "line 3: 'steps' is already set on line 1"),
        ("run.yaml", "- a\n", "holds a list"),
        ("run.toml", "steps = = 1\n", "not valid TOML"),
        ("run.json", "{}", "ends in .yaml, .yml or .toml"),
    ],
)
def test_a_file_that_is_none_says_why(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_document(write(tmp_path, text, name))
    assert says in str(caught.value)
    assert name in str(caught.value)


def test_a_missing_file_lists_those_beside_it(tmp_path: Path) -> None:
    write(tmp_path, "", "other.yaml")
    with pytest.raises(ConfigError, match=r"there is no config file .*nope\.yaml.*other\.yaml"):
        read_document(tmp_path / "nope.yaml")


@pytest.mark.parametrize("item", ["steps", "=3", "a..b=1", "seed.deeper=1"])
def test_a_set_that_is_not_one_is_shown(directory: Path, item: str) -> None:
    with pytest.raises(ConfigError, match=f"--set {item}"):
        load_settings(write(directory, BASE), sets=["seed=1", item], environ={})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("3", 3),
        ("-2.5", -2.5),
        ("off", "off"),
        ("no", "no"),
        ("true", True),
        ("null", None),
        ("", None),
        ("[1, 2]", [1, 2]),
        ("{a: 1e2}", {"a": 100.0}),
        ("2026-01-01", "2026-01-01"),
        ("12:30:00", "12:30:00"),
        ("1_000", 1000),
        ("[", "["),
        (".inf", float("inf")),
    ],
)
def test_values_mean_what_people_write(text: str, value: Any) -> None:
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)
