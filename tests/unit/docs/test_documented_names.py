"""What pages show in code font exists: names, files, commands and options."""

from __future__ import annotations

import importlib
import re
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from unipar.config import RunConfig
from unipar.strategy import registry

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from measure.pages.commands import options_by_command  # noqa: E402

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("backends/*/README.md")),
]
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
NAME = re.compile(r"^unipar(?:\.[A-Za-z_]\w*)+(?:\(.*)?$")
FILES = re.compile(r"^(?:unipar|measure|backends|examples|tests|docs)/[\w./-]*$")
CHOICE = re.compile(r"^([a-z]\w*):([a-z_]+=\S+)$")


def spans(page: Path) -> list[str]:
    return SPAN.findall(FENCED.sub("", page.read_text(encoding="utf-8")))


@cache
def commands() -> dict[str, set[str]]:
    return {
        command: {name for row in rows for name in re.findall(r"--?[\w-]+", row[0])} | {"--help"}
        for command, _, rows in options_by_command()
    }


def exists(name: str) -> bool:
    """Whether the longest part of a dotted name that is a module has the rest as attributes."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def wrong(span: str) -> str | None:
    """What is wrong with a piece of text in code font; ``None`` if nothing is known of its kind."""
    if NAME.match(span) and not re.search(r"\.(py|yaml|ipynb|md|json)$", span):
        return None if exists(span.partition("(")[0]) else "no such name"
    if FILES.match(span):
        found = (ROOT / span).exists() or (ROOT / "unipar" / span).exists()
        return None if found else "no such file"
    if span.startswith("unipar ") or span == "unipar":
        return _wrong_command(span)
    if (choice := CHOICE.match(span)) and choice[1] in registry.names():
        return _wrong_options(choice[1], choice[2])
    return None


def _wrong_command(span: str) -> str | None:
    words = span.split()
    known = [command for command in commands() if f"{span} ".startswith(f"{command} ")]
    if not known:
        return None if words[1:2] in ([], ["--version"], ["COMMAND"]) else "no such command"
    options = commands()[max(known, key=len)]
    missing = [word for word in words if word.startswith("-") and word.split("=")[0] not in options]
    return f"no option {', '.join(missing)}" if missing else None


def _wrong_options(strategy: str, given: str) -> str | None:
    fields = registry.strategy_class(strategy).options_type.model_fields
    known = {field.serialization_alias or name for name, field in fields.items()} | set(fields)
    names = [one.partition("=")[0] for one in given.split(",")]
    missing = [name for name in names if name not in known]
    return f"no option {', '.join(missing)}" if missing else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_in_code_font_exist(page: Path) -> None:
    found = {span: problem for span in spans(page) if (problem := wrong(span))}
    assert not found


@pytest.mark.parametrize(
    "span",
    ["unipar.fitt", "unipar.engine.Nothing", "unipar/nothing.py", "unipar trane",
     "unipar train --nope", "ddp:no_such_option=1"],
)  # fmt: skip
def test_what_does_not_exist_is_found(span: str) -> None:
    assert wrong(span)


def test_names_of_a_face_are_found() -> None:
    assert exists("unipar.compat.torch.whole_state_dict")
    assert exists("unipar.compat.horovod.torch.DistributedOptimizer")


def test_torch_is_its_own_after_that() -> None:
    seen = (
        torch.optim.Optimizer.__init__,
        torch.nn.Module.__call__,
        torch.Tensor.backward,
        torch.autograd.backward,
    )
    assert [one for one in seen if not one.__module__.startswith("torch.")] == []


def test_every_field_of_a_run_is_documented() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in RunConfig.model_fields)
