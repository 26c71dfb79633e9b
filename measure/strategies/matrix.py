"""Move one run's checkpoint from every strategy to every other, across frameworks.

Each strategy trains ten steps on two processes and saves. Each resumes what the others have saved,
on 1, 2 and 4 processes, and steps 11 to 20 have to be those of a plain loop that was never stopped:
in fp32, and in bf16 from and to strategies that have no fp32.

python measure/strategies/matrix.py            all pairs, to docs/backends/matrix.json
python measure/strategies/matrix.py --cover    each strategy once as a source and once as a target,
                                               and layouts of ranks to and from three others
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from measure.frameworks import FRAMEWORKS  # noqa: E402
from measure.report import circumstances  # noqa: E402

RANKS = (1, 2, 4)
BESIDE = ("single", "zero3")
"""What layouts exchange checkpoints with where not all do with all."""


class Target(NamedTuple):
    """Where checkpoints are resumed, and whose."""

    strategy: str
    ranks: int
    sources: tuple[str, ...]
    precision: str = "fp32"


def every_pair(
    strategies: tuple[str, ...], half_only: tuple[str, ...], layouts: tuple[str, ...]
) -> Iterator[Target]:
    """All pairs in fp32; and in bf16 those in which a strategy has no fp32."""
    strategies += layouts
    for strategy in strategies:
        for ranks in _ranks(strategy):
            yield Target(strategy, ranks, strategies)
            yield Target(strategy, ranks, half_only, "bf16")
    for strategy in half_only:
        for ranks in _ranks(strategy):
            yield Target(strategy, ranks, (*strategies, *half_only), "bf16")


def covering(
    strategies: tuple[str, ...], half_only: tuple[str, ...], layouts: tuple[str, ...]
) -> Iterator[Target]:
    """A ring: each strategy goes on from its neighbor's checkpoint, on 1, 2 or 4 processes.

    Layouts go on from one rank's checkpoint, another framework's, and another layout's, and these
    from theirs.
    """
    for number, strategy in enumerate(strategies):
        ranks = _ranks(strategy)
        yield Target(strategy, ranks[number % len(ranks)], (strategies[number - 1],))
    for strategy in half_only:
        yield Target(strategy, RANKS[-1], strategies[-1:], "bf16")
        yield Target(strategies[-1], RANKS[0], (strategy,), "bf16")
    for number, layout in enumerate(layouts):
        yield Target(layout, _ranks(layout)[-1], (*BESIDE, layouts[number - 1]))
    for strategy in BESIDE:
        yield Target(strategy, _ranks(strategy)[-1], layouts)


def _ranks(strategy: str) -> tuple[int, ...]:
    for framework in FRAMEWORKS:
        if strategy in framework.layouts:
            return framework.layouts[strategy]
    return RANKS[:1] if strategy == "single" else RANKS


def survey(targets: list[Target], root: Path) -> list[dict[str, Any]]:
    """Save everywhere and resume everywhere, one framework after the other.

    A framework's processes take long to start. So they resume at once what there is by then, and
    what other frameworks save later when all have had their turn.
    """
    left, found = list(targets), []
    unsaved = {(source, target.precision) for target in targets for source in target.sources}
    saved: dict[str, dict[str, str]] = {"fp32": {}, "bf16": {}}
    for framework in (*FRAMEWORKS, *FRAMEWORKS):
        own = framework.all
        to_save = sorted(one for one in unsaved if one[0] in own)
        unsaved.difference_update(to_save)
        ready = [
            target
            for target in left
            if target.strategy in own
            and unsaved.isdisjoint((source, target.precision) for source in target.sources)
        ]
        left = [target for target in left if target not in ready]
        if to_save or ready:
            question = {
                "root": str(root / framework.name),
                "to_save": to_save,
                "targets": [target._asdict() for target in ready],
                "saved": saved,
            }
            saved, differences = framework.ask("measure.strategies.moves", question)
            found += differences
    asked = [(target.strategy, target.ranks, target.precision) for target in targets]
    return sorted(
        found, key=lambda one: asked.index((one["strategy"], one["ranks"], one["precision"]))
    )


def faults(found: list[dict[str, Any]]) -> list[str]:
    """What did not go on as if nothing had happened."""
    failed = [f"{t['strategy']} on {t['ranks']}: {t['error']}" for t in found if "error" in t]
    apart = [
        f"{source} -> {target['strategy']} on {target['ranks']}, {target['precision']}: "
        f"{difference:.1e} apart, and {target['bound']:.1e} is allowed"
        for target in found
        for source, difference in target.get("apart", {}).items()
        if not difference <= target["bound"]
    ]
    return failed + apart


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cover", action="store_true", help="a covering subset; writes nothing")
    args = parser.parse_args()

    began = time.perf_counter()
    strategies = tuple(name for framework in FRAMEWORKS for name in framework.strategies)
    half_only = tuple(name for framework in FRAMEWORKS for name in framework.half_only)
    layouts = tuple(name for framework in FRAMEWORKS for name in framework.layouts)
    targets = list((covering if args.cover else every_pair)(strategies, half_only, layouts))
    pairs = sum(len(target.sources) for target in targets)
    number = len(strategies) + len(half_only) + len(layouts)
    print(f"Checkpoints of {number} strategies, resumed {pairs} times:", flush=True)
    with tempfile.TemporaryDirectory(prefix="unipar-matrix-") as root:
        found = survey(targets, Path(root))
    wrong = faults(found)
    if wrong:
        sys.exit("\n".join(["These did not go on as the undisturbed run:", *wrong]))
    print(f"All {pairs} went on as the undisturbed run.")
    if not args.cover:
        about = circumstances("make test-matrix", time.perf_counter() - began, ())
        record = {"about": about, "targets": found}
        path = ROOT / "docs" / "backends" / "matrix.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(
            f"Written: {path.relative_to(ROOT)}; measure/pages/generate.py makes the table of it."
        )


if __name__ == "__main__":
    main()
