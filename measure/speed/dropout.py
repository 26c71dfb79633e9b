"""Measure what dropout that draws for each sample costs.

python measure/speed/dropout.py            the table goes to docs/how-to/resume-elsewhere.md
python measure/speed/dropout.py --quick    a few turns, to see that it runs

Steps of a model with it beside the same with torch's own, in turns, in one process of one thread;
then one call of dropout beside the other ways to have masks that do not depend on ranks: a
generator for each sample, and one that draws the masks of the whole global batch on each rank.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import unipar  # noqa: E402
from measure.report import (  # noqa: E402
    Row,
    circumstances,
    microseconds,
    milliseconds,
    table,
    write_markdown,
)
from measure.speed.timing import BASELINE, block, in_turns  # noqa: E402
from unipar.engine.sample_masks import dropped, sample_words, words_of  # noqa: E402

P, ROWS, LENGTH, WIDTH, RANKS = 0.1, 8, 128, 256, 4
Ways = dict[str, Callable[[], object]]


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Dropout(P)) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(512, 10))


def transformer() -> nn.Module:
    """Two layers, whose attention writes its weights out or not."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, P, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def without_attention_dropout() -> nn.Module:
    """The same, but for dropout of attention weights: the fused kernels stay."""
    model = transformer()
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "three layers of 512, 128 samples": (perceptron, (128, 512)),
    f"transformer, 2 layers of {WIDTH}, {ROWS} x {LENGTH}": (transformer, (ROWS, LENGTH, WIDTH)),
    "the same without dropout of attention weights": (
        without_attention_dropout,
        (ROWS, LENGTH, WIDTH),
    ),
}


def loss_fn(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def steps(what: str, *, quick: bool) -> Row:
    """Steps of the engine under either setting."""
    build, shape = MODELS[what]
    x = torch.randn(shape)
    batch = unipar.Batch((unipar.MicroBatch(x, len(x), 0),), len(x))
    kinds: tuple[Literal["rank", "sample"], ...] = ("rank", "sample")
    ways: Ways = {}
    for kind in kinds:
        session = unipar.Session("single", device="cpu", dropout_seed=kind)
        session.__enter__()
        engine = session.prepare(build(), optimizer="sgd", name=kind)
        ways[BASELINE if kind == "rank" else kind] = partial(engine.train_step, batch, loss_fn)
    measured = _measured(ways, 2 if quick else 40)
    return Row.timed(f"a step: {what}", measured["sample"], measured[BASELINE], milliseconds)


def calls(*, quick: bool) -> list[Row]:
    """One call on a part of a batch, and its backward pass left out."""
    x = torch.randn(ROWS, LENGTH * WIDTH)
    generators = [torch.Generator() for _ in range(ROWS)]
    one = torch.Generator()

    def by_sample() -> torch.Tensor:
        words = sample_words(0, ROWS, (words_of(1), words_of(2)), x.device)
        return (x * (1 / (1 - P))).masked_fill_(dropped(words, words_of(3), x.shape[1:], P), 0.0)

    def by_generators() -> torch.Tensor:
        kept = torch.empty_like(x)
        for row, (own, generator) in enumerate(zip(kept, generators, strict=True)):
            own.bernoulli_(1 - P, generator=generator.manual_seed(row))
        return x * kept.div_(1 - P)

    def of_whole_batch() -> torch.Tensor:
        kept = x.new_empty(RANKS * ROWS, *x.shape[1:])
        kept.bernoulli_(1 - P, generator=one.manual_seed(1))
        return x * kept[:ROWS].div_(1 - P)

    ways: Ways = {
        BASELINE: lambda: functional.dropout(x, P, True),
        '`dropout_seed="sample"`': by_sample,
        "a generator for each sample": by_generators,
        f"the masks of all {RANKS} ranks, on each": of_whole_batch,
    }
    measured = _measured(ways, 2 if quick else 60)
    shape = f"{ROWS} x {LENGTH} x {WIDTH} elements"
    return [
        Row.timed(f"a call, {shape}: {name}", values, measured[BASELINE], microseconds)
        for name, values in measured.items()
        if name != BASELINE
    ]


def _measured(ways: Ways, turns: int) -> dict[str, list[float]]:
    for way in ways.values():
        block(way, 2)()
    return in_turns({name: block(way, 3) for name, way in ways.items()}, turns)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few turns; figures mean nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    rows = [steps(what, quick=args.quick) for what in MODELS] + calls(quick=args.quick)
    about = circumstances("python measure/speed/dropout.py", time.perf_counter() - began, ())
    text = f'{about} Beside `dropout_seed="rank"`, torch\'s own.\n\n{table(rows)}'
    print(text)
    if not args.quick:
        write_markdown(ROOT / "docs" / "how-to" / "resume-elsewhere.md", text)


if __name__ == "__main__":
    main()
