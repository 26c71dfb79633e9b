"""HybridParallelPlugin with ZeRO: replicas divide what the optimizer updates of a rank's layers.

The plugin refuses ZeRO in fp32 (Colossal-AI 0.5.0, booster/plugin/hybrid_parallel_plugin.py,
``configure``). It is given the model alone, and the optimizer is put into the class that the
plugins ``zero1`` and ``zero2`` have, over the replicas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from colossalai.zero import LowLevelZeroOptimizer  # pyright: ignore[reportMissingImports]

from unipar.engine import (
    build_optimizer,
    checkpoint_activations,
    flat_state,
    refuse_inner_gradients,
)
from unipar.state import Box, LocalState
from unipar.world import World
from unipar_colossalai.boosted import Boosted
from unipar_colossalai.checks import check_optimizer
from unipar_colossalai.divided_state import Part
from unipar_colossalai.engine import BoosterEngine, Start
from unipar_colossalai.framework import quiet
from unipar_colossalai.hybrid import (
    HybridNorm,
    divide,
    refuse_left_out,
    refuse_probing,
    whole_losses,
)
from unipar_colossalai.hybrid import prepare as prepare_whole
from unipar_colossalai.hybrid_models import check_model, check_training
from unipar_colossalai.hybrid_state import HybridState, Logical, Shard
from unipar_colossalai.scaling import part_precision
from unipar_colossalai.zero import ZeROReducer, ZeROStepper


def prepare(start: Start) -> BoosterEngine:
    """Divide layers among the ranks of a replica, and what they update among replicas."""
    spec, world, module = start.spec, start.world, start.module
    plugin = start.booster.plugin
    if spec.optimizer is None:
        return prepare_whole(start)
    check_model(module, plugin.tp_size, plugin.pp_size)
    check_training(module)
    start.send_weights()
    optimizer = build_optimizer(spec, module)
    assert optimizer is not None
    check_optimizer(module, optimizer)
    logical = Logical(module, optimizer)
    wrapper, _ = divide(start, None)
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()
    with quiet():
        zero = LowLevelZeroOptimizer(
            optimizer,
            **{**plugin.zero_config, "overlap_communication": False},
            dp_process_group=plugin.dp_group,
            backward_context=wrapper._hook_context,
        )
    check_loss = whole_losses(module)
    undo = [*start.undo, refuse_left_out(module), check_loss.close]
    undo.append(refuse_inner_gradients(module, "colossalai"))
    # Only now: Colossal-AI replaces the methods of the modules that it divides.
    undo.append(checkpoint_activations(module, spec.activation_checkpointing))
    reducer = HybridZeROReducer(module, world, zero, partial=plugin.zero_stage == 2)
    precision = part_precision(spec, world)
    held = [(master, zero.master_to_working_param[id(master)]) for master in reducer.masters]
    norm = HybridNorm(plugin, wrapper, held, zero=True)
    return BoosterEngine(
        start,
        wrapper,
        optimizer,
        zero,
        model=Boosted(module, wrapper),
        reducer=reducer,
        precision=precision,
        stepper=ZeROStepper(reducer, precision, norm),
        state=HybridZeROState(logical, module, zero, dist.get_rank(plugin.tp_group), world),
        check_loss=check_loss,
        undo=undo,
    )


class HybridZeROReducer(ZeROReducer):
    """Averages gradients over replicas."""

    calls_hooks = False

    def probing(self) -> NoReturn:
        refuse_probing()

    def share_buffers(self, buffers: Iterable[torch.Tensor] | None = None) -> None:
        """The buffers of the models that are proved never change."""


@dataclass(frozen=True)
class FlatShard(Part):
    """Consecutive elements of a rank's part of a tensor.

    Attributes:
        shard: that part.
        local: its shape here, padding of the vocabulary included.
    """

    shard: Shard
    local: tuple[int, ...]

    def state(self, name: str, tensor: torch.Tensor) -> LocalState:
        own = tensor.view(-1)[: max(0, math.prod(self.local) - self.start)]
        flat = flat_state(name, self.local, self.start, own)
        dim = self.shard.dim
        if dim is None:
            return flat
        boxes, views, begin = [], [], 0
        for run in self.shard.runs:
            for (offsets, sizes), view in zip(flat.boxes, flat.tensors, strict=True):
                first = max(offsets[dim], begin)
                last = min(offsets[dim] + sizes[dim], begin + run.length)
                if first < last:
                    at = (*offsets[:dim], run.start + first - begin, *offsets[dim + 1 :])
                    boxes.append(Box(at, (*sizes[:dim], last - first, *sizes[dim + 1 :])))
                    views.append(view.narrow(dim, first - offsets[dim], last - first))
            begin += run.length
        return LocalState(name, self.shape, tensor.dtype, tuple(boxes), tuple(views))


class HybridZeROState(HybridState):
    """Shards of a model, and an optimizer over equal parts of each.

    Args:
        logical: the model as it was before it was divided.
        module: the user's, divided.
        zero: Colossal-AI's optimizer.
        tp_rank: which of the shards this rank has.
        world: the joined processes.
    """

    def __init__(
        self, logical: Logical, module: torch.nn.Module, zero: Any, tp_rank: int, world: World
    ) -> None:
        super().__init__(logical, module, zero.optim, tp_rank, world)
        self.zero = zero
        self._replica = world.layout.coordinate("batch", world.rank)

    def follow_weights(self) -> None:
        with torch.no_grad():
            self.zero.update_master_params(self.module)

    def parts(self) -> Iterator[tuple[torch.Tensor, FlatShard]]:
        masters = self.zero.get_working_to_master_map()
        for parameter, shard in self.logical.parts(self.module, self.tp_rank):
            master = masters[id(parameter)]
            start = min(self._replica * master.numel(), parameter.numel())
            local = tuple(parameter.shape)
            yield master, FlatShard(shard.name, shard.shape, start, master, shard, local)
