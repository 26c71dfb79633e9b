"""Processes started by an MPI's ``mpirun``: Open MPI, or one that speaks PMI (MPICH, Intel)."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from unipar.errors import ConfigError
from unipar.launch.environment import Environment
from unipar.world import Placement


class Mpi(Environment):
    """The common part of all MPI launchers: they say who is who, but not where to meet."""

    name = "mpirun"
    rank_names: tuple[str, ...]
    size_names: tuple[str, ...]
    local_rank_names: tuple[str, ...]
    local_size_names: tuple[str, ...]

    def detect(self) -> bool:
        # One process has nobody to join, and may start workers of its own.
        alone = any(self.variables.get(name) == "1" for name in self.size_names)
        return not alone and any(name in self.variables for name in self.rank_names)

    def placement(self) -> Placement:
        rank, size = self.number(*self.rank_names), self.number(*self.size_names)
        self.below(rank, self.rank_names[0], size, self.size_names[0])
        local_rank = self.number(*self.local_rank_names)
        local_size = self.number(*self.local_size_names)
        self.below(local_rank, self.local_rank_names[0], local_size, self.local_size_names[0])
        return Placement(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            node_rank=rank // local_size,
            num_nodes=-(-size // local_size),
            init_method=self.address() or self._file(size, local_size),
        )

    def job(self) -> Path | None:
        """A path that is this job's alone, known to all its processes on this node."""
        return None

    def _file(self, size: int, local_size: int) -> str:
        job = self.job() if size == local_size else None
        if job is None:
            where = "on several nodes" if size != local_size else "of this kind"
            raise ConfigError(
                f"{self.name} started {size} processes {where}, and does not tell them where to "
                "meet. Set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, "
                "for all of them: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 … (Open MPI), or "
                "mpirun -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 … (MPICH, Intel MPI)."
            )
        return f"file://{job}"


class OpenMpi(Mpi):
    prefixes = ("OMPI_COMM_WORLD_",)
    rank_names = ("OMPI_COMM_WORLD_RANK",)
    size_names = ("OMPI_COMM_WORLD_SIZE",)
    local_rank_names = ("OMPI_COMM_WORLD_LOCAL_RANK",)
    local_size_names = ("OMPI_COMM_WORLD_LOCAL_SIZE",)

    def job(self) -> Path | None:
        name = self.variables.get("PMIX_NAMESPACE") or self.variables.get("OMPI_MCA_ess_base_jobid")
        if name is None:
            return None
        # mpirun's own directory goes with the job, so a crashed one leaves no file to be met.
        session = self.variables.get("PMIX_SERVER_TMPDIR", "")
        parent = session if os.path.isdir(session) else tempfile.gettempdir()
        return Path(parent, f"unipar-{os.getuid()}-{name.replace(os.sep, '_')}")


class Pmi(Mpi):
    prefixes = ("PMI_", "MPI_LOCAL")
    rank_names = ("PMI_RANK",)
    size_names = ("PMI_SIZE",)
    local_rank_names = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK")
    local_size_names = ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
