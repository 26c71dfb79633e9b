"""Stages whose parameters ranks on other samples divide: FSDP2 beside a pipeline.

Each stage is the root of what FSDP gathers, over the ranks that have the same stage. Its blocks are
units, as they are without stages; a unit has to be within one stage, since FSDP lets go of it when
its forward pass ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from unipar.engine import (
    Undo,
    keep_weights_in_place,
    refuse_changed_weights,
    refuse_inner_gradients,
    see_calls,
)
from unipar.engine.sharded import discard_gradients, refuse_uses_outside
from unipar.errors import ConfigError
from unipar.strategy import EngineSpec
from unipar.utils.torch_versions import sharded_groups
from unipar.world import World
from unipar_torch.from_host import tied_names
from unipar_torch.fsdp import refuse_scalars
from unipar_torch.sharding import is_copy, refuse_apart, refuse_untied, shard_units, units_of
from unipar_torch.stage_modules import Stage

if TYPE_CHECKING:
    from unipar_torch.mesh_options import MeshOptions

_STRATEGY = "mesh"


def shard_stage(stage: Stage, spec: EngineSpec, world: World, options: MeshOptions) -> list[Undo]:
    """Divide a stage's parameters, on the meta device.

    Args:
        stage: with its layers divided and its activations dealt with already.
        spec: what the user asked for.
        world: the joined processes.
        options: of the strategy.

    Returns:
        What takes back what can be.

    Raises:
        ConfigError: a unit reaches into another stage, or holds one of two names of a parameter.
    """
    module = stage.module
    ties = tied_names(module)
    # The second backward pass needs weights that the first one lets go of.
    undo = [refuse_inner_gradients(module, _STRATEGY, only_graphs=True)]
    refuse_scalars(module, _STRATEGY)
    units = _units(stage, options)
    refuse_apart(_STRATEGY, ties, module, units)
    shard_units(units, module, spec, world, options, gives_loss=stage.is_last)
    refuse_untied(_STRATEGY, ties, tied_names(module))
    stage.copies = partial(_gathered, module)
    return undo


def watch_weights(stage: Stage) -> list[Undo]:
    """Keep weights where FSDP gathers them, and refuse what it would lose of a stage.

    That is changes of gathered weights, and gradients of shards.

    What blocks write into their inputs it keeps.

    Args:
        stage: with its values.

    Returns:
        What takes that back.
    """
    module = stage.module
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    changed = refuse_changed_weights(module, _STRATEGY, parts, is_copy)
    outside = refuse_uses_outside(module, _STRATEGY)
    in_place = keep_weights_in_place(module)
    return [in_place, changed, *outside, *see_calls(module, _STRATEGY)]


def reduce_in(every: bool, stage: Stage, last: bool) -> None:
    """Have FSDP reduce gradients in the next backward pass of a stage, or keep them whole.

    Args:
        every: whether each micro-batch's are reduced.
        stage: whose pass it is.
        last: whether it is that of the last micro-batch.
    """
    assert isinstance(stage.module, FSDPModule)
    stage.module.set_requires_gradient_sync(last or every)


def discard(stages: Iterable[Stage]) -> None:
    """Drop what FSDP has not reduced, and what an error in a pass has left gathered."""
    for stage in stages:
        discard_gradients(stage.module, _STRATEGY)


def _units(stage: Stage, options: MeshOptions) -> list[nn.Module]:
    names = {id(module): name for name, module in stage.module.named_modules()}
    # What other stages have, a stage has no parameters of.
    units = [
        unit for unit in units_of(stage.module, options) if any(True for _ in unit.parameters())
    ]
    for unit in units:
        name = names[id(unit)]
        if any(block.startswith(f"{name}.") for block in stage.plan.chain):
            option = "wrap" if options.wrap_min_params is None else "wrap_min_params"
            raise ConfigError(
                f"mesh: {option} makes '{name}' ({type(unit).__name__}) a unit that FSDP gathers "
                f"by itself, and pp cuts it before '{stage.plan.chain[stage.plan.firsts[1]]}'. "
                f"Leave {option} out, which makes units of the blocks, or name classes of modules "
                "within them."
            )
    return units


def _gathered(module: nn.Module) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Pairs of a shard and what a pass computes with in its place."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            for group in sharded_groups(part):
                for parameter in group.fsdp_params:
                    # torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py.
                    if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                        yield parameter.sharded_param, whole
