"""Measure training of a GPT on one GPU, under strategies and by loops written by hand.

python measure/gpu/bench.py                 to docs/gpu/bench.json
python measure/gpu/bench.py --output FILE   to another file

In bf16 with torch.compile: what unipar does at world size 1 beside the same by hand, in turns,
block by block; and fp8 beside bf16. Exit code 1 if there is no GPU, or the time was too short.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Last, so that what is installed is measured.
sys.path.append(str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

# First, for the example would import it from its own directory.
import unipar  # noqa: E402, F401
from examples.gpt import GPT, loss  # noqa: E402
from measure.gpu import cards, loops  # noqa: E402
from measure.pages import gpu  # noqa: E402
from measure.speed.timing import in_turns  # noqa: E402
from unipar.benchmark.statistics import Estimate  # noqa: E402
from unipar.data.batch import Batch, MicroBatch  # noqa: E402
from unipar.engine.checks import check_capabilities  # noqa: E402
from unipar.errors import ConfigError  # noqa: E402
from unipar.strategy import EngineSpec, Precision, registry  # noqa: E402
from unipar.world import Placement  # noqa: E402

OUTPUT = ROOT / "docs" / "gpu" / "bench.json"
BY_HAND = {"single": loops.single, "ddp": loops.ddp, "fsdp": loops.fsdp}

Step = Callable[[Any], Any]


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    if args.device == "cuda":
        cards.require()
    began = time.perf_counter()
    if not dist.is_initialized():
        # One group for all contenders; both unipar and the loops take one that is there.
        backend = "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo"
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    groups: dict[str, list[dict[str, Any]]] = {}
    left_out: dict[str, str] = {}
    late = False
    try:
        for name, contenders in _groups(args).items():
            if time.perf_counter() - began > args.minutes * 60:
                left_out[name], late = f"{args.minutes:g} minutes were over", True
                continue
            print(f"measuring {name} …", file=sys.stderr, flush=True)
            try:
                groups[name] = _measure(contenders, args)
            except ConfigError as error:
                left_out[name] = str(error)
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
    finally:
        dist.destroy_process_group()
    record = _record(args, groups, left_out, time.perf_counter() - began)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join(lines(record)))
    print(f"Written: {args.output}")
    return int(late)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024, help="bytes of a sample")
    parser.add_argument("--batch", type=int, default=16, help="samples of a step")
    parser.add_argument("--steps", type=int, default=10, help="of a block, which is timed as one")
    parser.add_argument("--turns", type=int, default=10, help="blocks of each contender")
    parser.add_argument("--warmup", type=int, default=3, help="steps before, compilation included")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--minutes", type=float, default=6.0, help="no group begins after these")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--command", default="python measure/gpu/bench.py", help="for the docs")
    return parser.parse_args(argv)


def _groups(args: argparse.Namespace) -> dict[str, dict[str, Callable[[], Step]]]:
    """What is compared in turns; the second of a group is the one that the others are held to."""
    ours = functools.partial(_under, args)
    groups = {
        name: {f"`{name}`": functools.partial(ours, name, "bf16"), "by hand": _hand(args, loop)}
        for name, loop in BY_HAND.items()
    }
    groups["fp8"] = {
        "`single` in fp8": functools.partial(ours, "single", "fp8"),
        "by hand in fp8": _hand(args, loops.fp8),
        "`single` in bf16": functools.partial(ours, "single", "bf16"),
    }
    return groups


def _model(args: argparse.Namespace) -> GPT:
    torch.manual_seed(0)
    return GPT(args.layers, args.width, args.heads, args.length)


def _under(args: argparse.Namespace, name: str, precision: Precision) -> Step:
    """A training step of unipar's, with the settings of a run."""
    strategy = registry.resolve(name)
    placement = Placement(device_type=args.device)
    spec = EngineSpec(
        _model(args),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-4, fused=True),
        precision=precision,
        compile={"backend": args.backend},
    )
    check_capabilities(strategy, spec, placement)
    engine = strategy.prepare(spec, strategy.setup(placement))

    def step(batch: Any) -> Any:
        size = len(batch[0])
        return engine.train_step(Batch((MicroBatch(batch, size),), size), loss)

    return step


