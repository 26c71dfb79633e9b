"""The report of a migration: differences, notes and losses."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from unipar.migrate.notes import Migration, Note
from unipar.migrate.verify import Proof

_HEADINGS = {
    "refused": "Refused: the script was left alone",
    "changed": "Works otherwise than before",
}


def all_notes(migrations: Mapping[str, Migration]) -> list[Note]:
    """Every note, by file and line."""
    return sorted(
        (note for one in migrations.values() for note in one.notes),
        key=lambda note: (note.file, note.cell, note),
    )


def diff(files: Mapping[str, str], migrations: Mapping[str, Migration]) -> str:
    """The changes, as ``diff -u`` gives them."""
    pieces: list[str] = []
    for name, one in migrations.items():
        before, after = files[name].splitlines(True), one.code.splitlines(True)
        for line in difflib.unified_diff(before, after, f"a/{name}", f"b/{name}"):
            pieces.append(
                line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            )
    return "".join(pieces)


def losses(proof: Proof, *, shown: int = 10) -> str:
    """The losses side by side, and how far apart they are at most."""
    lines = [f"{'rank':>4} {'backward':>8} {'original':>16} {'migrated':>16}"]
    for rank, values in proof.original.items():
        others = proof.migrated.get(rank, ())
        for index, value in enumerate(values[:shown]):
            other = f"{others[index]:.9g}" if index < len(others) else "none"
            lines.append(f"{rank:>4} {index + 1:>8} {value:>16.9g} {other:>16}")
        if len(values) > shown:
            lines.append(f"{rank:>4} {'…':>8} {len(values)} in all")
    counts = {name: {rank: len(v) for rank, v in run.items()} for name, run in
              (("original", proof.original), ("migrated", proof.migrated))}  # fmt: skip
    if counts["original"] != counts["migrated"]:
        lines.append(f"losses by rank: original {counts['original']}, "
                     f"migrated {counts['migrated']}")  # fmt: skip
    lines += proof.about.splitlines()
    lines += _steps(proof)
    verdict = "agree" if proof.agrees else "DIFFER"
    lines.append(
        f"largest relative difference {proof.difference:.2g} "
        f"(up to {proof.tolerance:g} is rounding): the runs {verdict}"
    )
    return "\n".join(lines)


def _steps(proof: Proof) -> list[str]:
    """What the losses show of the optimizer."""
    said = f"losses after {proof.steps} step{'s' if proof.steps != 1 else ''} of an optimizer"
    if proof.moved is None:
        return [said]
    said += f", which changed norms of weights by up to {proof.moved:.2g}"
    if proof.moved > proof.tolerance:
        return [said]
    return [f"{said}: so little that losses hardly show what it does (give more --steps)"]


def markdown(
    files: Mapping[str, str], migrations: Mapping[str, Migration], proof: Proof | None
) -> str:
    """The report as a Markdown page."""
    parts = ["# unipar migrate\n"]
    for name, one in migrations.items():
        state = "migrated" if one.changed else "left alone" if one.refused else "unchanged"
        written = f", written for {one.dialect}" if one.dialect else ""
        parts.append(f"- `{name}`: {state}{written}")
    for kind, heading in _HEADINGS.items():
        own = [note for note in all_notes(migrations) if note.kind == kind]
        if own:
            parts += [
                f"\n## {heading}\n",
                "| place | construct | why | what to do |",
                "|---|---|---|---|",
            ]
            parts += [
                f"| {n.place} | `{_cell(n.construct)}` | {_cell(n.why)} | {_cell(n.todo)} |"
                for n in own
            ]
    changes = diff(files, migrations)
    if changes:
        parts += ["\n## Changes\n", "```diff", changes.rstrip("\n"), "```"]
    if proof is not None:
        parts += ["\n## Losses\n", "```text", losses(proof), "```"]
    return "\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
