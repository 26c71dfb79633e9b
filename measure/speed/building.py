"""Measure the host memory that making a model takes on each rank, by where its weights come from.

python measure/speed/building.py            the table goes to docs/how-to/large-models.md
python measure/speed/building.py --quick    a small model alone, and nothing is written

A GPT on four processes of this machine, without optimizer or data. The peak of a process is what
Linux counts as resident (VmHWM), above what it had when the model began.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_model

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import unipar  # noqa: E402
from examples.gpt import GPT  # noqa: E402
from measure.report import circumstances, mebibytes, write_markdown  # noqa: E402
from unipar import launch  # noqa: E402

RANKS, HEADS, LENGTH = 4, 16, 32
SMALL, LARGE = (12, 1024), (25, 2560)
"""Layers and width."""


class Made(NamedTuple):
    """What making a model took.

    Attributes:
        parameters: of the whole model.
        peaks: bytes of each rank.
        seconds: of the slowest.
    """

    parameters: int
    peaks: list[int]
    seconds: float


def _resident(what: str) -> int:
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def make(placement: unipar.Placement, strategy: str, weights: str, size: tuple[int, int]) -> Made:
    """Make a model, in one process of several."""
    layers, width = size
    build = functools.partial(GPT, layers=layers, width=width, heads=HEADS, length=LENGTH)
    for module in ("unipar_torch.sharding", "unipar_torch.pipeline", "torch._dynamo"):
        # They take 70 MiB, once for a process, and would be counted with the model.
        importlib.import_module(module)
    with unipar.Session(strategy=strategy, placement=placement) as session:
        session.world.gather(None)
        # The peak is counted from here on (proc(5), clear_refs).
        Path("/proc/self/clear_refs").write_text("5")
        before, began = _resident("VmRSS"), time.perf_counter()
        engine = session.prepare(build, initial_weights=weights)
        seconds = time.perf_counter() - began
        told = session.world.gather((_resident("VmHWM") - before, seconds))
        return Made(engine.num_parameters, [peak for peak, _ in told], max(s for _, s in told))


def rows(size: tuple[int, int], stored: str | None) -> list[tuple[str, str, Made]]:
    """Make models of one size in every way; of a large one, without what needs all of it."""
    ways = [("fsdp", "by_name"), ("mesh:tp=2", "by_name"), ("mesh:pp=4", "by_name")]
    if stored is not None:
        ways = [("fsdp", "model"), *ways, ("fsdp", stored)]
    found = []
    for strategy, weights in ways:
        work = functools.partial(make, strategy=strategy, weights=weights, size=size)
        made = launch.run(work, devices=RANKS, timeout=1800)
        found.append((strategy, "a path" if weights == stored else weights, made))
        print(f"{found[-1]}", flush=True)
    return found


def store(directory: str, size: tuple[int, int]) -> str:
    """Write a model's weights as safetensors."""
    layers, width = size
    model = GPT(layers=layers, width=width, heads=HEADS, length=LENGTH)
    save_model(model, str(Path(directory, "model.safetensors")))
    return directory


def table(found: list[tuple[str, str, Made]]) -> str:
    """A row for each way."""
    lines = [
        "| strategy | `initial_weights` | parameters | fp32 weights divided by 4 | most on a rank "
        "| on rank 0 | seconds |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for strategy, weights, made in found:
        named = f"`{weights}`" if weights != "a path" else weights
        share = mebibytes(4 * made.parameters / RANKS)
        peaks = f"{mebibytes(max(made.peaks))} | {mebibytes(made.peaks[0])}"
        took = f"{made.parameters / 1e9:.2f} billion", share, peaks, f"{made.seconds:.0f}"
        lines.append(f"| `{strategy}` | {named} | {' | '.join(took)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small model alone; writes nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="unipar-building-") as directory:
        size = (4, 512) if args.quick else SMALL
        found = rows(size, store(directory, size))
    if not args.quick:
        found += rows(LARGE, None)
    about = circumstances("python measure/speed/building.py", time.perf_counter() - began, ())
    text = f"{about} {RANKS} ranks on this machine.\n\n{table(found)}"
    print(text)
    if not args.quick:
        write_markdown(ROOT / "docs" / "how-to" / "large-models.md", text)


if __name__ == "__main__":
    main()
