"""What ``make test-gpu`` and ``make bench-gpu`` have found, where there was a GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2] / "docs" / "gpu"
NOTHING = "Nothing has run on a GPU yet."


def load(name: str) -> dict[str, Any] | None:
    """A record; ``None`` where there is none yet."""
    path = HERE / name
    return json.loads(path.read_text()) if path.exists() else None


def about(record: dict[str, Any]) -> str:
    """GPU, driver and torch; when and by which command."""
    driver = record["driver"] or "unknown"
    return f"{record['gpu']}, driver {driver}, torch {record['torch']}. {record['about']}"


def tests(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A row for each suite."""
    rows = [
        [name, *(str(found[end]) for end in ("passed", "skipped")), str(len(found["failed"]))]
        for name, found in record["suites"].items()
    ]
    return ["suite", "passed", "skipped", "failed"], rows


def bench(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A row for each contender."""
    rows = []
    for group, found in record["groups"].items():
        for row in found:
            ratio, share, peak = row["ratio"], row["share_of_peak"], row.get("peak_bytes")
            spread = f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
            rows.append(
                [
                    *(group, row["what"], f"{row['tokens_per_second']:,.0f}"),
                    *(f"{row['step_seconds'] * 1e3:.1f} ms", spread),
                    "unknown" if share is None else f"{share:.1%}",
                    "unknown" if peak is None else f"{peak / 2**30:.2f} GiB",
                ]
            )
    heads = ["compared", "what", "tokens/s", "step", "step over by hand's (95 %)"]
    return [*heads, "of the card's peak", "memory at most"], rows


def failures(record: dict[str, Any]) -> str:
    """What failed, by name."""
    failed = [test for found in record["suites"].values() for test in found["failed"]]
    # The kit's by strategy, ranks and case.
    failed = [re.sub(r".*::test_conformance\[(.*)\]", r"\1", test) for test in failed]
    return f"Failed: {', '.join(f'`{test}`' for test in failed)}." if failed else ""


def shape(record: dict[str, Any]) -> str:
    """What was trained, and how a share of the peak is counted."""
    shape = record["shape"]
    peak = record["peak_source"]
    left_out = "".join(f" Left out: {name}, {why}." for name, why in record["left_out"].items())
    return (
        f"A GPT of {record['parameters']:,} parameters ({shape['layers']} layers of "
        f"{shape['width']}), {shape['batch']} samples of {shape['length']} bytes a step, AdamW, "
        f"`torch.compile` ({shape['backend']}); {shape['turns']} turns of {shape['steps']} steps. "
        "Operations are counted as in PaLM's appendix B; the card's peak is the maker's for dense "
        f"products ({peak or 'not known for this card'}).{left_out}"
    )
