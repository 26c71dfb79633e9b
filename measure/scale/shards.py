"""Measure what is done with a checkpoint of many shards: list it, verify it, load a part of it.

python measure/scale/shards.py               1,000 ranks of a 10 GB model, below TMPDIR
python measure/scale/shards.py --ranks 64 --layers 1

The files are written by the code that ranks write with, rank after rank, and removed afterwards.
Before each measurement they are put out of the page cache, unless it says that they are in it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

from measure.scale.simulate import decoder  # noqa: E402
from unipar.checkpoint import read_manifest, rng  # noqa: E402
from unipar.checkpoint.commit import EnginePlan, Plan, begin, finish, stream, write  # noqa: E402
from unipar.checkpoint.decode import open_checkpoint  # noqa: E402
from unipar.checkpoint.manifest import Manifest  # noqa: E402
from unipar.checkpoint.plan import Described, describe, plan_part  # noqa: E402
from unipar.checkpoint.read import ChunkReader  # noqa: E402
from unipar.state import Box, LocalState  # noqa: E402

WIDTH, HIDDEN = 2048, 5504
PARTS = {"weights": ("",), "optimizer": (".exp_avg", ".exp_avg_sq")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--directory", type=Path, help="where to write; left out: below TMPDIR")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        path = make(Path(directory), args.ranks, args.layers)
        manifest = read_manifest(path)
        print(
            f"{args.ranks} ranks, {len(manifest.files)} files, {manifest.nbytes / 1e9:.1f} GB, "
            f"manifest of {(path / 'manifest.json').stat().st_size / 1e6:.2f} MB"
        )
        command(path, "unipar checkpoints ls", "ls", path.parent)
        command(path, "unipar checkpoints verify --quick", "verify", "--quick", path)
        command(path, "unipar checkpoints verify", "verify", path)
        with timed("unipar checkpoints verify, from the page cache"):
            run("verify", path)
        for ranks in (args.ranks, 8):
            forget(path)
            with timed(f"load what one rank of {ranks} holds"):
                load(path, ranks, args.layers)


def make(directory: Path, ranks: int, layers: int) -> Path:
    """Write a checkpoint as that many ranks would."""
    random = torch.randn(WIDTH * 32000)
    header = Manifest(
        path=directory, step=1, strategy="fsdp", world_size=ranks, engines={}, files={},
        progress={}, metrics={"loss": 2.5}, unipar_version="", torch_version="",
    )  # fmt: skip
    plans = {name: planned(name, ranks, layers) for name in PARTS}
    engines = {"model": EnginePlan(plans["weights"], plans["optimizer"], (), {}, {})}

    def plan(rank: int) -> Plan:
        return Plan(directory, header, engines, rank, rng.capture())

    with timed("(write all, one rank after the other)"):
        begin(plan(0), lambda value: [value])
        outcomes = []
        for rank in range(ranks):
            boxes = (
                stream(part, states(name, rank, ranks, layers, random), rank, [])
                for name, part in plans.items()
            )
            outcomes.append(write(plan(rank), boxes, []))
        return finish(plan(0), lambda value: [value] if value is None else outcomes, outcomes[0])


def planned(name: str, ranks: int, layers: int) -> Any:
    class Others:
        """A world whose other ranks have described their shards."""

        def gather(self, value: Any) -> list[Any]:
            if isinstance(value, Described):
                return [describe(states(name, rank, ranks, layers)) for rank in range(ranks)]
            return [value] * ranks

    others: Any = Others()
    return plan_part(f"model/{name}", states(name, 0, ranks, layers), others)


def states(
    part: str, rank: int, ranks: int, layers: int, random: torch.Tensor | None = None
) -> list[LocalState]:
    """The shards of a rank: of each tensor a part of the rows, as FSDP2 divides it."""
    found = []
    for name, shape in decoder(layers, WIDTH, HIDDEN):
        rows = -(-shape[0] // ranks)
        start = min(rank * rows, shape[0])
        count = min(rows, shape[0] - start)
        sizes = (count, *shape[1:])
        boxes = (Box((start, *(0 for _ in shape[1:])), sizes),) if count else ()
        tensors = () if random is None else tuple(random[: box_size(b)].view(sizes) for b in boxes)
        for key in PARTS[part]:
            found.append(LocalState(name + key, shape, torch.float32, boxes, tensors))
    return found


def box_size(box: Box) -> int:
    return torch.Size(box.sizes).numel()


def load(path: Path, ranks: int, layers: int) -> None:
    """What the first of that many ranks fills from files, weights and moments."""
    manifest = open_checkpoint(path)
    with ChunkReader(manifest) as reader:
        for part in PARTS:
            stored = getattr(manifest.engines["model"], part)
            for state in states(part, 0, ranks, layers):
                for box in state.boxes:
                    reader.fill(state.name, stored[state.name], box, torch.empty(box.sizes))


def command(path: Path, what: str, *arguments: Any) -> None:
    forget(path)
    with timed(what):
        run(*arguments)


def run(*arguments: Any) -> None:
    told = [sys.executable, "-m", "unipar", "checkpoints", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    subprocess.run(told, check=True, stdout=subprocess.DEVNULL, env=environment)


def forget(path: Path) -> None:
    """Put the files of a checkpoint out of the page cache."""
    for file in path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


@contextmanager
def timed(what: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    print(f"{what}: {time.perf_counter() - began:.2f} s", flush=True)


if __name__ == "__main__":
    main()
