"""DistributedDataParallel by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from measure.raw import common


def train(job: Mapping[str, Any]) -> None:
    """Train the job on all ranks."""
    dist.init_process_group()
    model = DistributedDataParallel(job["model"].to(job["device"]), **job["options"])
    optimizer = job["optimizer"](model.module.named_parameters())
    common.train(job, model, optimizer, model.no_sync)
    common.leave()
