"""FSDP2 and optimizers over a model whose experts are on another mesh than its other parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from unipar.engine import OptimizerStepper
from unipar.world import World
from unipar_torch.expert_plan import shard_dim


def shard_experts(experts: nn.Module, world: World, **options: Any) -> None:
    """Let FSDP2 divide a rank's experts among the ranks that have the same.

    Args:
        experts: with its parameters as DTensors on the ranks along ``ep``.
        world: the joined processes.
        options: of ``fully_shard``.
    """
    layout = world.layout
    hybrid = layout.dp_replicate > 1
    mesh = world.mesh("dp_replicate", "efsdp") if hybrid else world.mesh("efsdp")

    def placement(parameter: Any) -> Shard:
        return Shard(shard_dim(parameter.to_local().shape, layout.efsdp))

    fully_shard(experts, mesh=mesh, shard_placement_fn=placement, **options)


class MeshesStepper(OptimizerStepper):
    """Steps the parameters of one mesh after those of another.

    An operation on lists of DTensors takes those of one mesh (torch 2.13,
    distributed/tensor/_ops/_pointwise_ops.py), and optimizers on GPUs step by such.
    """

    def update(self) -> bool:
        with _groups_of_one_mesh(self.optimizer):
            return super().update()


@contextlib.contextmanager
def _groups_of_one_mesh(optimizer: Optimizer) -> Iterator[None]:
    """Take an optimizer's groups apart for a step, so that each has parameters of one mesh."""
    groups = optimizer.param_groups
    parts = [
        (group, [{**group, "params": own} for own in _by_mesh(group["params"])]) for group in groups
    ]
    optimizer.param_groups = [part for _, own in parts for part in own]
    try:
        yield
    finally:
        for group, own in parts:
            # What a step has changed of it (a counter of its own), but for its parameters.
            for part in own[:1]:
                group.update({**part, "params": group["params"]})
        optimizer.param_groups = groups


def _by_mesh(parameters: list[Any]) -> list[list[Any]]:
    found: dict[Any, list[Any]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        found.setdefault(mesh, []).append(parameter)
    return list(found.values())
