"""Notebooks: only the lines of code that change are written again, and notes name their cells."""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unipar.cli import main
from unipar.errors import ConfigError
from unipar.migrate import Migration, migrate_source
from unipar.migrate.notebooks import Notebook

CELLS = [
    "%load_ext autoreload\nimport torch\nimport os",
    "%%bash\nfor x in 1 2; do echo $x; done",
    "model = torch.nn.Linear(2, 1)\nopt = torch.optim.SGD(model.parameters(), lr=0.1)",
    '%%time\nfor step in range(12):\n    opt.zero_grad()\n    !echo "ß" \\\n      more\n'
    "    loss = model(torch.randn(4, 2)).square().mean()\n    loss.backward()\n    opt.step()",
    "text = '''\n%kept\n!kept\n'''\nnames = !ls\nopt.step?",
    "",
]


def notebook(cells: list[str], *, as_list: bool = True, **more: Any) -> dict[str, Any]:
    """The document, with a page of text in front and an output that is out of date."""
    code = [
        {
            "cell_type": "code", "execution_count": 3, "id": f"a{number}", "metadata": {"x": [1]},
            "outputs": [{"name": "stdout", "output_type": "stream", "text": ["loss.backward()\n"]}],
            "source": cell.splitlines(keepends=True) if as_list else cell,
        }
        for number, cell in enumerate(cells)
    ]  # fmt: skip
    page = {"cell_type": "markdown", "id": "p", "metadata": {}, "source": ["# loss.backward() ü"]}
    return {
        "cells": [page, *code], "metadata": {"kernelspec": {"language": "python"}}, "nbformat": 4,
        "nbformat_minor": 5, **more,
    }  # fmt: skip


STYLES = [
    {"indent": 1, "ensure_ascii": False},
    {"indent": 4, "ensure_ascii": True},
    {"indent": None, "separators": (",", ":")},
    {"indent": "\t", "sort_keys": True},
]


def migrate(text: str) -> Migration:
    return migrate_source(text, file="train.ipynb")


def sources(text: str) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(text)["cells"]]


@pytest.mark.parametrize("as_list", [True, False])
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
@pytest.mark.parametrize("style", STYLES, ids=str)
def test_only_the_code_that_changes_is_written_anew(style: Any, end: str, as_list: bool) -> None:
    text = json.dumps(notebook(CELLS, as_list=as_list), **style).replace("\n", end or "\n") + end
    migration = migrate(text)
    assert migration.changed
    assert migration.config == {}
    before, after = json.loads(text), json.loads(migration.code)
    for one in (*before["cells"], *after["cells"]):
        one.pop("source")
    assert after == before
    assert json.dumps(json.loads(migration.code), **style).replace("\n", end or "\n") + end == (
        migration.code
    )
    _, first, *rest = sources(migration.code)
    assert first == "%load_ext autoreload\nimport unipar.compat.torch as torch\nimport os"
    assert rest == CELLS[1:]
    assert migrate(migration.code).code == migration.code
    assert not migrate(migration.code).changed


def test_lines_that_stay_keep_the_way_they_are_written() -> None:
    text = json.dumps(notebook(CELLS), indent=1).replace("opt.zero_grad()", "opt.zero_gr\\u0061d()")
    odd = text.replace('"import os"', '"import\\u0020os"').replace('"# loss', '"\\u0023 loss')
    code = migrate(odd).code
    assert '"import\\u0020os"' in code
    assert '"\\u0023 loss' in code
    assert '"import unipar.compat.torch as torch\\n"' in code


@pytest.mark.parametrize("cells", [[], [""], ["import torch\n"], CELLS[:2], ["x = 1 ;"]])
@pytest.mark.parametrize("style", STYLES, ids=str)
def test_a_notebook_with_nothing_to_migrate_comes_back_byte_for_byte(
    cells: list[str], style: Any
) -> None:
    text = json.dumps(notebook(cells), **style)
    migration = migrate(text)
    assert migration.code == text
    assert not migration.changed


