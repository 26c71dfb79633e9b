"""Parity, memory and capabilities of one framework's strategies; run in its environment."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from dataclasses import replace
from typing import Any

from measure.frameworks import answer
from measure.speed.tensor_bytes import held
from unipar.strategy import registry
from unipar.testing.cases.numbers import CLIPPED, PLAIN, TOKENS
from unipar.testing.compare import Difference
from unipar.testing.kit import Kit, Target
from unipar.testing.pool import WorldPools

RANKS = (2, 4)
SCENARIOS = (PLAIN, replace(CLIPPED, accumulation=4), replace(TOKENS, accumulation=4))
LAYERS, WIDTH = 8, 512

# Communication buffers are a fixed cost that a large model does not notice and this one would.
_BUCKETS = {"reduce_bucket_size": 2**20, "allgather_bucket_size": 2**20}
SMALL_BUFFERS: dict[str, dict[str, Any]] = {
    "zero1": _BUCKETS,
    "zero2": _BUCKETS,
    "zero3": {"reduce_bucket_size": 2**20, "prefetch_bucket_size": 2**20},
    "accelerate:plugin=deepspeed": {"deepspeed": _BUCKETS},
    "colossalai:plugin=zero1": {"reduce_bucket_size_m": 1},
    "colossalai:plugin=zero2": {"reduce_bucket_size_m": 1},
}


def capabilities(strategy: str) -> dict[str, Any]:
    """The strategy's capabilities, in what JSON has."""
    able = dataclasses.asdict(registry.resolve(strategy).capabilities())
    return {k: sorted(v) if isinstance(v, frozenset) else v for k, v in able.items()}


def parity(strategy: str, size: int, pools: WorldPools) -> dict[str, float]:
    """The largest differences from the hand-written loop, over 20 steps of each scenario.

    Raises:
        AssertionError: one is above what the conformance kit allows.
    """
    kit = Kit(Target.named(strategy), size, pools)
    found = Difference()
    for run, scenario in zip(kit.train(*SCENARIOS), SCENARIOS, strict=True):
        found |= kit.check(run, scenario)
    return dataclasses.asdict(found)


def main(question: dict[str, Any]) -> dict[str, Any]:
    pools = WorldPools("cpu")
    found = {}
    try:
        for strategy in (*question["strategies"], *question["axes"]):
            sizes = (1,) if strategy == "single" else RANKS
            able = capabilities(strategy)
            precision = "fp32" if "fp32" in able["precisions"] else "bf16"
            given = registry.as_mapping(strategy) | SMALL_BUFFERS.get(strategy, {})
            found[strategy] = {
                "capabilities": able,
                "precision": precision,
                "parity": {size: parity(strategy, size, pools) for size in sizes},
            }
            if strategy in question["strategies"]:
                memory = {
                    size: pools(size).run(held, given, precision, LAYERS, WIDTH, timeout=300)[0]
                    for size in sizes
                }
                found[strategy] |= {
                    "parameters": memory[sizes[0]][0],
                    "bytes": {size: most for size, (_, most) in memory.items()},
                }
            print(f"measured {strategy}", flush=True)
    finally:
        pools.close()
    return {"version": importlib.metadata.version(question["package"]), "strategies": found}


if __name__ == "__main__":
    answer(main)
