"""PyTorch's own strategies train the same run as the hand-written loop, at 1, 2 and 4 ranks."""

from __future__ import annotations

from unipar.testing.test_conformance import test_conformance

__all__ = ["test_conformance"]

STRATEGIES = [
    "single",
    "ddp",
    "ddp:shard_optimizer=true",
    "fsdp",
    "fsdp:sharding=grad_op",
    "fsdp:sharding=hybrid",
    # On four ranks two pairs of them, which shard over each other.
    "mesh:tp=2",
    # On four ranks the experts of each rank are sharded over two.
    "mesh:ep=2",
    # On four ranks two pairs of them, on other samples.
    "mesh:cp=2",
    # On four ranks two pipelines, whose stages are sharded over each other.
    "mesh:pp=2",
]
BRIEF = [
    "ddp:shard_optimizer=true",
    "fsdp:sharding=grad_op",
    "fsdp:sharding=hybrid",
    "mesh:ep=2",
    "mesh:cp=2",
    "mesh:pp=2",
]
