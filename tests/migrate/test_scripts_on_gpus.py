"""Scripts train the same on a GPU before and after their imports change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from unipar.migrate import migrate_files
from unipar.migrate.launchers import command
from unipar.migrate.verify import losses_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none"),
    pytest.mark.usefixtures("forked_programs"),
    pytest.mark.timeout(200),
]

TESTS = Path(__file__).resolve().parents[1]
PROGRAMS = [
    "migrate/corpus/accelerate/flat",
    # Gloo joins them, and their models are on a GPU.
    "migrate/corpus/ddp/accumulation",
    "migrate/corpus/ddp/flat",
    "migrate/corpus/ddp/package",
    "compat/corpus/torch/imagenet.py",
    "migrate/corpus/ddp/functions",
    # Weights are drawn on the GPU.
    "compat/corpus/deepspeed/divided.py",
    "migrate/corpus/deepspeed/adversarial",
    "migrate/corpus/fsdp/accumulation",
    "migrate/corpus/fsdp/transformer",
    # They stay on the CPU, under autocast for CPUs.
    "migrate/corpus/torch/amp",
    "compat/corpus/torch/amp_recipe.py",
    "migrate/corpus/torch/chars",
    "compat/corpus/torch/nanogpt.py",
]
HALF = ("ddp/accumulation", "fsdp/accumulation", "nanogpt.py")
"""They compute in half precision, where sums in another order are rounded otherwise."""
ORTHOGONAL = "compat/corpus/deepspeed/divided.py"
"""Its weights are made orthogonal, by another library on a GPU than on the host."""


@pytest.mark.parametrize("program", PROGRAMS)
def test_losses_on_one_gpu_are_equal_before_and_after(program: str) -> None:
    path = TESTS / program
    root, name = (path.parent, path.name) if path.is_file() else (path, "train.py")
    files = [path] if path.is_file() else sorted(root.rglob("*.py"))
    code = {one.relative_to(root).as_posix(): one.read_text() for one in files}
    found = migrate_files(code)
    start = command(found[name].launcher, 1)
    migrated = {path: one.code for path, one in found.items()}
    migrated["unipar.yaml"] = yaml.safe_dump(dict(found[name].config))
    before = losses_of(root, name, {}, start, name="original", timeout=90)
    after = losses_of(root, name, migrated, start, timeout=90)
    assert sorted(after) == sorted(before)
    for rank, losses in before.items():
        bound = 2e-2 if program.endswith(HALF) else 1e-4 if program == ORTHOGONAL else 1e-5
        assert after[rank] == pytest.approx(losses, rel=bound)
