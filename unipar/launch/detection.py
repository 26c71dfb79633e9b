"""Detection of the launcher that started this process, if one did."""

from __future__ import annotations

import os
from collections.abc import Mapping

from unipar.launch.environment import Environment
from unipar.launch.horovodrun import Horovodrun
from unipar.launch.mpi import OpenMpi, Pmi
from unipar.launch.slurm import Slurm
from unipar.launch.torchrun import Torchrun
from unipar.world import Placement

# The innermost first: torchrun runs inside srun, mpirun inside an allocation of Slurm, and srun
# itself sets PMI's variables.
ENVIRONMENTS: tuple[type[Environment], ...] = (Torchrun, Horovodrun, OpenMpi, Slurm, Pmi)


def detect(variables: Mapping[str, str] | None = None) -> Placement | None:
    """Where this process stands in a world that torchrun, horovodrun, srun or mpirun has started.

    Its ``timeout`` and ``device_type`` are the defaults, for no launcher knows them.

    Args:
        variables: the environment to look in, the process's own by default.

    Returns:
        The placement, or ``None`` for a process that no launcher has started.

    Raises:
        ConfigError: a launcher's variables are incomplete or contradict each other.
    """
    for environment in ENVIRONMENTS:
        found = environment(variables)
        if found.detect():
            return found.placement()
    return None


def launcher_name() -> str | None:
    """The command of the launcher that has started this process, or ``None``."""
    return next((one.name for one in ENVIRONMENTS if one().detect()), None)


def launcher_variables(variables: Mapping[str, str] | None = None) -> frozenset[str]:
    """The names of variables by which a process is found to be one of a launcher's.

    Args:
        variables: the environment to look in, the process's own by default.
    """
    prefixes = tuple(prefix for environment in ENVIRONMENTS for prefix in environment.prefixes)
    variables = os.environ if variables is None else variables
    return frozenset(name for name in variables if name.startswith(prefixes))
