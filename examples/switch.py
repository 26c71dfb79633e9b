"""The same script under every installed strategy, one field changed; then all curves in one plot.

Each strategy has a process of its own, so that frameworks do not mix. Frameworks that need another
environment take part by its Python:

python examples/switch.py --devices 2 --python .venv-colossalai/bin/python
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import unipar
from examples.gpt import GPT, loss
from examples.text import ByteText
from unipar.strategy import registry

REFERENCE = "single"
STRATEGIES = (
    *("ddp", "dp", "fsdp", "deepspeed:stage=0", "zero1", "zero2", "zero3", "horovod", "accelerate"),
    *("colossalai:plugin=ddp", "colossalai:plugin=zero1", "colossalai:plugin=zero2"),
)

# fp32 sums of many terms differ in their last bits when they are added up in another order, and
# training carries that on. A wrong scale, sample or moment would show above this.
TOLERANCE = 1e-4

say = Console(highlight=False).print


class Outcome(NamedTuple):
    """What became of one strategy: a loss for each step, or why it did not run."""

    losses: list[float]
    refused: str = ""


def train(
    strategy: str, devices: int, device: Literal["cpu", "cuda"], steps: int, output_dir: str
) -> list[float]:
    """The script. Only ``strategy`` differs between the runs."""
    torch.manual_seed(0)
    result = unipar.fit(
        GPT(layers=2, width=64),
        ByteText("train", length=64),
        strategy=strategy,
        devices=devices,
        device=device,
        loss=loss,
        optimizer="adamw",
        lr_scheduler={"name": "onecyclelr", "max_lr": 3e-3, "total_steps": steps},
        max_grad_norm=1.0,
        global_batch_size=16,
        steps=steps,
        checkpoint=False,
        progress=False,
        log_level="error",
        output_dir=output_dir,
    )
    return result.losses


def run(strategy: str, python: str, args: argparse.Namespace) -> Outcome:
    """:func:`train` in a process of its own, by one environment's Python."""
    devices = 1 if strategy == REFERENCE else args.devices
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        done = subprocess.run(
            [
                *(python, __file__, "--run", strategy, "--result", file.name),
                *("--devices", str(devices), "--device", args.device, "--steps", str(args.steps)),
            ],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            sys.exit(f"{strategy}, by {python}, failed:\n{done.stderr or done.stdout}")
        return Outcome(**json.load(file))


def work(args: argparse.Namespace) -> None:
    """What the process of one strategy does."""
    try:
        with tempfile.TemporaryDirectory() as runs:
            outcome = Outcome(train(args.run, args.devices, args.device, args.steps, runs))
    except unipar.ConfigError as error:
        outcome = Outcome([], str(error))
    args.result.write_text(json.dumps(outcome._asdict()))


def first_that_runs(strategy: str, args: argparse.Namespace) -> Outcome:
    """The first environment's outcome that has the strategy; else the reasons of all."""
    refused: dict[str, None] = {}
    for python in (sys.executable, *args.python):
        outcome = run(strategy, python, args)
        if outcome.losses:
            return outcome
        refused[outcome.refused] = None
    return Outcome([], "\n".join(refused))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("strategies", nargs="*", help="which to run; default: all there are")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--python", action="append", default=[], help="of another environment")
    parser.add_argument("--plot", type=Path, help="where the curves go; default: below runs/")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        work(args)
        return

    named = {registry.as_mapping(strategy)["name"] for strategy in (REFERENCE, *STRATEGIES)}
    others = [name for name in registry.names() if name not in {*named, "deepspeed"}]
    wanted = [s for s in args.strategies or [*STRATEGIES, *others] if s != REFERENCE]

    curves: dict[str, list[float]] = {}
    missing: dict[str, str] = {}
    for strategy in (REFERENCE, *wanted):
        start = time.perf_counter()
        outcome = first_that_runs(strategy, args)
        if outcome.losses:
            curves[strategy] = outcome.losses
            say(f"{strategy}: {args.steps} steps in {time.perf_counter() - start:.0f} s")
        else:
            missing[strategy] = outcome.refused
            say(f"{strategy}: does not run here")
    if REFERENCE not in curves:
        sys.exit(f"{REFERENCE}: {missing[REFERENCE]}")

    single = curves.pop(REFERENCE)
    apart = {
        strategy: [abs(ours - one) / one for ours, one in zip(losses, single, strict=True)]
        for strategy, losses in curves.items()
    }
    say(comparison(single, curves, apart))
    for strategy, reason in missing.items():
        say(f"[bold]{strategy}[/bold] did not run. ", end="")
        say(reason, markup=False)
    plot = args.plot or Path("runs", time.strftime("switch-%Y%m%d-%H%M%S.png"))
    draw(single, curves, apart, plot, f"{args.devices} processes")
    say(f"The curves: {plot}")
    wrong = [strategy for strategy, differences in apart.items() if max(differences) > TOLERANCE]
    if wrong:
        sys.exit(f"More than rounding explains (above {TOLERANCE}): {', '.join(wrong)}.")


def comparison(
    single: list[float], curves: dict[str, list[float]], apart: dict[str, list[float]]
) -> Table:
    """How every run ended, and how far it ever was from the single process, as a fraction."""
    table = Table()
    table.add_column("strategy")
    table.add_column("final loss", justify="right")
    table.add_column(f"largest difference from {REFERENCE}", justify="right")
    table.add_row(REFERENCE, f"{single[-1]:.6f}", "")
    for strategy, losses in curves.items():
        table.add_row(strategy, f"{losses[-1]:.6f}", f"{max(apart[strategy]):.1e}")
    return table


def draw(
    single: list[float],
    curves: dict[str, list[float]],
    apart: dict[str, list[float]],
    path: Path,
    where: str,
) -> None:
    """The curves over each other, and below them how far they are apart."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    gray, ink = "#d3d8e0", "#4b5563"
    steps = range(1, len(single) + 1)
    pyplot.rcParams.update({"font.size": 10.5, "axes.edgecolor": "#9ca3af"})
    figure, (losses, gaps) = pyplot.subplots(
        2, 1, sharex=True, figsize=(9, 6.5), height_ratios=(3, 1.4), layout="constrained"
    )
    losses.plot(steps, single, color=gray, linewidth=8, solid_capstyle="round", label=REFERENCE)
    shapes = "osD^vPX<>*hp"
    for index, (strategy, curve) in enumerate(curves.items()):
        color = pyplot.get_cmap("tab20")(2 * index % 20 + index // 10)
        # Curves that lie on one line are told apart by where their marks are.
        every = slice(index % len(single), None, max(len(curves), 1))
        marks = shapes[index % len(shapes)]
        losses.plot(steps, curve, color=color, linewidth=0.8)
        losses.plot(steps[every], curve[every], marks, color=color, markersize=6, label=strategy)
        gaps.plot(steps, apart[strategy], marks, color=color, markersize=4, alpha=0.8)
    losses.set_title("One field changed, the same run", loc="left", pad=12)
    losses.set_ylabel("training loss, nats a byte")
    losses.legend(
        frameon=False, ncols=2, title=f"single: one process; the others: {where}", loc="upper right"
    )
    gaps.set_yscale("symlog", linthresh=1e-8)
    gaps.set_ylim(-2e-9, 1e-3)
    gaps.set_yticks([0, 1e-8, 1e-6, 1e-4], ["equal", "$10^{-8}$", "$10^{-6}$", "$10^{-4}$"])
    gaps.minorticks_off()
    gaps.axhline(TOLERANCE, color="#9ca3af", linewidth=1, linestyle=":")
    gaps.text(1, TOLERANCE * 1.3, "more than this would be a fault", color=ink, size=9, va="bottom")
    gaps.set_ylabel("relative difference\nfrom single")
    gaps.set_xlabel("training step")
    for axis in (losses, gaps):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.25)
        axis.margins(x=0.01)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


if __name__ == "__main__":
    main()