def _hand(args: argparse.Namespace, loop: Any) -> Callable[[], Step]:
    return lambda: loop(_model(args).to(args.device), loss, {"backend": args.backend})


def _measure(
    contenders: dict[str, Callable[[], Step]], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Blocks of steps of all contenders, in turns; a row for each."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (args.batch, args.length + 1), generator=generator)
    batch = (tokens[:, :-1].to(args.device), tokens[:, 1:].to(args.device))
    steps: dict[str, Step] = {}
    losses: dict[str, list[float]] = {}
    held: dict[str, int] = {}
    for name, make in contenders.items():
        before = _memory(args.device)
        steps[name] = make()
        losses[name] = [_value(steps[name](batch)) for _ in range(args.warmup)]
        held[name] = _memory(args.device) - before
    peaks = None
    if args.device == "cuda":
        peaks = {name: _peak(step, batch) for name, step in steps.items()}
    blocks = {name: functools.partial(_block, step, batch, args) for name, step in steps.items()}
    seconds = in_turns(blocks, args.turns)
    held_to = list(steps)[1]
    return [
        {
            "what": name,
            "precision": "fp8" if "fp8" in name else "bf16",
            "tokens_per_second": args.batch * args.length / median(seconds[name]),
            "step_seconds": median(seconds[name]),
            "ratio": Estimate.of(seconds[name], seconds[held_to]).model_dump(),
            "loss": losses[name][-1],
            "peak_bytes": None if peaks is None else held[name] + peaks[name],
        }
        for name in steps
    ]


def _value(result: Any) -> float:
    return float(getattr(result, "loss", result))


def _block(step: Step, batch: Any, args: argparse.Namespace) -> float:
    """Seconds of a step, over a block of them that ends when the device has done all."""
    _synchronize(args.device)
    began = time.perf_counter()
    for _ in range(args.steps):
        step(batch)
    _synchronize(args.device)
    return (time.perf_counter() - began) / args.steps


def _memory(device: str) -> int:
    """Bytes of the device in tensors."""
    if device != "cuda":
        return 0
    gc.collect()
    return torch.cuda.memory_allocated()


def _peak(step: Step, batch: Any) -> int:
    """Bytes of a GPU that a step takes for a while, beyond what is held between steps."""
    before = _memory("cuda")
    torch.cuda.reset_peak_memory_stats()
    _value(step(batch))
    return torch.cuda.max_memory_allocated() - before


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def operations_per_token(parameters: int, layers: int, width: int, length: int) -> float:
    """Floating-point operations of a training step for each token, as PaLM counts them.

    6 for each parameter, and 12 · layers · width · length for attention, the masked half included
    (Chowdhery et al., 2022, appendix B).
    """
    return 6.0 * parameters + 12.0 * layers * width * length


def _record(
    args: argparse.Namespace,
    groups: dict[str, list[dict[str, Any]]],
    left_out: dict[str, str],
    seconds: float,
) -> dict[str, Any]:
    with torch.device("meta"):
        model = GPT(args.layers, args.width, args.heads, args.length)
    parameters = sum(p.numel() for p in model.parameters())
    each = operations_per_token(parameters, args.layers, args.width, args.length)
    for row in (row for rows in groups.values() for row in rows):
        peak, _ = cards.peak(args.device, row["precision"])
        row["share_of_peak"] = peak and row["tokens_per_second"] * each / peak
    shape = ("layers", "width", "heads", "length", "batch", "steps", "turns", "backend")
    return {
        **cards.about(args.device, args.command, seconds),
        "parameters": parameters,
        "shape": {name: getattr(args, name) for name in shape},
        "peak_source": cards.peak(args.device, "bf16")[1],
        "groups": groups,
        "left_out": left_out,
    }


def lines(record: dict[str, Any]) -> list[str]:
    """The record in a table for the terminal."""
    heads, rows = gpu.bench(record)
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    told = f"{record['gpu']}, driver {record['driver'] or 'unknown'}, torch {record['torch']}"
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (heads, *rows)
    ]
    return [told, *table, *(f"{name}: left out, {why}" for name, why in record["left_out"].items())]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
