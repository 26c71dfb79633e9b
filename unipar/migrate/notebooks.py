"""Jupyter notebooks: their code as one script, and the edited script put back into the cells.

Everything else in the file, its formatting included, stays as it is: only the strings of lines
that change are written again. In place of magics the script has ``pass``, or ``name = []`` where
their output is given a name; they are put back.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from unipar.errors import ConfigError
from unipar.migrate.json_spans import Span, elements, members

SUFFIX = ".ipynb"
_CELL = "# unipar-cell: "
_MAGIC = re.compile(
    r"(?:pass|[\w.][\w.\[\], ]*= (?:None|\[\]))  # unipar-magic: (\d+)$", re.MULTILINE
)
_LOOKS_MAGIC = re.compile(r"\s*(?:[%!?]|[\w.\[\], ]+=\s*[%!])|.*\?\s*$")
_ASSIGNED = re.compile(r"([\w.][\w.\[\], ]*=)\s*([%!])")
# Magics of a cell whose lines are Python that the kernel runs.
_PYTHON = ("capture", "memray_flamegraph", "prun", "time", "timeit")


class _Cell(NamedTuple):
    """A cell with code.

    Attributes:
        number: among all cells of the notebook, from 1.
        span: of its source in the file.
        source: its source, as JSON holds it: a string or a list of them.
        first: the line of the script that its first line is in, from 1.
        lines: how many lines of the script each of its own takes the place of, and where from.
    """

    number: int
    span: Span
    source: str | list[str]
    first: int
    places: list[int]


class Notebook:
    """A notebook's code as a script.

    Args:
        name: of the file, for messages.
        text: its content.

    Attributes:
        script: the code of its cells, one below the other, without magics.

    Raises:
        ConfigError: it is no notebook of Python code, or a cell has a syntax error.
    """

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text
        self._magics: list[str] = []
        self._cells: list[_Cell] = []
        lines: list[str] = []
        for number, span, source in self._code_cells():
            lines.append(f"{_CELL}{number}")
            code, places = self._masked(number, "".join(source))
            self._cells.append(_Cell(number, span, source, len(lines) + 1, places))
            lines += code.split("\n")
        self.script = "".join(f"{line}\n" for line in lines)

    def place(self, line: int) -> tuple[int, int]:
        """The cell, and the line in it, that a line of the script comes from; both from 1."""
        cell = next(one for one in reversed(self._cells) if one.first - 1 <= line)
        inside = max(line - cell.first, 0)
        return cell.number, cell.places[min(inside, len(cell.places) - 1)]

    def with_script(self, script: str) -> str:
        """The notebook with the cells of an edited script."""
        parts = re.split(rf"^{_CELL}(\d+)\n", script, flags=re.MULTILINE)
        codes = dict(zip(map(int, parts[1::2]), parts[2::2], strict=True))
        text, head = self._text, parts[0]
        for cell in reversed(self._cells):
            code = _MAGIC.sub(lambda found: self._magics[int(found[1])], codes[cell.number])
            code = code.removesuffix("\n")
            if cell is self._cells[0]:
                code = head + code
            if code != "".join(cell.source):
                start, stop = cell.span
                literal = _literal(text[start:stop], cell.source, code)
                text = text[:start] + literal + text[stop:]
        return text

    # -- reading ---------------------------------------------------------------------------------

    def _code_cells(self) -> Iterator[tuple[int, Span, str | list[str]]]:
        try:
            document = json.loads(self._text)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{self._name}:{error.lineno}: this is no JSON: {error.msg}. "
                "Open it in Jupyter and save it again."
            ) from error
        if not isinstance(document, dict) or not isinstance(document.get("cells"), list):
            raise ConfigError(
                f"{self._name} has no cells. Notebooks of nbformat 4 are read: open it in Jupyter "
                "and save it again."
            )
        language = _language(document)
        if language != "python":
            raise ConfigError(f"{self._name} is a notebook in {language}, not in Python.")
        cells = members(self._text, 0)["cells"]
        for number, (start, _) in enumerate(elements(self._text, cells[0]), 1):
            cell = document["cells"][number - 1]
            source = cell.get("source") if isinstance(cell, dict) else None
            if source is not None and cell.get("cell_type") == "code":
                if "\r" in "".join(source):
                    raise ConfigError(
                        f"{self._name}, cell {number}: carriage returns end its lines. Open it "
                        "in Jupyter and save it again."
                    )
                yield number, members(self._text, start)["source"], source

    def _masked(self, number: int, code: str) -> tuple[str, list[int]]:
        """A cell without its magics, and the cell's own line for each of its lines."""
        lines = code.split("\n")
        places = list(range(1, len(lines) + 1))
        first = next((i for i, line in enumerate(lines) if line.strip()), 0)
        magic = re.match(r"%%(\w+)", lines[first])
        if magic is not None:
            if magic[1] not in _PYTHON:
                return self._keep("\n".join(lines)), [1]
            lines[first] = self._keep(lines[first])
        while True:
            try:
                ast.parse("\n".join(lines))
            except SyntaxError as error:
                at = min(error.lineno or 1, len(lines)) - 1
                if _MAGIC.search(lines[at]) or not _LOOKS_MAGIC.match(lines[at]):
                    raise ConfigError(
                        f"{self._name}, cell {number}, line {places[at]}: syntax error: "
                        f"{error.msg}. Mend it, and migrate again."
                    ) from error
                end = at
                while lines[end].endswith("\\") and end + 1 < len(lines):
                    end += 1
                whole = "\n".join(lines[at : end + 1])
                indent = whole[: len(whole) - len(whole.lstrip())]
                lines[at : end + 1] = [indent + self._keep(whole.removeprefix(indent))]
                del places[at + 1 : end + 1]
            except ValueError as error:  # A null byte.
                raise ConfigError(f"{self._name}, cell {number}: {error}.") from error
            else:
                return "\n".join(lines), places

    def _keep(self, magic: str) -> str:
        self._magics.append(magic)
        assigned = _ASSIGNED.match(magic)
        instead = "pass"
        if assigned is not None:
            instead = f"{assigned[1]} {'[]' if assigned[2] == '!' else 'None'}"
        return f"{instead}  # unipar-magic: {len(self._magics) - 1}"


def _language(document: dict[str, Any]) -> str:
    metadata = document.get("metadata")
    found = metadata if isinstance(metadata, dict) else {}
    for key, name in (("kernelspec", "language"), ("language_info", "name")):
        part = found.get(key)
        if isinstance(part, dict) and isinstance(part.get(name), str):
            return part[name].lower()
    return "python"


def _literal(old: str, source: str | list[str], code: str) -> str:
    """The JSON of a cell's new source, in the style of the old one."""
    plain = not old.isascii() or "\\u" not in old
    if isinstance(source, str):
        return json.dumps(code, ensure_ascii=not plain)
    spans = list(elements(old, 0))
    written = {line: old[start:stop] for line, (start, stop) in zip(source, spans, strict=True)}
    lines = [
        written.get(line) or json.dumps(line, ensure_ascii=not plain)
        for line in code.splitlines(keepends=True)
    ]
    if not spans:
        return f"[{', '.join(lines)}]"
    before, after = old[: spans[0][0]], old[spans[-1][1] :]
    between = old[spans[0][1] : spans[1][0]] if len(spans) > 1 else f",{before[1:] or ' '}"
    return before + between.join(lines) + after
