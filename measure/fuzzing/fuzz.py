"""Read checkpoints that were edited on purpose, and count what came of it.

Every edit is sealed: checksums, sizes and lengths are made to fit it, so that it looks as if it had
been written so. Whatever is then read must be refused with an error of unipar's, or be what was
saved.

python measure/fuzzing/fuzz.py             20,000 edits for each reader; docs/backends/fuzz.json
python measure/fuzzing/fuzz.py --edits 300 --readers manifest index
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from measure.fuzzing.readers import READERS, Reader  # noqa: E402
from unipar.errors import UniparError  # noqa: E402

EDITS = 20_000
TESTED = 3_000
"""Edits for each reader in ``make test-all``, of which the others would take half."""
ROOM = 1 << 30
"""Bytes of address space that reading may take beyond what the process has."""


@dataclass
class Tally:
    """What came of the edits of one reader.

    Attributes:
        counts: how many edits were ``refused``, read as they were saved (``same``), read with
            another value of those that hold no tensor (``told``); raised something else
            (``foreign``), gave other tensors (``silent``) or opened other files (``outside``).
        worst: the first of each kind that must not be, with the edit.
        peak_mb: by how much the largest resident size grew.
    """

    counts: Counter[str] = field(default_factory=Counter)
    worst: dict[str, str] = field(default_factory=dict)
    peak_mb: float = 0.0

    def add(self, kind: str, what: str) -> None:
        self.counts[kind] += 1
        if kind in ("foreign", "silent", "outside"):
            self.worst.setdefault(kind, what)


class Watch:
    """The files that Python opens while it is on, but for Python's own and the reader's."""

    def __init__(self) -> None:
        self._inside: Path | None = None
        self._opened: list[str] = []
        sys.addaudithook(self._on)

    def _on(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and self._inside is not None and isinstance(arguments[0], (str, bytes)):
            self._opened.append(os.fsdecode(arguments[0]))

    @contextlib.contextmanager
    def within(self, inside: Path) -> Iterator[list[str]]:
        """Collect what is opened outside of ``inside``."""
        outside: list[str] = []
        self._opened, self._inside = [], inside.resolve()
        try:
            yield outside
        finally:
            own = (inside, sys.prefix, sys.base_prefix, ROOT)
            allowed = (*(os.path.realpath(one) for one in own), "/proc", "/sys")
            self._inside = None
            outside += [
                path for path in map(os.path.realpath, self._opened) if not path.startswith(allowed)
            ]


_watch: list[Watch] = []


def watch() -> Watch:
    """The process's watch: an audit hook stays for ever."""
    if not _watch:
        _watch.append(Watch())
    return _watch[0]


@contextlib.contextmanager
def bounded(room: int = ROOM) -> Iterator[None]:
    """Let nothing allocate more than ``room`` bytes in the block."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def attempt(reader: Reader, random: Random, tally: Tally) -> None:
    """Make one edit, read it, and count what came of it."""
    done = reader.edit(random)
    what = f"{reader.name}: {'; '.join(done)}"
    with watch().within(reader.place) as outside:
        try:
            kind = reader.read(random)
        except UniparError:
            # Of data that the run does not have, data loading speaks with errors of its own.
            kind = "refused"
        except Exception as error:
            told = "".join(traceback.format_exception(error)[-4:])
            kind, what = "foreign", f"{what}\n{told}"
    if outside:
        kind, what = "outside", f"{what}\nopened {', '.join(outside)}"
    tally.add(kind, what)


def check_valid(reader: Reader) -> None:
    """Hold that what has not been edited is read as it was saved."""
    for number in range(20):
        kind = reader.read(Random(number))
        assert kind == "same", f"{reader.name}: what is valid was read as {kind}"


def fuzz(reader: Reader, edits: int, seed: int = 0) -> Tally:
    """Read that many edits, each made from its own seed."""
    tally = Tally()
    check_valid(reader)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with bounded():
        for number in range(edits):
            attempt(reader, Random(f"{seed}:{number}"), tally)
    tally.peak_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return tally


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--edits", type=int, default=EDITS)
    parser.add_argument("--readers", nargs="*", default=list(READERS), choices=list(READERS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.perf_counter()
    found: dict[str, Any] = {}
    faults = 0
    for name in options.readers:
        with tempfile.TemporaryDirectory() as directory:
            start = time.process_time()
            reader = READERS[name](Path(directory))
            tally = fuzz(reader, options.edits, options.seed)
            reader.close()
        found[name] = {"what": reader.what, **tally.counts, "peak_mb": round(tally.peak_mb)}
        seconds = time.process_time() - start
        print(f"{name}: {dict(tally.counts)}, {tally.peak_mb:.0f} MB, {seconds:.0f} s", flush=True)
        for kind, what in tally.worst.items():
            faults += 1
            print(f"{kind.upper()} {what}", file=sys.stderr, flush=True)
    if faults:
        return 1
    if options.readers == list(READERS):
        from measure.report import circumstances

        elapsed = time.perf_counter() - began
        about = circumstances(f"measure/fuzzing/fuzz.py --edits {options.edits}", elapsed, ())
        record = {"about": about, "edits": options.edits, "readers": found}
        path = ROOT / "docs" / "backends" / "fuzz.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"Written: {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
