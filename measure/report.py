"""The table that a benchmark run prints, and where it is written."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from statistics import median

import psutil

from unipar.benchmark import machine
from unipar.benchmark.statistics import Estimate

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        what: what is compared.
        ours: unipar's figure, with its unit.
        baseline: what it is compared with, with its unit.
        ratio: of the two.
        aim: the largest ratio that is good enough; ``None`` for a row that is there to compare.
        lowest: the smallest one, where too little would be as wrong as too much.
    """

    what: str
    ours: str
    baseline: str
    ratio: Estimate
    aim: float | None = None
    lowest: float | None = None

    @classmethod
    def timed(
        cls,
        what: str,
        ours: Sequence[float],
        baseline: Sequence[float],
        unit: Callable[[float], str],
        aim: float | None = None,
    ) -> Row:
        """A row of paired measurements, whose medians are shown."""
        ratio = Estimate.of(ours, baseline)
        return cls(what, unit(median(ours)), unit(median(baseline)), ratio, aim)

    @property
    def verdict(self) -> str:
        """Whether the aim is met, and whether the spread leaves that in doubt."""
        if self.aim is None:
            return "to compare"
        low, high = self.ratio.low, self.ratio.high
        met = self.ratio.median <= self.aim and (self.lowest or 0) <= self.ratio.median
        word = "met" if met else "**missed**"
        return f"{word}, within the spread" if low <= self.aim < high else word

    @property
    def wanted(self) -> str:
        if self.aim is None:
            return ""
        if self.lowest is not None:
            return f"{self.lowest:g} to {self.aim:g}"
        return f"at most {self.aim:g}"


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def whole_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s"


def mebibytes(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"


def table(rows: Iterable[Row]) -> str:
    """The rows in Markdown."""
    lines = [
        "| what | unipar | beside | ratio (95 % interval) | pairs | aim | |",
        "|---|---:|---:|---:|---:|---|---|",
    ]
    for row in rows:
        ratio = row.ratio
        spread = f" ({ratio.low:.3f} to {ratio.high:.3f})" if ratio.pairs > 1 else ""
        lines.append(
            f"| {row.what} | {row.ours} | {row.baseline} | {ratio.median:.3f}{spread} "
            f"| {ratio.pairs} | {row.wanted} | {row.verdict} |"
        )
    return "\n".join(lines)


def circumstances(command: str, seconds: float, others: Iterable[str]) -> str:
    """The machine, date and command of a run, and the versions of torch and other packages."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", *others))
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{datetime.now(timezone.utc):%Y-%m-%d}, `{command}`, {seconds / 60:.0f} minutes. "
        f"{machine.processor()}, {machine.cores()} cores, {memory:.0f} GiB, {platform.system()}; "
        f"Python {platform.python_version()}, unipar {version('unipar')}, {packages}. "
        "One thread a process."
    )


def write_markdown(path: Path, text: str) -> None:
    """Put ``text`` between the markers of a page.

    Raises:
        ValueError: the page has no markers.
    """
    page = path.read_text(encoding="utf-8")
    if BEGIN not in page or END not in page:
        raise ValueError(f"{path} has no place for the figures: add {BEGIN} and {END}.")
    before, rest = page.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def write_json(path: Path, rows: Iterable[Row], about: str) -> None:
    """The same rows for programs."""
    entries = [
        {**asdict(row), "ratio": row.ratio.model_dump(), "verdict": row.verdict} for row in rows
    ]
    path.write_text(json.dumps({"about": about, "rows": entries}, indent=1), encoding="utf-8")
