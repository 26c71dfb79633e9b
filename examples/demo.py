"""One run, three ways: DDP to the middle, FSDP from its checkpoint on, and never interrupted.

Trains a small GPT on real text with two DDP processes, goes on from the checkpoint with two FSDP
processes, and compares every loss with that of one process that did it all in one go.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import unipar
from examples.gpt import GPT, loss
from examples.text import ByteText

# fp32 sums of many terms differ in their last bits when they are added up in another order, and
# training carries that on. A wrong scale, sample or moment would show above this.
TOLERANCE = 1e-4


def train(strategy: str, devices: int, output_dir: Path, **settings: Any) -> unipar.RunResult:
    """The same run but for its strategy, its number of processes, and where it starts and ends."""
    torch.manual_seed(0)
    return unipar.fit(
        GPT(),
        ByteText("train"),
        strategy=strategy,
        devices=devices,
        device="cpu",
        loss=loss,
        optimizer="adamw",
        max_grad_norm=1.0,
        global_batch_size=16,
        output_dir=output_dir,
        **settings,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=120, help="steps in all; half under each")
    parser.add_argument("--plot", type=Path, help="where the curves go; default: beside the runs")
    args = parser.parse_args()
    total, half = args.steps, args.steps // 2
    schedule = {"name": "onecyclelr", "max_lr": 2e-3, "total_steps": total}
    runs = Path("runs", time.strftime("demo-%Y%m%d-%H%M%S"))
    plot = args.plot or runs / "curves.png"
    say = Console(highlight=False).print

    say(f"\n[bold]1 of 3. DDP, two processes, steps 1 to {half}")
    ddp = train("ddp", 2, runs / "ddp", steps=half, lr_scheduler=schedule)

    say(f"\n[bold]2 of 3. FSDP, two processes, steps {half + 1} to {total}, from DDP's checkpoint")
    fsdp = train(
        "fsdp", 2, runs / "fsdp", steps=total, lr_scheduler=schedule, resume=ddp.checkpoint
    )

    say(f"\n[bold]3 of 3. The same run in one process, steps 1 to {total}, never interrupted")
    single = train("single", 1, runs / "single", steps=total, lr_scheduler=schedule)

    losses = ddp.losses + fsdp.losses
    differences = [
        abs(ours - theirs) / theirs for ours, theirs in zip(losses, single.losses, strict=True)
    ]
    say(comparison(losses, single.losses, differences, half))
    draw(losses, single.losses, differences, half, plot)
    say(
        f"Largest relative difference from the uninterrupted run: {max(differences[:half]):.1e} "
        f"under DDP,\n{max(differences[half:]):.1e} after the change to FSDP. "
        "fp32 itself rounds by up to 6e-08.\n"
        f"The curves: {plot}"
    )
    if max(differences) > TOLERANCE:
        sys.exit(f"That is more than rounding explains (above {TOLERANCE}): the runs differ.")


def comparison(
    losses: list[float], single: list[float], differences: list[float], half: int
) -> Table:
    """A few steps of both runs beside each other, those at the change of strategy among them."""
    table = Table(title="\nThe same step, the same loss", title_justify="left")
    for name in ("step", "under", "loss", "one process", "relative difference"):
        table.add_column(name, justify="left" if name == "under" else "right")
    steps = {1, half // 2, half - 1, half, half + 1, half + 2, (half + len(losses)) // 2}
    for step in sorted(steps | {len(losses)}):
        if 0 < step <= len(losses):
            table.add_row(
                str(step),
                "ddp" if step <= half else "fsdp",
                f"{losses[step - 1]:.6f}",
                f"{single[step - 1]:.6f}",
                f"{differences[step - 1]:.1e}",
                end_section=step == half,
            )
    return table


def draw(
    losses: list[float], single: list[float], differences: list[float], half: int, path: Path
) -> None:
    """The curves over each other, and below them how far they are apart."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    blue, orange, gray, ink = "#2563eb", "#ea580c", "#d3d8e0", "#4b5563"
    steps = range(1, len(losses) + 1)
    parts = ((slice(0, half), blue), (slice(half, None), orange))
    pyplot.rcParams.update({"font.size": 10.5, "axes.edgecolor": "#9ca3af"})
    figure, (curves, gaps) = pyplot.subplots(
        2, 1, sharex=True, figsize=(9, 6), height_ratios=(3, 1), layout="constrained"
    )

    curves.plot(steps, single, color=gray, linewidth=7, solid_capstyle="round")
    for part, color in parts:
        curves.plot(steps[part], losses[part], color=color, linewidth=1.7)
        gaps.plot(steps[part], differences[part], ".", color=color, markersize=5)
    curves.set_title("The strategy changes in the middle; the run does not", loc="left", pad=12)
    curves.set_ylabel("training loss, nats a byte")
    for x, y, color, text in (
        (0.25, 0.6, blue, "two processes, DDP"),
        (0.75, 0.6, orange, "two processes, FSDP,\nfrom DDP's checkpoint"),
        (0.25, 0.06, ink, "wide gray line: one process, never interrupted"),
    ):
        curves.text(x, y, text, color=color, transform=curves.transAxes, ha="center", size=12)

    gaps.set_yscale("symlog", linthresh=1e-8)
    gaps.set_ylim(-2e-9, 1e-3)
    gaps.set_yticks([0, 1e-8, 1e-6, 1e-4], ["equal", "$10^{-8}$", "$10^{-6}$", "$10^{-4}$"])
    gaps.minorticks_off()
    gaps.axhline(TOLERANCE, color="#9ca3af", linewidth=1, linestyle=":")
    gaps.text(1, TOLERANCE * 1.3, "more than this would be a fault", color=ink, size=9, va="bottom")
    gaps.set_ylabel("relative\ndifference")
    gaps.set_xlabel("training step")
    for axis in (curves, gaps):
        axis.axvline(half + 0.5, color="#9ca3af", linewidth=1, linestyle="--")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.25)
        axis.margins(x=0.01)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


if __name__ == "__main__":
    main()
