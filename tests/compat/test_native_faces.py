"""Scripts that train by PyTorch's and Horovod's calls train the same when their imports change."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

from unipar.migrate import migrate_files
from unipar.migrate.launchers import command
from unipar.migrate.verify import Proof, losses_of

# A script does the same however its interpreter has begun.
pytestmark = [
    pytest.mark.usefixtures("forked_programs"), pytest.mark.slow, pytest.mark.timeout(400),
]  # fmt: skip

CORPUS = Path(__file__).parent / "corpus"
TORCHRUN = command("torchrun", 2)
HOROVODRUN = command("horovodrun", 2)
PYTHON = [sys.executable]
ALONE = ("amp_recipe", "dcgan", "mingpt", "mnist", "vae", "word_language_model")
STARTS = {
    "torch/imagenet": PYTHON, "torch/multigpu_torchrun": TORCHRUN, "torch/nanogpt": TORCHRUN,
    "horovod/elastic": HOROVODRUN, "horovod/imagenet": HOROVODRUN, "horovod/mnist": HOROVODRUN,
    "horovod/synthetic_benchmark": HOROVODRUN,
}  # fmt: skip
"""Programs of several ranks, and what starts them; one starts its ranks itself."""

# A class of its own with an endless sampler; ranks of a script's own, with half precision where
# variables say so; Horovod's collectives.
QUICK = {("mingpt", "single"), ("torch/nanogpt", "fsdp"), ("horovod/mnist", "zero2")}


def migrated(program: str) -> dict[str, str]:
    path = CORPUS / f"{program}.py"
    found = migrate_files({path.name: path.read_text()})[path.name]
    assert not found.notes
    pairs = zip(path.read_text().splitlines(), found.code.splitlines(), strict=False)
    changed = [after for before, after in pairs if before != after and "unipar.compat" in after]
    assert changed
    return {path.name: found.code}


@functools.cache
def original(program: str, start: tuple[str, ...]) -> dict[int, list[float]]:
    path = CORPUS / f"{program}.py"
    return losses_of(path.parent, path.name, {}, list(start), name="original", timeout=180)


def under(program: str, strategy: str, start: list[str]) -> dict[int, list[float]]:
    path = CORPUS / f"{program}.py"
    # What one rank alone writes is refused where all of them have a part of it.
    environ = {"UNIPAR_STRATEGY": strategy, "SAVES": "1" if strategy == "ddp" else "0"}
    return losses_of(path.parent, path.name, migrated(program), start, timeout=180, environ=environ)


def cases(*pairs: tuple[str, str]) -> list[object]:
    return [pytest.param(*one, marks=() if one in QUICK else pytest.mark.thorough) for one in pairs]


@pytest.mark.parametrize(("name", "strategy"), cases(*((name, "single") for name in ALONE)))
def test_one_process_trains_as_before(name: str, strategy: str) -> None:
    program = f"torch/{name}"
    proof = Proof(original(program, tuple(PYTHON)), under(program, strategy, PYTHON))
    assert proof.difference <= 1e-6
    assert all(len(set(losses)) >= 8 for losses in proof.original.values())


@pytest.mark.parametrize(
    ("name", "strategy"),
    cases(*((name, s) for name in ("mingpt", "mnist", "vae") for s in ("ddp", "fsdp", "zero2"))),
)
def test_ranks_share_what_was_one_process_s(name: str, strategy: str) -> None:
    program = f"torch/{name}"
    alone = original(program, tuple(PYTHON))[0]
    both = under(program, strategy, TORCHRUN)
    means = [(a + b) / 2 for a, b in zip(both[0], both[1], strict=True)]
    assert means[:10] == pytest.approx(alone[:10], rel=1e-4)


@pytest.mark.parametrize(
    ("program", "strategy"),
    cases(*((program, s) for program in STARTS for s in ("ddp", "fsdp", "zero2"))),
)
def test_ranks_of_the_scripts_own_train_as_before(program: str, strategy: str) -> None:
    if program.startswith("horovod/"):
        pytest.importorskip("horovod")
    start = STARTS[program]
    proof = Proof(original(program, tuple(start)), under(program, strategy, start))
    assert proof.difference <= 1e-5
    assert sorted(proof.original) == [0, 1]
    assert all(len(set(losses)) >= 8 for losses in proof.original.values())