LINES = st.sampled_from(
    ["x = 1", "%magic a b", "!ls | wc", "  ", "# ☃ unipar", "if x:\n    !pwd", "y = !ls",
     "z = '''\n%a\n'''", "", "x?", "f(x\n%d\n)", "%%time"]
)  # fmt: skip


@given(st.lists(st.lists(LINES, max_size=5).map("\n".join), max_size=4))
def test_cells_that_are_read_come_back_as_they_were(cells: list[str]) -> None:
    text = json.dumps(notebook(cells), indent=1)
    read = None
    with contextlib.suppress(ConfigError):  # Lines that begin with %% are a magic at the top only.
        read = Notebook("some.ipynb", text)
    assert read is None or read.with_script(read.script) == text


def test_notes_name_the_cell_and_the_line_in_it() -> None:
    cells = [CELLS[0], CELLS[2], f"{CELLS[3]}\nfrom horovod.torch import Adasum"]
    migration = migrate(json.dumps(notebook(cells)))
    assert migration.refused
    (note,) = [one for one in migration.notes if one.kind == "refused"]
    # The magic of two lines before it counts as two.
    assert str(note).startswith("train.ipynb, cell 4, line 9: refused: Adasum: the face ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import torch", r"^train\.ipynb:1: this is no JSON: .* save it again"),
        ("[]", r"^train\.ipynb has no cells\. Notebooks of nbformat 4 are read"),
        (json.dumps({"worksheets": []}), "Notebooks of nbformat 4 are read"),
        (json.dumps(notebook([], metadata={"kernelspec": {"language": "R"}})),
         "is a notebook in r, not in Python"),
        (json.dumps(notebook(["x = 1", "!ls\n\nfor x in:\n    pass"])),
         r"^train\.ipynb, cell 3, line 3: syntax error: .*Mend it, and migrate again"),
        (json.dumps(notebook(["ls -l *.py"])), r"cell 2, line 1: syntax error"),
        (json.dumps(notebook(["x = 1\r\ny = 2"])), r"cell 2: carriage returns end its lines"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_told_with_its_place(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        migrate(text)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps(notebook(CELLS), indent=1) + "\n")
    return path


def test_the_command_writes_a_notebook_beside_it(file: Path) -> None:
    before = file.read_bytes()
    assert main(["migrate", str(file)]) == 0
    assert file.read_bytes() == before
    written = file.with_name("train_unipar.ipynb").read_text()
    assert "import unipar.compat.torch as torch" in sources(written)[1]
    assert file.with_name("unipar.yaml").exists()


def test_diff_and_check_write_nothing(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", str(file), "--check"]) == 1
    assert main(["migrate", str(file), "--diff"]) == 0
    assert '\n-    "import torch\\n",\n' in capsys.readouterr().out
    assert [path.name for path in file.parent.iterdir()] == ["train.ipynb"]


def test_in_place_keeps_the_original(file: Path) -> None:
    before = file.read_bytes()
    git = ["git", "-C", str(file.parent), "-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True, timeout=60)
    assert main(["migrate", str(file), "--in-place"]) == 0
    assert file.with_name("train.ipynb.orig").read_bytes() == before
    assert main(["migrate", str(file), "--check"]) == 0


def test_a_directory_with_a_notebook_is_migrated_together(tmp_path: Path) -> None:
    root = tmp_path / "program"
    (root / ".ipynb_checkpoints").mkdir(parents=True)
    (root / ".ipynb_checkpoints" / "run.ipynb").write_text("no notebook")
    (root / "parts.py").write_text(f"import torch\n{CELLS[2]}\n")
    head = "import torch\nfrom parts import model, opt"
    (root / "run.ipynb").write_text(json.dumps(notebook([head, CELLS[3]])))
    assert main(["migrate", str(root)]) == 0
    written = tmp_path / "program_unipar"
    assert "import unipar.compat.torch as torch" in (written / "parts.py").read_text()
    assert "import unipar.compat.torch as torch" in sources((written / "run.ipynb").read_text())[1]
    assert not (written / ".ipynb_checkpoints").exists()
