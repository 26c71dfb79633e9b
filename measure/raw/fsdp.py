"""Fully sharded data parallelism by hand: each block of a list of blocks is a unit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from measure.raw import common


def train(job: Mapping[str, Any]) -> None:
    """Train the job on all ranks."""
    dist.init_process_group()
    mesh = init_device_mesh(job["device"].type, (dist.get_world_size(),))
    model = job["model"].to(job["device"])
    for child in model.modules():
        if isinstance(child, nn.ModuleList):
            for block in child:
                fully_shard(block, mesh=mesh, **job["options"])
    sharded = fully_shard(model, mesh=mesh, **job["options"])
    optimizer = job["optimizer"](sharded.named_parameters())

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        assert isinstance(sharded, FSDPModule)
        sharded.set_requires_gradient_sync(False)
        yield
        sharded.set_requires_gradient_sync(True)

    common.train(job, sharded, optimizer, no_sync)
    common.leave()
