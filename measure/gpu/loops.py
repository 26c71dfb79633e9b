"""The loops that one would write by hand for one GPU; nothing of unipar is imported here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

Loss = Callable[[Any, Any], torch.Tensor]
Step = Callable[[Any], torch.Tensor]


def single(model: nn.Module, loss_fn: Loss, compiled: dict[str, Any]) -> Step:
    """The plain loop: autocast around a compiled model."""
    model.compile(**compiled)
    return _autocast(model, loss_fn, _adamw(model))


def ddp(model: nn.Module, loss_fn: Loss, compiled: dict[str, Any]) -> Step:
    """DistributedDataParallel around the compiled model."""
    model.compile(**compiled)
    device = next(model.parameters()).device
    ids = [device.index] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    return _autocast(wrapped, loss_fn, _adamw(model))


def fsdp(model: nn.Module, loss_fn: Loss, compiled: dict[str, Any]) -> Step:
    """FSDP2 with each block of the model a unit of its own, compiled by itself."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for blocks in model.children():
        if isinstance(blocks, nn.ModuleList):
            for block in blocks:
                block.compile(**compiled)
                fully_shard(block, mp_policy=policy)
    # The loss is of fp32 outputs, as under autocast.
    fully_shard(model, mp_policy=dataclasses.replace(policy, output_dtype=torch.float32))
    optimizer = _adamw(model)

    def step(batch: Any) -> torch.Tensor:
        loss = loss_fn(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def fp8(model: nn.Module, loss_fn: Loss, compiled: dict[str, Any]) -> Step:
    """The plain loop with torchao's float8 in the linear layers."""
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(model)
    return single(model, loss_fn, compiled)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _autocast(model: Any, loss_fn: Loss, optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: Any) -> torch.Tensor:
        with torch.autocast(batch[0].device.type, torch.bfloat16):
            loss = loss_fn(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
