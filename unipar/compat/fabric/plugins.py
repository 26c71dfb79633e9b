"""Fabric's plugins: precisions are the run's, and launchers are found by themselves."""

from __future__ import annotations

from typing import Any

from unipar.compat.fabric_names import PLUGINS, refuse


class Precision:
    """Full precision.

    Attributes:
        precision: what ``Fabric(precision=…)`` takes.
    """

    precision = "32-true"


class MixedPrecision(Precision):
    """``bf16-mixed`` or ``16-mixed``; losses are scaled as torch's scaler does it by default."""

    def __init__(self, precision: str, device: str = "cpu", scaler: Any = None) -> None:
        if scaler is not None:
            refuse("Fabric(plugins=…)")
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


def precision_among(given: Any) -> str | None:
    """The precision that plugins ask for, if they do.

    Args:
        given: a plugin, or several.

    Raises:
        ConfigError: one is of the script's own, or there are several precisions.
    """
    plugins = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    found = [one for one in plugins if isinstance(one, Precision)]
    if len(found) > 1 or not all(type(one).__module__ == __name__ for one in plugins):
        refuse("Fabric(plugins=…)")
    return found[0].precision if found else None


__getattr__ = PLUGINS.refusing(__name__)
