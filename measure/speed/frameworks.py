"""Compare every framework on the examples, for the docs: ``make compare``.

``result.json`` of each goes to docs/benchmarks, with ``report.html`` and a picture of it.
Trials are kept in runs/compare, so that a run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from measure.frameworks import FRAMEWORKS  # noqa: E402

DOCS = ROOT / "docs" / "benchmarks"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
EVERY = tuple(
    one for framework in FRAMEWORKS for one in (*framework.strategies, *framework.half_only)
)
BY_HAND = ("ddp", "fsdp", "zero1", "zero2", "zero3", "horovod")


class Comparison(NamedTuple):
    """One call of ``unipar bench``."""

    job: str
    strategies: tuple[str, ...]
    devices: str
    steps: int
    repeats: int
    raw: bool = False
    page: bool = True

    def command(self, name: str) -> list[str]:
        here = Path(sys.executable).parent.parent.name
        others = {
            one.environment
            for one in FRAMEWORKS
            if one.environment != here and set(one.strategies) & set(self.strategies)
        }
        return [
            *(str(Path(sys.executable).with_name("unipar")), "bench", self.job),
            *("--strategies", ",".join(self.strategies), "--devices", self.devices),
            *("--steps", str(self.steps), "--repeats", str(self.repeats)),
            *(("--raw", "measure/raw") if self.raw else ()),
            *(flag for one in sorted(others) for flag in ("--python", f"{one}/bin/python")),
            *("--output", f"runs/compare/{name}", "--fail-on", "none"),
        ]


COMPARISONS = {
    "gpt": Comparison("examples/gpt.yaml", EVERY, "1,2,4", steps=15, repeats=3),
    "digits": Comparison("examples/digits.yaml", EVERY, "1,2,4", steps=40, repeats=3),
    "by-hand": Comparison(
        "examples/gpt.yaml", BY_HAND, "2", steps=20, repeats=5, raw=True, page=False
    ),
}


def publish(name: str) -> None:
    """Put what the docs show of a comparison where they find it."""
    directory, found = DOCS / name, ROOT / "runs" / "compare" / name
    directory.mkdir(parents=True, exist_ok=True)
    for file in ("result.json", *(("report.html",) if COMPARISONS[name].page else ())):
        # Where the sources lie says nothing to a reader.
        text = (found / file).read_text(encoding="utf-8").replace(f"{ROOT}/", "")
        (directory / file).write_text(text, encoding="utf-8")
    if not COMPARISONS[name].page:
        return
    browser = next((found for one in BROWSERS if (found := shutil.which(one))), None)
    if browser is None:
        sys.exit("No browser to take the picture with: apt-get install chromium.")
    page = (directory / "report.html").resolve().as_uri()
    subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--window-size=1200,1400", "--virtual-time-budget=20000"),
            *(f"--screenshot={directory / 'report.png'}", page),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("comparisons", nargs="*", default=list(COMPARISONS), help="default: all")
    for name in parser.parse_args().comparisons:
        status = subprocess.run(COMPARISONS[name].command(name), cwd=ROOT).returncode
        if status:
            sys.exit(status)
        publish(name)


if __name__ == "__main__":
    main()
