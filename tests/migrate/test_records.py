"""A run is recorded in one place, and what is migrated is compared with it in another."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import CORPUS, files_of, main_of, settings_of

from unipar.cli import main
from unipar.errors import ConfigError
from unipar.migrate import migrate_files, records
from unipar.migrate.launchers import command
from unipar.migrate.verify import run_of
from unipar.migrate.writing import config_text

pytestmark = [
    pytest.mark.usefixtures("forked_programs"), pytest.mark.slow, pytest.mark.timeout(300),
]  # fmt: skip

SCRIPT = """\
import sys
import torch

model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=float(sys.argv[2]))
for step in range(12):
    opt.zero_grad()
    loss = model(torch.randn(4, 2)).square().mean()
    loss.backward()
    opt.step()
"""
FRAMEWORKS = ("ddp/functions", "horovod/trainer", "accelerate/trainer", "deepspeed/trainer",
              "fabric/functions")  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, forked_programs: None) -> Path:
    """A script, and the record of a run of it."""
    root = tmp_path_factory.mktemp("recorded")
    (root / "train.py").write_text(SCRIPT)
    call = ["migrate", str(root / "train.py"), "--steps", "6", "--args", "--lr 0.1"]
    assert main([*call, "--record", str(root / "run.json")]) == 0
    assert sorted(path.name for path in root.iterdir()) == ["run.json", "train.py"]
    return root


@pytest.fixture
def script(recorded: Path, tmp_path: Path) -> Path:
    """Both, elsewhere."""
    for path in recorded.iterdir():
        shutil.copy2(path, tmp_path)
    return tmp_path / "train.py"


def against(script: Path, *more: str) -> int:
    return main(["migrate", str(script), "--against", str(script.with_name("run.json")), *more])


def edit(script: Path, **changes: Any) -> None:
    """Have the record say something else."""
    path = script.with_name("run.json")
    records.write(records.read(path).model_copy(update=changes), path)


def test_the_migrated_script_alone_runs_as_the_record_says(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert against(script) == 0
    said = capsys.readouterr().out
    assert said.count("\n   0 ") == 6
    assert "largest relative difference 0 (up to 1e-05 is rounding): the runs agree" in said
    assert script.with_name("train_unipar.py").exists()


def test_losses_that_differ_from_the_record_are_told(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = records.read(script.with_name("run.json")).losses
    edit(script, losses={0: [*losses[0][:-1], losses[0][-1] * (1 + 3e-5)]})
    assert against(script) == 1
    assert "(up to 1e-05 is rounding): the runs DIFFER" in capsys.readouterr().out
    # Of another device that is rounding, and it is said.
    edit(script, device="NVIDIA H100", versions={"torch": "2.12.1", "unipar": "0.1.0"})
    assert against(script) == 0
    said = capsys.readouterr().out
    assert "recorded on NVIDIA H100 in float32, run on CPU (" in said
    assert "losses of two devices are compared up to 0.0001, since they sum in other" in said
    assert "recorded with torch 2.12.1, here 2." in said
    assert "(up to 0.0001 is rounding): the runs agree" in said


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"device": "NVIDIA H100", "drawn": True}, "draws random numbers on its device"),
        ({"device": "NVIDIA H100", "formats": ["float8_e5m2"]}, "computes in float8_e5m2, of"),
    ],
)
def test_no_bound_is_made_up_for_what_no_bound_holds_of(
    changes: dict[str, Any], told: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(script, **changes)
    assert against(script) == 2
    assert told in " ".join(capsys.readouterr().err.split())
    assert not script.with_name("train_unipar.py").exists()


def test_losses_of_another_number_of_ranks_are_refused(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = records.read(script.with_name("run.json")).losses
    edit(script, losses={0: losses[0], 1: losses[0]})
    assert against(script) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "has losses of 2 ranks, and here the migrated script computed them on 1 rank, so" in said


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--args", "--lr 0.2"], "made with --args '--lr 0.1', and '--lr 0.2' was given."),
        (["--steps", "7"], "made with --steps 6, and 7 was given. Leave --steps out"),
        (["--processes", "2"], "--processes has no effect on train.py: no launcher starts it, so"),
        (["--verify"], "--verify and --against were both given; give one of them."),
    ],
)
def test_another_run_than_the_record_s_is_refused(
    more: list[str], told: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert against(script, *more) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_another_script_than_the_record_s_is_refused(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text(SCRIPT.replace("12", "13"))
    assert against(script) == 2
    assert "is not the train.py that was recorded. Compare" in " ".join(
        capsys.readouterr().err.split()
    )
    other = script.with_name("other.py")
    script.rename(other)
    assert against(other) == 2
    assert "the record is of train.py, and other.py is to be" in " ".join(
        capsys.readouterr().err.split()
    )


def test_settings_beside_the_script_are_of_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, record = tmp_path / "train.py", str(tmp_path / "run.json")
    script.write_text(SCRIPT)
    (tmp_path / "config.json").write_text("{}")
    call = ["migrate", str(script), "--steps", "2", "--args", "--lr 0.1", "--record", record]
    assert main(call) == 0
    capsys.readouterr()
    assert main(call) == 2
    assert "run.json is there already. Pass --force" in " ".join(capsys.readouterr().err.split())
    # A record that is there is not among what is recorded.
    assert main([*call, "--force"]) == 0
    assert sorted(records.read(Path(record)).files) == ["config.json", "train.py"]
    (tmp_path / "config.json").unlink()
    assert against(script) == 2
    assert "of a program that has config.json, which is not in" in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda text: text[:200], "is no record, or is damaged: "),
        (lambda text: text.replace("float32", "float16"), "is damaged, or was edited"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "is a record of format 2, and"),
        (lambda _: '{"losses": {}}', "is no record of unipar migrate --record."),
        (lambda _: "[" * 100_000, "is no record, or is damaged: "),
        (lambda _: "\ud800", "is no record, or is damaged: "),
    ],
)
def test_damaged_and_foreign_files_are_told(
    damage: Callable[[str], str], told: str, script: Path
) -> None:
    path = script.with_name("run.json")
    path.write_bytes(damage(path.read_text()).encode(errors="surrogatepass"))
    with pytest.raises(ConfigError) as caught:
        records.read(path)
    assert told in str(caught.value)
    path.unlink()
    with pytest.raises(ConfigError, match=r"run\.json cannot be read"):
        records.read(path)


def test_losses_that_are_no_numbers_are_kept(script: Path) -> None:
    path = script.with_name("run.json")
    edit(script, losses={0: [1.0, float("nan"), float("inf")]})
    assert str(records.read(path).losses) == "{0: [1.0, nan, inf]}"
    data = json.loads(path.read_text())
    del data["losses"], data["digest"]
    path.write_text(json.dumps({**data, "digest": records.digest_of(data)}))
    with pytest.raises(ConfigError, match="is no record: losses: Field required"):
        records.read(path)


HALF = """\
import torch

