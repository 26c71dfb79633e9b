"""Horovod: a whole replica on each process, gradients summed by ring all-reduce."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator, model_validator
from torch import nn

from unipar.engine import checkpoint_activations, compile_modules, offload_activations
from unipar.errors import ConfigError
from unipar.strategy import (
    Availability,
    Capabilities,
    EngineSpec,
    Strategy,
    StrategyOptions,
    seeded_model,
)
from unipar.world import Placement, World, join
from unipar_horovod import installed, processes
from unipar_horovod.building import recipe
from unipar_horovod.watching import watching

if TYPE_CHECKING:
    from unipar.engine import StepEngine
    from unipar.install import Recipe

_MIB = 1 << 20


class HorovodOptions(StrategyOptions):
    """Options of Horovod. Those left out have Horovod's own defaults."""

    strategy: ClassVar[str] = "horovod"

    transport: Literal["gloo", "mpi"] = Field(
        default="gloo",
        description="What carries the reductions; mpi only under mpirun, where it is built in.",
    )
    fusion_threshold_mb: float = Field(
        default=25.0,
        ge=0,
        description="Size of the buffers in which gradients are fused, in MiB; 0 fuses none.",
    )
    cycle_time_ms: float | None = Field(
        default=None,
        gt=0,
        description="Milliseconds between two looks at what there is to reduce; small is prompt.",
    )
    num_groups: int | None = Field(
        default=None, ge=1, description="Fuse gradients into this many groups instead."
    )
    compression: Literal["none", "fp16"] = Field(
        default="none",
        description="Compression of gradients in the all-reduce; fp16 loses precision.",
    )
    gradient_predivide_factor: float = Field(
        default=1.0,
        gt=0,
        description="Divide gradients by this before the sum, and multiply the sum by it.",
    )
    sparse_as_dense: bool = Field(
        default=False, description="Reduce sparse gradients (of embeddings) as dense ones."
    )
    broadcast_buffers: bool = Field(
        default=True,
        description="Every step starts from rank 0's buffers (BatchNorm statistics).",
    )
    process_sets: tuple[tuple[int, ...], ...] = Field(
        default=(),
        description="Sets of ranks for collectives of your own: unipar_horovod.process_set(ranks).",
    )
    autotune: bool = Field(
        default=False, description="Let Horovod try fusion thresholds and cycle times as it runs."
    )
    timeline: Path | None = Field(
        default=None, description="Where rank 0 writes a trace of all reductions, for chrome."
    )
    native: dict[str, str] = Field(
        default_factory=dict,
        description="Other environment variables of Horovod's, such as HOROVOD_CACHE_CAPACITY.",
    )

    @field_validator("process_sets")
    @classmethod
    def _sorted_sets(cls, sets: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        ordered = tuple(tuple(sorted(ranks)) for ranks in sets)
        for ranks in ordered:
            if not ranks or len(set(ranks)) != len(ranks) or ranks[0] < 0:
                raise ValueError(f"{list(ranks)} is no set of ranks; give each once, from 0")
        if len(set(ordered)) != len(ordered):
            raise ValueError("the same ranks are given twice; one set of them is enough")
        return ordered

    @model_validator(mode="after")
    def _fits_together(self) -> HorovodOptions:
        if self.autotune and {"fusion_threshold_mb", "cycle_time_ms"} & self.model_fields_set:
            raise ValueError(
                "autotune chooses the fusion threshold and the cycle time itself; "
                "leave fusion_threshold_mb and cycle_time_ms out, or autotune"
            )
        return self

    @property
    def fusion_bytes(self) -> int:
        """The size of a fusion buffer, in bytes."""
        return round(self.fusion_threshold_mb * _MIB)


_OWNED = {
    "HOROVOD_FUSION_THRESHOLD": "fusion_threshold_mb",
    "HOROVOD_CYCLE_TIME": "cycle_time_ms",
    "HOROVOD_AUTOTUNE": "autotune",
    "HOROVOD_TIMELINE": "timeline",
}
"""Variables that have an option, by its name."""

_PLACED = (
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_", "HOROVOD_CROSS_", "HOROVOD_HOSTNAME"),
    *("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "HOROVOD_GLOO_", "HOROVOD_ELASTIC"),
    *("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "HOROVOD_DISABLE_GROUP_FUSION"),
)
"""Beginnings of variables that follow from the run itself."""


class HorovodStrategy(Strategy):
    """Horovod's DistributedOptimizer over Gloo."""

    name = "horovod"
    options_type = HorovodOptions
    options: HorovodOptions
    engine_options = frozenset({"compression"})

    @classmethod
    def availability(cls) -> Availability:
        return installed.availability()

    @classmethod
    def recipe(cls) -> Recipe:
        return recipe()

    @classmethod
    def watch_collectives(cls, seen: Callable[[str, int], None]) -> AbstractContextManager[None]:
        return watching(seen)

    def capabilities(self) -> Capabilities:
        # Half precision is autocast's: parameters and reductions stay fp32, and Horovod's
        # collectives never see bfloat16, which they do not know.
        return Capabilities(
            frozenset({"fp32", "bf16", "fp16"}),
            frozenset({"cpu"}),
            offload=frozenset({"activations"}),
            selective_checkpointing=True,
            sample_dropout=True,
        )

    def check(self, spec: EngineSpec, placement: Placement) -> None:
        from unipar_horovod.engine import check_dtypes

        available = self.availability()
        if not available.ok:
            raise ConfigError(f"horovod: {available.reason} To fix it: {available.remedy}")
        self._settings(placement)
        if self.options.transport == "mpi":
            _check_mpi(placement)
        for ranks in self.options.process_sets:
            if ranks[-1] >= placement.size:
                raise ConfigError(
                    f"horovod: process_sets names rank {ranks[-1]}, and the run has "
                    f"{placement.size} processes, so the last rank is {placement.size - 1}."
                )
            if len(ranks) == placement.size:
                raise ConfigError(
                    f"horovod: process_sets names all {placement.size} ranks; that set is always "
                    "there: horovod.torch.global_process_set."
                )
        if isinstance(spec.model, nn.Module):
            check_dtypes(spec.model)

    def setup(self, placement: Placement) -> World:
        settings = self._settings(placement)
        world = join(placement, self.layout(placement))
        processes.start(world, settings, self.options.process_sets, self.options.transport)
        return world

    def prepare(self, spec: EngineSpec, world: World) -> StepEngine:
        from unipar_horovod.engine import make_engine

        module = seeded_model(spec).to(world.device)
        undo = [checkpoint_activations(module, spec.activation_checkpointing)]
        undo.append(offload_activations(module, spec.activation_offload, world.device))
        undo.append(compile_modules([module], spec.compile))
        return make_engine(spec, world, module, undo, self.options)

    def teardown(self) -> None:
        processes.stop()

    def _settings(self, placement: Placement) -> dict[str, str]:
        """Horovod's configuration, which is its environment.

        Raises:
            ConfigError: a variable is set in two places.
        """
        options = self.options
        settings = {}
        if "fusion_threshold_mb" in options.model_fields_set:
            settings["HOROVOD_FUSION_THRESHOLD"] = str(options.fusion_bytes)
        if options.cycle_time_ms is not None:
            settings["HOROVOD_CYCLE_TIME"] = f"{options.cycle_time_ms:g}"
        if options.autotune:
            settings["HOROVOD_AUTOTUNE"] = "1"
        if options.timeline is not None:
            _check_writable(options.timeline)
            settings["HOROVOD_TIMELINE"] = str(options.timeline)
        for variable, option in _OWNED.items():
            value, given = settings.get(variable), os.environ.get(variable)
            if given not in (None, value):
                makes = f"makes {variable}={value}" if value else "is not set"
                raise ConfigError(
                    f"horovod: the environment has {variable}={given}, and the option '{option}', "
                    f"which is the place for it, {makes}. Unset the variable, and set the option."
                )
        for variable in options.native:
            if variable in _OWNED:
                raise ConfigError(
                    f"horovod: native sets {variable}, which is the option "
                    f"'{_OWNED[variable]}'. Set that one."
                )
            if variable.startswith(_PLACED):
                raise ConfigError(
                    f"horovod: native sets {variable}, which follows from the run and its other "
                    "options. Leave it out."
                )
            if not variable.startswith("HOROVOD_"):
                raise ConfigError(
                    f"horovod: native sets {variable}; it takes Horovod's own variables, whose "
                    "names begin with HOROVOD_."
                )
        # A rank that waits for one that does not come gives up when any other collective would;
        # Horovod takes no time that is less than the one after which it warns.
        patience = max(1, round(placement.timeout))
        fixed = {
            # Only what is one group is fused, so that sums do not depend on when it was ready.
            "HOROVOD_DISABLE_GROUP_FUSION": "1",
            # It looks for stalls as often as it may warn of them, and gives up only when it looks.
            # Horovod 0.28.1 counts a cached tensor from the first look that finds it stalled
            # (horovod/common/stall_inspector.cc): with few looks that takes several timeouts.
            "HOROVOD_STALL_CHECK_TIME_SECONDS": str(min(60, max(1, patience // 10))),
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(patience),
        }
        return {**settings, **fixed, **options.native}


def _check_mpi(placement: Placement) -> None:
    if not installed.has_mpi():
        raise ConfigError(
            "horovod: transport='mpi' was asked for, and the installed Horovod is built without "
            "MPI. Build it in: HOROVOD_WITH_MPI=1 unipar install horovod --force"
        )
    if placement.size > 1 and not {"OMPI_COMM_WORLD_RANK", "PMI_RANK"} & os.environ.keys():
        raise ConfigError(
            "horovod: transport='mpi' was asked for, and these processes were not started by "
            f"mpirun. Start them by it: mpirun -np {placement.size} python …; or leave it out."
        )


def _check_writable(path: Path) -> None:
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(
            f"horovod: timeline={path} cannot be written: "
            f"{path.parent} is no directory that this user may write to."
        )
