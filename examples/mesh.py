"""A small Llama whose layers, stages or sequences are divided, and a Mixtral whose experts are.

Each runs in one process first, and then on two with one field changed, or on four where layers and
stages are divided at once; all curves in one plot for each model.

python examples/mesh.py
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import unipar
from examples.hf_gpt2 import Windows
from examples.switch import REFERENCE, TOLERANCE, comparison, draw

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "use_cache": False,
}
STRATEGIES = {
    "llama": ("mesh:tp=2", "mesh:pp=2", "mesh:tp=2,pp=2", "mesh:cp=2"),
    "mixtral": ("mesh:ep=2",),
}
PROCESSES = {REFERENCE: 1, "mesh:tp=2,pp=2": 4}
"""Of others there are two."""

say = Console(highlight=False).print


def build(name: str) -> nn.Module:
    """An unchanged model of transformers, the same each time."""
    import transformers

    torch.manual_seed(0)
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    )


def train(model: nn.Module, strategy: str, steps: int, output_dir: Path) -> list[float]:
    """The losses of one run. Only the strategy differs between runs, and how many processes."""
    settings: dict[str, Any] = {"progress": False, "log_level": "error", "checkpoint": False}
    result = unipar.fit(
        model,
        Windows("train", max_bytes=400_000),
        strategy=strategy,
        devices=PROCESSES.get(strategy, 2),
        device="cpu",
        optimizer="adamw",
        lr_scheduler={"name": "onecyclelr", "max_lr": 3e-3, "total_steps": steps},
        max_grad_norm=1.0,
        global_batch_size=16,
        micro_batch_size=4,
        steps=steps,
        output_dir=output_dir,
        **settings,
    )
    return result.losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help=f"default: {' and '.join(STRATEGIES)}")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output-dir", type=Path, help="where the curves go; default: below runs/")
    args = parser.parse_args()
    directory = args.output_dir or Path("runs", time.strftime("mesh-%Y%m%d-%H%M%S"))
    wrong: list[str] = []
    for name in args.models or STRATEGIES:
        losses: dict[str, list[float]] = {}
        for strategy in (REFERENCE, *STRATEGIES[name]):
            start = time.perf_counter()
            runs = directory / name / strategy.replace(":", "-").replace(",", "-")
            losses[strategy] = train(build(name), strategy, args.steps, runs)
            say(f"{name}, {strategy}: {args.steps} steps in {time.perf_counter() - start:.0f} s")
        single = losses.pop(REFERENCE)
        apart = {
            strategy: [abs(ours - one) / one for ours, one in zip(curve, single, strict=True)]
            for strategy, curve in losses.items()
        }
        say(comparison(single, losses, apart))
        plot = directory / f"{name}.png"
        largest = max(PROCESSES.get(strategy, 2) for strategy in losses)
        draw(single, losses, apart, plot, "two processes" + (", or four" if largest > 2 else ""))
        say(f"The curves: {plot}")
        wrong += [f"{name}, {one}" for one, gaps in apart.items() if max(gaps) > TOLERANCE]
    if wrong:
        sys.exit(f"More than rounding explains (above {TOLERANCE}): {', '.join(wrong)}.")


if __name__ == "__main__":
    main()