model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(4, 2)).float().square().mean()
    loss.backward()
    opt.step()
"""


def test_the_formats_of_a_run_are_noted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HALF)
    run = run_of(tmp_path, "train.py", {}, command("python", 1), timeout=120)
    assert run.formats == ("bfloat16", "float32")
    assert not run.drawn
    assert run.device.startswith("CPU (")


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("program", FRAMEWORKS)
def test_each_framework_is_recorded_and_compared(
    program: str, processes: int, tmp_path: Path
) -> None:
    files, settings = files_of(program), settings_of(program)
    migrations = migrate_files(files, settings=settings)
    one = migrations[main_of(program)]
    # A Fabric says itself on how many devices it runs.
    arguments = [f"--devices={processes}"] if program.startswith("fabric/") else []
    found = records.record(
        CORPUS / program, main_of(program), records.digests(files, settings),
        launcher=one.launcher, arguments=arguments, steps=12, processes=processes, timeout=120,
    )  # fmt: skip
    assert found.ranks == processes
    path = tmp_path / "run.json"
    records.write(found, path)
    records.check(
        records.read(path), CORPUS / program, main_of(program), arguments=None, steps=None,
        processes=processes,
    )  # fmt: skip
    proof = records.prove(
        records.read(path), CORPUS / program,
        {name: each.code for name, each in migrations.items()}, config_text(one),
        launcher=one.launcher, timeout=120,
    )  # fmt: skip
    assert proof.difference <= 1e-6
    assert all(len(set(losses)) >= 8 for losses in proof.original.values())
