"""Measure what a rank holds and sends where more than data is divided, beside the formulas.

python measure/strategies/layouts.py    to docs/backends/layouts.json; a minute

One step of a small decoder on two processes, and of a mixture of experts for ``ep``, in fp32 under
AdamW. Bytes are counted as ``unipar bench`` counts them, on the rank that has most of each.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# Before torch is imported: threads of its own would compete with the other process.
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_pre_hook  # noqa: E402

import unipar  # noqa: E402
from measure.report import circumstances  # noqa: E402
from unipar.benchmark.memory import Held, counting_saved, held  # noqa: E402
from unipar.benchmark.traffic import Collectives  # noqa: E402
from unipar.testing.models import VOCABULARY, LongDecoder, Mixed  # noqa: E402
from unipar.testing.pool import WorldPools  # noqa: E402

RANKS, WIDTH, ROWS, LENGTH, FP32 = 2, 256, 4, 64, 4
SETTINGS = ("off", "full")


def decoder() -> nn.Module:
    return LongDecoder(width=WIDTH, heads=4, kv_heads=4)


def mixture() -> nn.Module:
    return Mixed(width=WIDTH)


def of_logits(logits: Any, batch: Any) -> unipar.LossSum:
    found = logits["logits"] if isinstance(logits, dict) else logits
    labels = batch["labels"]
    total = functional.cross_entropy(found.flatten(0, 1), labels.flatten(), reduction="sum")
    return unipar.LossSum(total, (labels != -100).sum())


LOSS = unipar.Objective(inputs=lambda batch: {"tokens": batch["tokens"]}, loss=of_logits)


def one_step(
    placement: unipar.Placement, strategy: str, build: Callable[[], nn.Module], setting: str
) -> dict[str, Any]:
    """Bytes of this rank in a step, after one that has made what is made once."""
    torch.manual_seed(placement.rank)
    found: list[Held] = []
    with unipar.Session(strategy=strategy, placement=placement) as session:
        engine = session.prepare(
            build(),
            optimizer="adamw",
            activation_checkpointing=setting,  # pyright: ignore[reportArgumentType]
        )
        rows = ROWS // session.world.data_size
        tokens = torch.randint(VOCABULARY, (rows, LENGTH))
        data = {"tokens": tokens, "labels": tokens}
        batch = unipar.Batch((unipar.MicroBatch(data, rows),), ROWS)
        engine.train_step(batch, LOSS)
        with Collectives() as collectives:
            engine.train_step(batch, LOSS)
        look = register_optimizer_step_pre_hook(lambda *_: found.append(held(engine.module, data)))
        with counting_saved(engine.module) as saved:
            engine.train_step(batch, LOSS)
        look.remove()
    most = found[0]._asdict() | {"activations": saved[0]}
    return {"held": most, "traffic": {t.kind: [t.count, t.bytes] for t in collectives.traffic}}


class Case(NamedTuple):
    """A layout and what a rank should hold and send in a step.

    Attributes:
        strategy: the layout.
        build: its model.
        held: the share of the model's bytes that a rank holds, by :func:`sizes`.
        sent: for each collective a formula in words, and its bytes by :func:`sizes`, without and
            with recomputation; the mean of the ranks.
    """

    strategy: str
    build: Callable[[], nn.Module]
    held: Callable[[dict[str, float]], float]
    sent: dict[str, tuple[str, Callable[[dict[str, float]], tuple[float, float]]]]


def sizes(build: Callable[[], nn.Module]) -> dict[str, float]:
    """Bytes of a model: all, ``matrices`` of its blocks, ``experts``; ``A`` of one activation."""
    named = dict(build().named_parameters())

    def bytes_of(chosen: Callable[[str, nn.Parameter], bool]) -> int:
        return sum(FP32 * p.numel() for name, p in named.items() if chosen(name, p))

    return {
        "P": bytes_of(lambda *_: True),
        "matrices": bytes_of(lambda name, p: name.startswith("blocks.") and p.ndim == 2),
        "experts": bytes_of(lambda name, _: ".experts." in name),
        "A": FP32 * ROWS * LENGTH * WIDTH,
    }


def _both(size: float) -> tuple[float, float]:
    """The same without and with recomputation."""
    return size, size


LAYERS = 2
CASES = (
    Case(
        "mesh:tp=2",
        decoder,
        lambda of: of["P"] - of["matrices"] / 2,
        # Shoeybi et al., "Megatron-LM" (2019), section 3. What a block ends with is not saved, and
        # so not computed again.
        {
            "all-reduce": (
                "4 L A; 5 L A recomputed",
                lambda of: (4 * LAYERS * of["A"], 5 * LAYERS * of["A"]),
            )
        },
    ),
    Case(
        "mesh:pp=2",
        decoder,
        lambda of: of["P"] / 2,
        {
            "send": ("A", lambda of: _both(of["A"])),
            "receive": ("A", lambda of: _both(of["A"])),
        },
    ),
    Case(
        "mesh:cp=2",
        decoder,
        lambda of: of["P"] / 2,
        # Liu et al., "Ring Attention" (2023): keys and values go round in both passes, and their
        # gradients once more, home. Weights are those of FSDP.
        {
            "send": (
                "(3 c - 2) L 2 A / c; (4 c - 3) L 2 A / c recomputed",
                lambda of: (4 * LAYERS * of["A"], 5 * LAYERS * of["A"]),
            ),
            "all-gather": ("2 P", lambda of: (2 * of["P"], 2 * of["P"])),
            "reduce-scatter": ("P", lambda of: (of["P"], of["P"])),
        },
    ),
    Case(
        "mesh:ep=2",
        mixture,
        lambda of: of["P"] / 2,
        # Lepikhin et al., "GShard" (2020): to the experts and back, in both passes, k = 2 of them
        # for each token. Weights that are not experts' are those of FSDP.
        {
            "all-to-all": (
                "4 k L A / r; 6 k L A / r recomputed",
                lambda of: (8 * LAYERS * of["A"] / 2, 12 * LAYERS * of["A"] / 2),
            ),
            "all-gather": ("2 (P - E)", lambda of: _both(2 * (of["P"] - of["experts"]))),
            "reduce-scatter": ("P - E", lambda of: _both(of["P"] - of["experts"])),
        },
    ),
)


def measure() -> dict[str, Any]:
    """What every case holds and sends, beside the formulas.

    Raises:
        SystemExit: one is further than a tenth from its formula.
    """
    began = time.perf_counter()
    memory, traffic, wrong = [], [], []

    def beside(what: str, found: float, formula: float) -> list[float]:
        if not 0.95 < found / formula < 1.1:
            wrong.append(f"{what}: {found:.0f} bytes, and the formula says {formula:.0f}")
        return [found, formula]

    pools = WorldPools("cpu")
    try:
        for case in CASES:
            of = sizes(case.build)
            alone, ranks = (
                {
                    setting: pools(size).run(one_step, strategy, case.build, setting)
                    for setting in SETTINGS
                }
                for size, strategy in ((1, "single"), (RANKS, case.strategy))
            )
            row: dict[str, Any] = {"strategy": case.strategy}
            for part, copies in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
                most = max(rank["held"][part] for rank in ranks["off"])
                row[part] = beside(f"{case.strategy}, {part}", most, copies * case.held(of))
            for setting in SETTINGS:
                row[setting] = [
                    max(rank["held"]["activations"] for rank in found[setting])
                    for found in (ranks, alone)
                ]
            memory.append(row)
            for number, setting in enumerate(SETTINGS):
                for kind, (words, formula) in case.sent.items():
                    sent = [rank["traffic"][kind] for rank in ranks[setting]]
                    mean = sum(size for _, size in sent) / RANKS
                    what = f"{case.strategy}, {kind}, {setting}"
                    line = beside(what, mean, formula(of)[number])
                    traffic.append([case.strategy, setting, kind, sent[0][0], words, *line])
            print(f"measured {case.strategy}", flush=True)
    finally:
        pools.close()
    if wrong:
        sys.exit("\n".join(wrong))
    about = circumstances("python measure/strategies/layouts.py", time.perf_counter() - began, ())
    return {"about": about, "memory": memory, "traffic": traffic}


def main() -> None:
    path = ROOT / "docs" / "backends" / "layouts.json"
    path.write_text(json.dumps(measure(), indent=1) + "\n")
    print(f"Written: {path.relative_to(ROOT)}; measure/pages/generate.py makes the tables of it.")


if __name__ == "__main__":
    main()
