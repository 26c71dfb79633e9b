"""One run, three ways: DDP to the middle, FSDP from its checkpoint on, and never interrupted.

Trains a small GPT on real text with two DDP processes, goes on from the checkpoint with two FSDP
processes, and compares every loss with that of one process that did it all in one go.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import unipar
from examples.gpt import GPT, loss
from examples.text import ByteText


def train(strategy: str, devices: int, output_dir: Path, **settings: Any) -> unipar.RunResult:
    """The same run but for its strategy, its number of processes, and where it starts and ends."""
    torch.manual_seed(0)
    return unipar.fit(
        GPT(),
        ByteText("train"),
        strategy=strategy,
        devices=devices,
        loss=loss,
        optimizer={"name": "adamw", "lr": 2e-3},
        max_grad_norm=1.0,
        global_batch_size=16,
        device="cpu",
        output_dir=output_dir,
        **settings,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=160, help="steps in all; half under each")
    parser.add_argument("--plot", type=Path, default=Path("demo.png"))
    args = parser.parse_args()
    half = args.steps // 2
    schedule = {"lr_scheduler": {"name": "cosineannealinglr", "T_max": args.steps}}

    with tempfile.TemporaryDirectory(prefix="unipar-demo-") as directory:
        runs = Path(directory)
        print(f"\n1. DDP, two processes, steps 1 to {half}")
        ddp = train("ddp", 2, runs / "ddp", steps=half, **schedule)
        print(f"\n2. FSDP, two processes, steps {half + 1} to {args.steps}, from that checkpoint")
        resume = ddp.checkpoint
        fsdp = train("fsdp", 2, runs / "fsdp", steps=args.steps, resume=resume, **schedule)
        print(f"\n3. The same run in one process, steps 1 to {args.steps}, never interrupted")
        single = train("single", 1, runs / "single", steps=args.steps, **schedule)

    differences = [
        abs(ours - theirs) / theirs
        for ours, theirs in zip(ddp.losses + fsdp.losses, single.losses, strict=True)
    ]
    worst = max(differences)
    print(
        f"\nLargest relative difference of a loss from the uninterrupted run: {worst:.1e} over "
        f"{args.steps} steps, {max(differences[half:]):.1e} after the change of strategy."
    )
    plot(ddp.losses, fsdp.losses, single.losses, differences, args.plot)
    print(f"The curves: {args.plot.resolve()}")
    if worst > 1e-3:
        sys.exit("The curves differ by more than rounding explains.")


def plot(
    ddp: list[float],
    fsdp: list[float],
    single: list[float],
    differences: list[float],
    path: Path,
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, gaps) = pyplot.subplots(
        2, 1, sharex=True, figsize=(9, 6), height_ratios=(3, 1), layout="constrained"
    )
    half, steps = len(ddp), len(single)
    curves.plot(range(1, steps + 1), single, color="#c9ced6", linewidth=6, label="one process")
    curves.plot(range(1, half + 1), ddp, color="#2563eb", linewidth=1.6, label="DDP, 2 processes")
    curves.plot(
        range(half + 1, steps + 1),
        fsdp,
        color="#ea580c",
        linewidth=1.6,
        label="FSDP, 2 processes, from DDP's checkpoint",
    )
    curves.set_ylabel("training loss (nats a byte)")
    curves.set_title("The strategy changes in the middle; the run does not", loc="left")
    curves.legend(frameon=False)
    gaps.semilogy(range(1, steps + 1), [max(d, 1e-9) for d in differences], color="#4b5563")
    gaps.set_ylabel("relative difference")
    gaps.set_xlabel("step")
    gaps.set_ylim(1e-9, 1e-3)
    for axis in (curves, gaps):
        axis.axvline(half + 0.5, color="#9ca3af", linewidth=1, linestyle="--")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.2)
    curves.annotate(
        "checkpoint",
        (half + 0.5, 0.97),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        color="#6b7280",
        va="top",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


if __name__ == "__main__":
    main()
