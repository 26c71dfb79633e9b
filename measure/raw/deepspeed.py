"""DeepSpeed by hand."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from measure.raw import common


def train(job: Mapping[str, Any]) -> None:
    """Train the job on all ranks."""
    # Not by a statement, which type checkers take for this file where DeepSpeed is not installed.
    deepspeed: Any = importlib.import_module("deepspeed")
    deepspeed.init_distributed("nccl" if job["device"].type == "cuda" else "gloo")
    model, options = job["model"], dict(job["options"])
    stage = options.pop("stage", 0)
    if options or job["precision"] != "fp32":
        raise SystemExit(f"this loop takes a stage and fp32, and got {options}")
    optimizer = job["optimizer"](model.named_parameters())
    accumulation = len(job["batches"][0])
    config = {
        "train_micro_batch_size_per_gpu": len(job["batches"][0][0]),
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **({} if job["max_grad_norm"] is None else {"gradient_clipping": job["max_grad_norm"]}),
    }
    scheduler = job["lr_scheduler"](optimizer) if job["lr_scheduler"] else None
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    for batches in common.steps(job):
        total = torch.zeros((), device=job["device"])
        for batch in batches:
            loss = job["loss"](engine, batch)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / len(batches)
        dist.all_reduce(total)
        job["record"](total.item() / dist.get_world_size())
    engine.destroy()
