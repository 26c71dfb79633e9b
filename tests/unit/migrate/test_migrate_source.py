"""Which imports change, and that nothing else is touched."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

import pytest

from unipar.errors import ConfigError
from unipar.migrate import Migration, migrate_source

HEAD = """\
import torch
from torch import nn
model = nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
"""
LOOP = """\
for x, y in data:
    opt.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    opt.step()
"""
DDP = """\
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
"""


FACE = "unipar.compat.torch"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import torch", f"import {FACE} as torch"),
        ("from torch import nn, optim", f"from {FACE} import nn, optim"),
        ("from torch import fft", "from torch import fft"),
        ("import torch.nn as nn", f"import {FACE}.nn as nn"),
        ("import torch.nn.functional as F", "import torch.nn.functional as F"),
        ("import torch.distributed as dist", f"import {FACE}.distributed as dist"),
        ("import torch.utils.data", f"import {FACE} as torch"),
        ("import torch\nimport torch.utils.data\n", f"import {FACE} as torch\n"),
        ("import os, torch.optim", f"import os, {FACE} as torch"),
        ("from torch.nn.parallel import DistributedDataParallel as DDP",
         f"from {FACE}.nn.parallel import DistributedDataParallel as DDP"),
        ("from torch.nn.utils import (\n    clip_grad_norm_,  # of all\n    parametrize,\n)",
         f"from {FACE}.nn.utils import (\n    clip_grad_norm_,  # of all\n    parametrize,\n)"),
        ("from torch.utils.data import Dataset", "from torch.utils.data import Dataset"),
        ("from torch.optim import AdamW", "from torch.optim import AdamW"),
        ("from torch.distributed.fsdp import fully_shard",
         f"from {FACE}.distributed.fsdp import fully_shard"),
        ("from torch.cuda import amp", f"from {FACE}.cuda import amp"),
    ],
)  # fmt: skip
def test_imports_of_what_the_face_replaces_change_and_no_others(before: str, after: str) -> None:
    source = f"{before.rstrip()}\nloss.backward()\n"
    assert migrate_source(source).code == f"{after.rstrip()}\nloss.backward()\n"


@pytest.mark.parametrize(
    ("code", "launcher", "dialect"),
    [
        (HEAD + LOOP, "python", "torch"),
        (DDP + LOOP, "torchrun", "ddp"),
        (DDP + LOOP + "import torch.multiprocessing as mp\nmp.spawn(main, nprocs=2)\n", "python",
         "ddp"),
        (HEAD + "from torch.distributed.fsdp import fully_shard\n" + LOOP, "torchrun", "fsdp"),
        (HEAD + "import horovod.torch as hvd\nhvd.init()\n" + LOOP, "horovodrun", "horovod"),
    ],
)  # fmt: skip
def test_a_script_is_started_as_before(code: str, launcher: str, dialect: str) -> None:
    migration = migrate_source(code)
    assert (migration.launcher, migration.dialect) == (launcher, dialect)
    assert migration.changed


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import horovod.torch as hvd", "import unipar.compat.horovod.torch as hvd"),
        ("from horovod import torch as hvd", "from unipar.compat.horovod import torch as hvd"),
        ("import horovod.torch", "from unipar.compat import horovod"),
        ("from horovod.torch import init, rank",
         "from unipar.compat.horovod.torch import init, rank"),
    ],
)  # fmt: skip
def test_horovods_face_is_imported_too(before: str, after: str) -> None:
    migration = migrate_source(f"{before}\nimport torch\n{LOOP}")
    assert migration.code == f"{after}\nimport {FACE} as torch\n{LOOP}"


def test_a_line_that_imports_more_than_horovod_loses_nothing() -> None:
    migration = migrate_source(f"import os, horovod.torch\nimport torch\n{LOOP}")
    assert not migration.changed
    (note,) = migration.notes
    assert note.todo == "Import horovod.torch on a line of its own."


@pytest.mark.parametrize("name", ["Adasum", "ProcessSet", "SyncBatchNorm"])
def test_names_that_horovods_face_has_not_are_refused_with_the_remedy(name: str) -> None:
    migration = migrate_source(f"from horovod.torch import {name}\nimport torch\n{LOOP}")
    assert not migration.changed
    (note,) = migration.notes
    assert note.why == f"the face has no {name}."


def test_text_that_only_looks_alike_is_left() -> None:
    source = HEAD + LOOP + 'print("loss.backward()")\nclass DDP: ...\nDDP()\n'
    assert migrate_source(source).code.endswith('print("loss.backward()")\nclass DDP: ...\nDDP()\n')


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_comments_and_formatting_outside_the_changes_stay(newline: str) -> None:
    odd = "table = { 'a':1 ,\n          'b' : 2 }   # kept\n\n\nif True :\n\tpass\n"
    source = (HEAD + odd + LOOP.replace("zero_grad()", "zero_grad()  # first")).replace(
        "\n", newline
    )
    code = migrate_source(source).code
    assert odd.replace("\n", newline) in code
    assert code.count("\n") == code.count(newline)
    before, after = source.splitlines(), code.splitlines()
    assert after[0] == f"import {FACE} as torch"
    assert after[1] == f"from {FACE} import nn"
    assert after[2:] == before[2:]


def test_a_file_with_nothing_to_migrate_comes_back_as_it_is() -> None:
    for source in ("", "x = 1\n", "import torch\r\nprint( torch.ones(1) )", LOOP, HEAD):
        migration = migrate_source(source)
        assert migration.code == source
        assert not migration.changed


def test_a_syntax_error_has_its_file_and_line() -> None:
    with pytest.raises(ConfigError, match=r"^broken\.py:2: syntax error: "):
        migrate_source("import torch\nfor x in:\n", file="broken.py")


def test_an_unknown_dialect_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no dialect 'jax'. Choose one of auto, .*torch"):
        migrate_source("", dialect="jax")


def library() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in sorted(root.rglob("*.py")) if "site-packages" not in p.parts]
    return [p for p in files if p.stat().st_size < 40_000]


@pytest.mark.timeout(300)
def test_any_valid_file_is_migrated_or_noted_and_still_parses() -> None:
    files = library()
    # How many there are depends on how the system divides the library into packages.
    taken = files[:: len(files) // 9]
    assert len(taken) > 7
    for path in taken:
        try:
            source = path.read_text()
            ast.parse(source)
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        assert migrate_source(source).code == source
        for tail in (HEAD + LOOP, DDP + LOOP):
            migration: Migration = migrate_source(f"{source}\n{tail}")
            ast.parse(migration.code)
            assert migration.changed != migration.refused, path
            if migration.changed:
                assert migrate_source(migration.code).code == migration.code
