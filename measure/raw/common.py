"""What the hand-written loops have in common: batches, autocast, and the reported loss."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def steps(job: Mapping[str, Any]) -> Iterator[list[Any]]:
    """For each step this rank's micro-batches, on its device."""
    flat = [indices for batch in job["batches"] for indices in batch]
    loader = iter(DataLoader(job["dataset"], batch_sampler=flat, collate_fn=job["collate"]))
    for batch in job["batches"]:
        yield [moved(next(loader), job["device"]) for _ in batch]


def moved(batch: Any, device: torch.device) -> Any:
    """A tensor, or tuples, lists and dicts of tensors, on a device."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: moved(value, device) for key, value in batch.items()}
    return type(batch)(moved(value, device) for value in batch)


def autocast(job: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """In the job's precision; fp16 would want a scaler, which these loops have not."""
    if job["precision"] == "fp32":
        return contextlib.nullcontext()
    if job["precision"] == "fp16":
        raise SystemExit("the hand-written loops take fp32 and bf16")
    return torch.autocast(job["device"].type, DTYPES[job["precision"]])


def train(job: Mapping[str, Any], model: Any, optimizer: Any, no_sync: Any) -> None:
    """The loop itself, where torch reduces the gradients in ``backward``.

    Args:
        job: what is trained.
        model: wrapped.
        optimizer: over the wrapped model's parameters.
        no_sync: a function that gives a context in which gradients are not reduced.
    """
    scheduler = job["lr_scheduler"](optimizer) if job["lr_scheduler"] else None
    parameters = list(model.parameters())
    for batches in steps(job):
        optimizer.zero_grad()
        total = torch.zeros((), device=job["device"])
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            with contextlib.nullcontext() if last else no_sync():
                with autocast(job):
                    loss = job["loss"](model, batch) / len(batches)
                loss.backward()
            total += loss.detach()
        if job["max_grad_norm"] is not None:
            torch.nn.utils.clip_grad_norm_(parameters, job["max_grad_norm"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        dist.all_reduce(total)
        job["record"](total.item() / dist.get_world_size())


def leave() -> None:
    """Give the process group up, when its threads have nothing more to do.

    A gloo thread that drops the last reference to a tensor waits for the GIL, and the group's
    destructor waits for the thread while it holds it (seen with torch 2.13).
    """
    time.sleep(0.05)
    dist.destroy_process_group()
