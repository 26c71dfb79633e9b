"""One seed for the processes of a run whose script has none: they are to draw alike."""

from __future__ import annotations

import hashlib
import os
import random

import numpy as np
import torch

from unipar.engine.trials import host_generators, set_host_generators
from unipar.world import Placement

_TELL_RUNS_APART = (
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT",
    "SLURM_JOB_ID", "SLURM_STEP_ID", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE",
)  # fmt: skip


class CommonSeed:
    """Seeds the process as all others of its run, until the script does, or has ranks of its own.

    They have not met yet, so the seed is made of what their launcher has told them all. What a
    script draws of it before it seeds is drawn alike, as the split of a dataset.

    Args:
        placement: where this process stands.
    """

    def __init__(self, placement: Placement) -> None:
        self._own = torch.get_rng_state(), host_generators()
        words = [os.environ.get(name, "") for name in _TELL_RUNS_APART]
        if placement.local_size == placement.size:
            words.append(str(os.getppid()))
        digest = hashlib.sha256("\0".join(words).encode()).digest()
        self._seed = int.from_bytes(digest[:4], "little")
        random.seed(self._seed)
        np.random.seed(self._seed)
        torch.manual_seed(self._seed)

    def give_back(self) -> None:
        """Let each process draw others again, as it would have, unless the script has seeded."""
        if torch.initial_seed() == self._seed:
            torch.set_rng_state(self._own[0])
            set_host_generators(self._own[1])
