"""A loop of DeepSpeed's, at ZeRO's second stage."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import deepspeed
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def train(job: Any) -> None:
    deepspeed.init_distributed("gloo")
    config = {
        "train_micro_batch_size_per_gpu": job.batch_size,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
    }
    model = job.model()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    sampler = DistributedSampler(job.data)
    loader = DataLoader(job.data, batch_size=job.batch_size, sampler=sampler)
    for inputs, targets in job.turns(loader):
        loss = job.loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
