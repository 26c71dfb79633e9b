"""Exchanges of divided sequences beside the products that wait for them, by torch's compiler.

A product of what is gathered is computed part by part as the parts arrive, and one that is summed
and scattered is sent part by part as it is computed (Wang et al., ASPLOS 2023,
doi:10.1145/3567955.3567959). torch has that as a pass over compiled graphs, which takes products
without a bias, and memory that the ranks of a group see of each other.
"""

from __future__ import annotations

import importlib
from typing import Any

from unipar.engine import Undo
from unipar.errors import ConfigError
from unipar.strategy import EngineSpec
from unipar.world import Placement, World


def check(spec: EngineSpec, placement: Placement) -> None:
    """Refuse it where torch cannot do it.

    Raises:
        ConfigError: there is no GPU, or nothing is compiled.
    """
    if placement.device_type != "cuda":
        raise ConfigError(
            "mesh: async_tp=true needs GPUs that see each other's memory; torch has it for no "
            f"'{placement.device_type}'. Leave async_tp out."
        )
    if not spec.compile:
        raise ConfigError(
            "mesh: async_tp=true is a pass of torch.compile. Set compile=True, or leave async_tp "
            "out."
        )


def overlap(world: World) -> Undo:
    """Let what is compiled from now on overlap the exchanges along ``tp``.

    Returns:
        What takes that back.
    """
    # torch 2.8 to 2.15: _inductor/config.py, distributed/_symmetric_memory/__init__.py. Neither has
    # a public name.
    settings: Any = importlib.import_module("torch._inductor.config")
    memory: Any = importlib.import_module("torch.distributed._symmetric_memory")
    memory.enable_symm_mem_for_group(world.mesh("tp").get_group().group_name)
    before = settings._micro_pipeline_tp
    settings._micro_pipeline_tp = True

    def undo() -> None:
        settings._micro_pipeline_tp = before

    return undo
