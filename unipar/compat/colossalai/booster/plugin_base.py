"""What plugins have in common: settings that become a strategy's options, and loaders."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar

import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from unipar.compat.colossalai.initialize import chosen_strategy
from unipar.compat.colossalai.utils import set_seed
from unipar.compat.colossalai_names import PLUGIN, refuse
from unipar.compat.run import current
from unipar.compat.runconfig import asked_scale
from unipar.errors import ConfigError
from unipar.strategy.registry import resolve

log = logging.getLogger("unipar")

_SCALING = {"min_scale": (1, 0, None), "max_scale": (2**32, 0, None), "hysteresis": (2, 1, 0)}
"""What of a loss scale is not kept: Colossal-AI's default, and what is done here."""


class Plugin:
    """A plugin, under the names of the real one's arguments.

    How it divides a model counts where nothing else says so: ``unipar.yaml``, ``UNIPAR_STRATEGY``
    and ``launch_from_torch(strategy=...)`` win over it.

    Attributes:
        REFUSED: arguments that have to stay at their defaults, and what to do instead.
        shares_buffers: whether every forward pass begins with rank 0's buffers, whatever strategy
            runs; else each rank has its own.
        has_copies: whether the real one's optimizer updates copies, of what is trained when a
            model is boosted, and of nothing else.
        measures_norm: whether every step computes the norm of its gradient, clipped or not.
        zeros_unused: whether what a step does not use has a gradient of zero, and not none.
        DIVIDING: arguments that say how the model is divided, and have no counterpart in a
            strategy: they have to stay at their defaults where the plugin chooses the strategy.
    """

    REFUSED: ClassVar[Mapping[str, str]] = {}
    DIVIDING: ClassVar[Mapping[str, str]] = {}

    _asked: dict[str, Any]
    precision: Any = None
    max_norm: float = 0.0
    accumulates: ClassVar[bool] = True
    clips_by_itself: ClassVar[bool] = False
    syncs_batchnorm: ClassVar[bool] = False
    shares_buffers: ClassVar[bool] = False
    has_copies: ClassVar[bool] = False
    measures_norm: ClassVar[bool] = False
    zeros_unused: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._hold(self.REFUSED)
        if self.precision not in (None, "fp32", "fp16", "bf16"):
            raise ConfigError(
                f"{self._name}(precision={self.precision!r}) is unknown. Choose of fp32, fp16 and "
                "bf16."
            )
        self._asked = self._settings()

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _hold(self, unchanged: Mapping[str, str]) -> None:
        defaults = {one.name: one.default for one in fields(self)}  # pyright: ignore[reportArgumentType]
        for name, remedy in unchanged.items():
            value = getattr(self, name)
            if value != defaults[name]:
                raise ConfigError(
                    f"{self._name}({name}={value!r}) has no counterpart here. {remedy}"
                )

    # -- the strategy ----------------------------------------------------------------------------

    def asked(self) -> dict[str, Any]:
        """What is asked of the run, where nothing else decides."""
        return self._asked

    def _settings(self) -> dict[str, Any]:
        found: dict[str, Any] = {} if self.precision is None else {"precision": self.precision}
        if self.precision == "fp16":
            found |= self._loss_scale()
        if current.decides("strategy"):
            return found
        strategy = chosen_strategy()
        if strategy is None:
            self._hold(self.DIVIDING)
            strategy = self.strategy()
        return found if strategy is None else {**found, "strategy": strategy}

    def _loss_scale(self) -> dict[str, Any]:
        """How losses are scaled, of plugins that say so."""
        if "initial_scale" not in {one.name for one in fields(self)}:  # pyright: ignore[reportArgumentType]
            return {}
        lost = [name for name, kept in _SCALING.items() if getattr(self, name) not in kept]
        if lost and current.placement().rank == 0:
            log.warning(
                "%s(%s=…) is not kept: each overflow lowers the loss scale at once, and there is "
                "no lowest or highest one.", self._name, "=…, ".join(lost),
            )  # fmt: skip
        own: Any = self
        return asked_scale(
            initial=own.initial_scale, growth_factor=own.growth_factor,
            backoff_factor=own.backoff_factor, growth_interval=own.growth_interval,
        )  # fmt: skip

    def strategy(self) -> dict[str, Any] | None:
        """The strategy that divides a model as the plugin does; ``None`` leaves it to the run.

        Raises:
            ConfigError: there is none.
        """
        raise NotImplementedError

    def replicas(self, size: int) -> int:
        """How many parts the samples of a step fall into, by the plugin."""
        return size

    def itself(self, own: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        """Colossal-AI's plugin where it can run, else what divides the same by PyTorch alone."""
        own, place = {"name": "colossalai", **own}, current.placement()
        try:
            found = resolve(own)
        except ConfigError as error:
            why = str(error)
        else:
            able, there = found.capabilities(), found.availability()
            if there.ok and place.device_type in able.device_types:
                return own
            why = there.reason or f"unipar runs Colossal-AI on no {place.device_type}."
        if place.rank == 0:
            log.info(
                "%s: %s The run takes strategy %s, which divides the model as much; unipar.yaml "
                "may say another.", self._name, why.partition("\n")[0], other,
            )  # fmt: skip
        return other

    def warn_of_replicas(self) -> None:
        """Say where a step is on other numbers of samples than the plugin would have it."""
        world = current.world()
        wanted = self.replicas(world.size)
        if world.is_main and wanted != world.data_size:
            log.warning(
                "%s lets %d of %d ranks have samples of their own, and the run's strategy lets %d: "
                "with the same batch_size a step is on %g times as many samples.",
                self._name, wanted, world.size, world.data_size, world.data_size / wanted,
            )  # fmt: skip

    # -- Colossal-AI's own -----------------------------------------------------------------------

    def prepare_dataloader(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        distributed_sampler_cls: Any = None,
        **kwargs: Any,
    ) -> DataLoader:
        """A loader of this rank's share.

        Args:
            dataset: of samples.
            batch_size: samples of a batch on this rank.
            shuffle: whether each epoch has an order of its own; ``sampler.set_epoch`` says which.
            seed: of the processes that load samples.
            drop_last: whether a last batch that is not full is left out.
            pin_memory: as ``DataLoader`` takes it.
            num_workers: likewise.
            distributed_sampler_cls: instead of ``DistributedSampler``.
            kwargs: further arguments of ``DataLoader``.
        """
        layout, rank = current.layout(self.asked()), current.placement().rank
        sampler = (distributed_sampler_cls or DistributedSampler)(
            dataset,
            num_replicas=layout.batch,
            rank=layout.coordinate("batch", rank),
            shuffle=shuffle,
        )
        return DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            worker_init_fn=functools.partial(_seed_worker, seed),
            drop_last=drop_last,
            pin_memory=pin_memory,
            num_workers=num_workers,
            **kwargs,
        )

    def support_no_sync(self) -> bool:
        """``True``: ``booster.no_sync`` is there under every strategy."""
        return True

    def support_lora(self) -> bool:
        """``False``; see :meth:`Booster.enable_lora`."""
        return False

    def control_precision(self) -> bool:
        """Whether the plugin says the precision, and not the ``Booster``."""
        return True

    def control_device(self) -> bool:
        """``True``: the run says the device."""
        return True

    def control_checkpoint_io(self) -> bool:
        """``True``: files are whole, whatever ranks divide."""
        return True

    def supported_devices(self) -> list[str]:
        """The devices of a run."""
        return ["cuda", "cpu"]

    def supported_precisions(self) -> list[str]:
        """The precisions of a run."""
        return ["fp32", "fp16", "bf16"]

    # Real plugins know ranks and sizes; scripts log them.
    @property
    def rank(self) -> int:
        """This process's rank."""
        return current.placement().rank

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return current.placement().size

    @property
    def dp_size(self) -> int:
        """How many parts the samples of a step fall into."""
        return current.layout(self.asked()).batch

    @property
    def dp_group(self) -> Any:
        """The processes with samples of their own, where all have.

        Raises:
            ConfigError: some share them.
        """
        if self.dp_size != self.world_size:
            refuse("plugin.dp_group")
        return dist.group.WORLD

    def __getattr__(self, name: str) -> Any:
        row = PLUGIN.find(name)
        if row is not None and row.fate == "refused":
            refuse(f"plugin.{name}")
        raise AttributeError(f"'{self._name}' object has no attribute '{name}'")


class DPPluginBase(Plugin):
    """Of plugins with data parallelism alone."""


class PipelinePluginBase(Plugin):
    """Of plugins that may have stages."""


def _seed_worker(seed: int, worker_id: int) -> None:
    set_seed(seed)
