"""Fabric's plugins: precisions are the run's, and launchers are found by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from unipar.compat.fabric_names import PLUGINS, refuse
from unipar.compat.runconfig import asked_scale


class Precision:
    """Full precision.

    Attributes:
        precision: what ``Fabric(precision=…)`` takes.
        scale: the run's ``loss_scale``, if it says one.
    """

    precision = "32-true"
    scale: Mapping[str, Any] = {}


class MixedPrecision(Precision):
    """``bf16-mixed`` or ``16-mixed``; losses are scaled as the scaler says, if there is one."""

    def __init__(self, precision: str, device: str = "cpu", scaler: Any = None) -> None:
        if scaler is not None:
            if precision != "16-mixed" or not _is_torchs(scaler):
                refuse("MixedPrecision(scaler=…)")
            # Of a face's own `get_scale` is not what it scales by.
            self.scale = asked_scale(
                initial=torch.amp.GradScaler.get_scale(scaler),
                growth_factor=scaler.get_growth_factor(),
                backoff_factor=scaler.get_backoff_factor(),
                growth_interval=scaler.get_growth_interval(),
            )
        self.precision = precision


class HalfPrecision(Precision):
    """Weights and all computation in 16 bits."""

    def __init__(self, precision: str = "16-true") -> None:
        self.precision = precision


class DoublePrecision(Precision):
    """Weights and all computation in 64 bits."""

    precision = "64-true"


class FSDPPrecision(MixedPrecision):
    """The precision of ``FSDPStrategy``."""

    def __init__(self, precision: str, scaler: Any = None) -> None:
        super().__init__(precision, scaler=scaler)


class DeepSpeedPrecision(MixedPrecision):
    """The precision of ``DeepSpeedStrategy``."""

    def __init__(self, precision: str) -> None:
        super().__init__(precision)


class ClusterEnvironment:
    """What has started the processes. It is found by itself, whatever this says."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class LightningEnvironment(ClusterEnvironment):
    """Processes that the script starts."""


class TorchElasticEnvironment(ClusterEnvironment):
    """Processes of ``torchrun``."""


class SLURMEnvironment(ClusterEnvironment):
    """Processes of ``srun``."""


class MPIEnvironment(ClusterEnvironment):
    """Processes of ``mpirun``."""


class LSFEnvironment(ClusterEnvironment):
    """Processes of ``jsrun``."""


class KubeflowEnvironment(ClusterEnvironment):
    """Processes of a job of Kubeflow's."""


def _is_torchs(scaler: Any) -> bool:
    """Whether it scales, and changes its scale by PyTorch's rule."""
    if not isinstance(scaler, torch.amp.GradScaler) or not scaler.is_enabled():
        return False
    return type(scaler).__module__.startswith(("torch.", "unipar."))


def precision_among(given: Any) -> Precision | None:
    """The plugin among several that is for the precision, if there is one.

    Args:
        given: a plugin, or several.

    Raises:
        ConfigError: one is of the script's own, or there are several precisions.
    """
    plugins = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    found = [one for one in plugins if isinstance(one, Precision)]
    if len(found) > 1 or not all(type(one).__module__ == __name__ for one in plugins):
        refuse("Fabric(plugins=…)")
    return found[0] if found else None


__getattr__ = PLUGINS.refusing(__name__)
