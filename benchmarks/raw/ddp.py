"""DistributedDataParallel by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.raw import parts


def train(job: Mapping[str, Any]) -> None:
    """Train the job on all ranks."""
    dist.init_process_group()
    model = DistributedDataParallel(job["model"].to(job["device"]), **job["options"])
    optimizer = job["optimizer"](model.module.named_parameters())
    parts.train(job, model, optimizer, model.no_sync)
    parts.leave()
