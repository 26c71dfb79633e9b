"""Scripts that change nothing but their imports train as under Colossal-AI itself.

The originals run through ``patched_colossalai.py``, since the published Colossal-AI does not run
on a CPU; it changes what unipar's backend changes, and nothing else of what is trained.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from patched_colossalai import OTHERS, PLUGINS

from unipar.migrate import migrate_files
from unipar.migrate.launchers import command
from unipar.migrate.verify import Proof, losses_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[3]
FACES = ROOT / "tests" / "compat" / "corpus" / "colossalai"
MIGRATED = ROOT / "tests" / "migrate" / "corpus" / "colossalai"
PATCHED = Path(__file__).parent / "patched_colossalai.py"
TORCHRUN = command("torchrun", 2)

ALL = ("own", "ddp", "fsdp")
# Ranks that share each layer share samples, too.
STRATEGIES = {"migrate/llama": ("own",)}
"""``own`` is what the plugin asks for, which is Colossal-AI itself where that can run."""

# Clipping, groups and a schedule; files of shards, of weights and optimizer, read again.
QUICK = {("bert", "own"), ("checkpointing", "fsdp")}

Losses = dict[int, list[float]]


def program(name: str) -> tuple[Path, str, dict[str, str]]:
    """The directory of a program, the file that is run, and its files."""
    if name in PLUGINS:
        return FACES, f"{name}.py", {f"{name}.py": (FACES / f"{name}.py").read_text()}
    root = MIGRATED / name.partition("/")[2]
    found = {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*.py")}
    return root, "train.py", found


@functools.cache
def original(name: str, *arguments: str) -> Losses:
    root, main, _ = program(name)
    launcher = [*TORCHRUN, str(PATCHED), (PLUGINS | OTHERS)[name]]
    found = losses_of(
        root, main, {}, launcher, name="original", timeout=180, steps=40, arguments=arguments
    )
    # Gemini runs the backward pass of a loss by that of another, which is seen as well.
    return found if name != "gemini" else {rank: losses[::2] for rank, losses in found.items()}


def under(name: str, strategy: str, *arguments: str) -> Losses:
    root, main, files = program(name)
    migrations = migrate_files(files)
    assert not [str(note) for one in migrations.values() for note in one.notes]
    changed = {path: one.code for path, one in migrations.items()}
    for path, text in files.items():
        pairs = zip(text.splitlines(), changed[path].splitlines(), strict=True)
        differing = [after for before, after in pairs if before != after]
        assert all("unipar.compat.colossalai" in line for line in differing)
    environ = {} if strategy == "own" else {"UNIPAR_STRATEGY": strategy}
    return losses_of(
        root, main, changed, TORCHRUN, timeout=180, steps=40, environ=environ, arguments=arguments
    )


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(*one, marks=() if one in QUICK else pytest.mark.thorough)
        for one in (
            (name, under) for name in (*PLUGINS, *OTHERS) for under in STRATEGIES.get(name, ALL)
        )
    ],
)
def test_losses_are_those_of_colossalai(name: str, strategy: str) -> None:
    proof = Proof(original(name), under(name, strategy))
    # Gemini rounds weights, sums and losses to bf16.
    assert proof.difference <= (1e-5 if name != "gemini" else 2e-2)
    assert sorted(proof.original) == [0, 1]
    assert all(len(set(losses)) >= 8 for losses in proof.original.values())


@pytest.mark.thorough
def test_without_stages_a_step_is_that_of_colossalais_stages() -> None:
    # The last stage has the losses, each of a micro-batch and divided by their number, two.
    micro = original("llama", "--pp", "2")[1]
    theirs = [one + other for one, other in zip(micro[::2], micro[1::2], strict=True)]
    # Ranks that share layers have the same samples, as stages do.
    ours = under("llama", "mesh:tp=2", "--pp", "2")
    assert len({*theirs}) >= 8
    assert ours[0] == pytest.approx(theirs, rel=1e-5)
    assert ours[1] == pytest.approx(theirs, rel=1e-5)


@pytest.mark.thorough
def test_a_script_goes_on_from_its_files(tmp_path: Path) -> None:
    whole = under("resnet", "fsdp", "--checkpoint", str(tmp_path / "kept"))
    names = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert names == ["lr_scheduler_2.pth", "model_2.pth", "optimizer_2.pth"]
    again = under("resnet", "ddp", "--checkpoint", str(tmp_path / "kept"), "--resume", "2")
    for rank, losses in again.items():
        assert losses == pytest.approx(whole[rank][-len(losses) :], rel=1e-5)
