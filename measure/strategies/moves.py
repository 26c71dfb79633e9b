"""Saving and resuming under one framework's strategies; run in its environment."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from measure.frameworks import answer
from unipar.strategy import Precision
from unipar.testing.pool import WorldPools
from unipar.testing.portability import Where, bound, go_on, save_all

Saved = dict[Precision, dict[str, str]]
"""The checkpoint of each strategy."""


def source(strategy: str) -> Where:
    """Where a strategy saves."""
    return Where(strategy, 1 if strategy == "single" else 2)


def save(strategy: str, precision: Precision, root: Path, pools: WorldPools) -> str:
    """The strategy's checkpoint."""
    (path,) = save_all([source(strategy)], pools, root / strategy / precision, precision).values()
    print(f"saved in {precision} under {strategy}", flush=True)
    return str(path)


def resume(
    strategy: str,
    ranks: int,
    sources: list[str],
    precision: Precision,
    saved: Saved,
    pools: WorldPools,
) -> dict[str, Any]:
    """A target's differences by source; or what stopped it, so that the others still run."""
    where = Where(strategy, ranks)
    paths = {source(name): Path(saved[precision][name]) for name in sources}
    told = {"strategy": strategy, "ranks": ranks, "precision": precision, "bound": bound(precision)}
    try:
        found = go_on(where, paths, pools, precision)
    except Exception as error:
        print(f"{where}: {error}", file=sys.stderr, flush=True)
        return {**told, "error": str(error).splitlines()[0]}
    what = next(iter(found)) if len(found) == 1 else f"{len(found)} checkpoints"
    print(f"{what} -> {where}, {precision}: {max(found.values()):.1e} apart at most", flush=True)
    return {**told, "apart": {place.strategy: apart for place, apart in found.items()}}


def main(question: dict[str, Any]) -> tuple[Saved, list[dict[str, Any]]]:
    saved: Saved = question["saved"]
    pools = WorldPools("cpu")
    try:
        for strategy, precision in question["to_save"]:
            saved[precision][strategy] = save(strategy, precision, Path(question["root"]), pools)
        return saved, [resume(**target, saved=saved, pools=pools) for target in question["targets"]]
    finally:
        pools.close()


if __name__ == "__main__":
    answer(main)
