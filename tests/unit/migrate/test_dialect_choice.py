"""A program is migrated from what trains it, and questions whether that is installed are noted."""

from __future__ import annotations

import pytest
from telling import told

from unipar.migrate import migrate_source

PLAIN = """\
import torch
model = torch.nn.Linear(1, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1)).sum().backward()
opt.step()
"""
DDP = PLAIN.replace(
    "opt =", "model = torch.nn.parallel.DistributedDataParallel(model)\nopt ="
)  # fmt: skip
OPTIONAL = "try:\n    import deepspeed\nexcept ImportError:\n    deepspeed = None\n"
DEEPSPEED = "engine, *_ = deepspeed.initialize(model=model)\n"


@pytest.mark.parametrize(
    ("source", "dialect"),
    [
        (OPTIONAL + DDP, "ddp"),
        (OPTIONAL + PLAIN, "torch"),
        ("from deepspeed.ops.adam import FusedAdam\n" + PLAIN, "torch"),
        ("from lightning.fabric.utilities import rank_zero_only\n" + DDP, "ddp"),
        ("from accelerate.utils import set_seed\n" + PLAIN, "torch"),
        (OPTIONAL + DDP + DEEPSPEED, "deepspeed"),
        ("import horovod.torch as hvd\n" + PLAIN, "horovod"),
        ("import deepspeed\ndef train(engine, loss):\n    engine.backward(loss)\n", "deepspeed"),
    ],
)
def test_what_trains_decides(source: str, dialect: str) -> None:
    assert migrate_source(source, file="train.py").dialect == dialect


def test_what_belongs_to_another_framework_is_told_of() -> None:
    said = told(migrate_source(OPTIONAL + DDP, file="train.py"), "changed")
    assert "train.py:2: changed: import deepspeed: it is DeepSpeed's and stays so" in said
    assert "give --from deepspeed" in said
    said = told(migrate_source(OPTIONAL + DDP + DEEPSPEED, file="train.py"), "changed")
    assert "DistributedDataParallel(model): it is DistributedDataParallel's and stays so" in said


def test_an_import_that_no_longer_fails_is_told_of() -> None:
    said = told(migrate_source(OPTIONAL + PLAIN + DEEPSPEED, file="train.py"), "changed")
    assert "train.py:2: changed: import deepspeed: the face is there whether or not" in said
    handled = OPTIONAL.replace("import deepspeed\nexcept ImportError", "pass\nexcept OSError")
    source = f"{handled}import deepspeed\n{PLAIN}{DEEPSPEED}"
    assert not told(migrate_source(source, file="train.py"), "changed")


@pytest.mark.parametrize(
    "question",
    ["importlib.util.find_spec('deepspeed')", "importlib.import_module('deepspeed.comm')",
     "__import__('deepspeed')", "is_deepspeed_available()"],
)  # fmt: skip
def test_questions_for_the_framework_itself_are_told_of(question: str) -> None:
    imports = "import importlib.util\nfrom transformers.utils import is_deepspeed_available\n"
    source = f"{imports}import deepspeed\n{PLAIN}{DEEPSPEED}found = {question}\n"
    said = told(migrate_source(source, file="train.py"), "changed")
    assert f": changed: {question}: it asks for deepspeed itself" in said


@pytest.mark.parametrize(
    "inner", ["def late():\n    import torch\n", "if TYPE_CHECKING:\n    import torch\n"]
)
def test_an_import_binds_the_name_where_it_stands(inner: str) -> None:
    source = f"import torch.utils.data\n{inner}{PLAIN.partition(chr(10))[2]}"
    code = migrate_source(source, file="train.py").code
    assert code.startswith("import unipar.compat.torch as torch\n")
    both = migrate_source(f"import torch\n{source}", file="train.py").code
    assert "torch.utils.data" not in both
    assert both.count("import unipar.compat.torch as torch") == 2
