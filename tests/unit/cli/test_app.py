"""Exit codes and messages that no whole process is needed for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unipar.cli import main
from unipar.cli.convert import parse_size
from unipar.config.runfile import RunFile
from unipar.errors import CheckpointError, ConfigError
from unipar.strategy import registry

pytestmark = pytest.mark.usefixtures("forked_programs")


def test_an_error_is_one_line_and_its_kind_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail_with(error: BaseException) -> int:
        def fail() -> Any:
            raise error

        monkeypatch.setattr("unipar.install.doctor.examine", fail)
        return main(["doctor"])

    assert fail_with(ConfigError("fix [this]")) == 2
    assert capsys.readouterr().err == "ConfigError: fix [this]\n"
    assert fail_with(CheckpointError("it broke")) == 1
    assert capsys.readouterr().err == "CheckpointError: it broke\n"
    assert fail_with(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "unipar: interrupted.\n"
    with pytest.raises(ZeroDivisionError):
        fail_with(ZeroDivisionError())


@pytest.mark.parametrize("command", ["schema", "doctor"])
def test_a_reader_that_leaves_early_is_no_error_to_talk_of(command: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as gone:
        done = subprocess.run(
            [sys.executable, "-m", "unipar", command],
            stdout=gone,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.stderr == ""
    assert done.returncode == 1


def test_another_broken_pipe_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise BrokenPipeError("a worker's")

    monkeypatch.setattr("unipar.install.doctor.examine", fail)
    with pytest.raises(BrokenPipeError, match="a worker's"):
        main(["doctor"])


def test_verbose_shows_the_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(tmp_path / "no.yaml")]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert main(["train", str(tmp_path / "no.yaml"), "--verbose"]) == 2
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert told.count("there is no config file") >= 1


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("500MiB", 500 << 20), ("1.5 kb", 1500), ("7", 7), ("2TB", 2 * 10**12)],
)
def test_sizes_are_read_as_written(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-1GB", "0", "5GBB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="Write it like 5GB or 500MiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope", "out"], "there is no checkpoint nope"),
        ([".", "out"], "looks neither like a checkpoint of unipar nor like safetensors"),
        (["x.safetensors", "out", "--to", "safetensors"], "is safetensors already"),
        (["x.safetensors", "out", "--dtype", "bf16"], "--dtype is for safetensors"),
        (["x.safetensors", "full"], "is not an empty directory"),
    ],
)
def test_a_conversion_that_cannot_be_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    if arguments[0].endswith("safetensors"):
        (tmp_path / arguments[0]).touch()
    assert main(["convert", *arguments]) == 2
    assert says in capsys.readouterr().err


def schema(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["schema"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_schema_describes_every_field_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    described = schema(capsys)
    assert set(described["properties"]) == set(RunFile.model_fields)
    assert all(field["description"] for field in described["properties"].values())
    assert described["required"] == ["model", "data"]
    assert described["additionalProperties"] is False
    references = set(re.findall(r"#/\$defs/([^\"]+)", json.dumps(described)))
    assert references == set(described["$defs"])


def test_the_schema_holds_each_strategys_options(capsys: pytest.CaptureFixture[str]) -> None:
    names, inline, *forms = schema(capsys)["properties"]["strategy"]["anyOf"]
    assert names["enum"] == [*registry.names(), "auto"]
    assert re.search(inline["pattern"], "fsdp:sharding=hybrid")
    assert not re.search(inline["pattern"], "fdsp:sharding=hybrid")
    by_name = {form["properties"]["name"]["const"]: form for form in forms}
    assert set(by_name) == set(registry.names())
    for name, form in by_name.items():
        options = registry.strategy_class(name).options_type
        assert set(form["properties"]) == {"name", *options.model_fields}
        assert form["additionalProperties"] is False
        assert "name" in form["required"]


@pytest.mark.parametrize(
    ("key", "short"),
    [
        ("optimizer", "adamw"),
        ("lr_scheduler", "steplr"),
        ("checkpoint", "directory"),
        ("loggers", "tensorboard"),
    ],
)
def test_the_schema_takes_the_short_forms(
    capsys: pytest.CaptureFixture[str], key: str, short: str
) -> None:
    forms = schema(capsys)["properties"][key]["anyOf"]
    assert any(short in form.get("enum", []) or "string" in form.get("type", "") for form in forms)


def test_a_dry_run_says_that_it_imports_what_the_file_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["train", "--help"])
    said = " ".join(re.sub(r"[^\w.]+", " ", capsys.readouterr().out).split())
    assert "What the run file names is imported all the same which runs that code" in said
