"""Saving and resuming under one framework's strategies; run in its environment."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from measure.frameworks import answer
from unipar.strategy import Precision
from unipar.testing.pool import WorldPools
from unipar.testing.portability import Where, bound, go_on, save_all


def source(strategy: str) -> Where:
    """Where a strategy saves."""
    return Where(strategy, 1 if strategy == "single" else 2)


def save(strategies: list[str], precision: Precision, root: str) -> dict[str, str]:
    """The checkpoint of each strategy."""
    pools = WorldPools("cpu")
    try:
        saved = save_all([source(name) for name in strategies], pools, Path(root), precision)
    finally:
        pools.close()
    return {place.strategy: str(path) for place, path in saved.items()}


def resume(targets: list[dict[str, Any]], precision: Precision) -> list[dict[str, Any]]:
    """Each target's differences by source; or what stopped it, so that the others still run."""
    pools = WorldPools("cpu")
    try:
        return [_resume(**target, precision=precision, pools=pools) for target in targets]
    finally:
        pools.close()


def _resume(
    strategy: str, ranks: int, saved: dict[str, str], precision: Precision, pools: WorldPools
) -> dict[str, Any]:
    where = Where(strategy, ranks)
    paths = {source(name): Path(path) for name, path in saved.items()}
    told = {"strategy": strategy, "ranks": ranks, "precision": precision, "bound": bound(precision)}
    try:
        found = go_on(where, paths, pools, precision)
    except Exception as error:
        print(f"{where}: {error}", file=sys.stderr, flush=True)
        return {**told, "error": str(error).splitlines()[0]}
    what = next(iter(found)) if len(found) == 1 else f"{len(found)} checkpoints"
    print(f"{what} -> {where}, {precision}: {max(found.values()):.1e} apart at most", flush=True)
    return {**told, "apart": {place.strategy: apart for place, apart in found.items()}}


def main(question: dict[str, Any]) -> Any:
    return (save if "root" in question else resume)(**question)


if __name__ == "__main__":
    answer(main)
