"""A step behind a face reads no more of the device than the strategy's own step does."""

from __future__ import annotations

import os
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from unipar.compat import adopting
from unipar.compat.run import current
from unipar.migrate import migrate_source
from unipar.testing.host_reads import counting_host_reads
from unipar.testing.pool import WorldPools
from unipar.world import Placement

SCRIPTS = sorted((Path(__file__).parents[2] / "measure" / "scripts").glob("using_*.py"))


class Job:
    """What the scripts train; reads of one step are counted after a few others."""

    batch_size = 4

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.data = TensorDataset(torch.randn(96, 8), torch.randint(0, 2, (96,)))
        self.found: Counter[str] = Counter()

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

    loss = staticmethod(nn.functional.cross_entropy)

    def turns(self, loader: Any) -> Iterator[Any]:
        batches = iter(loader)
        # Passes 1, 2, 4 and 8 are those in which changed weights are looked for.
        for _ in range(8):
            yield next(batches)
        batch = next(batches)
        with counting_host_reads() as found:
            yield batch
            self.found.update(found)


def _reads(placement: Placement, code: str, strategy: str, directory: str) -> dict[str, int]:
    told = {
        "RANK": placement.rank, "LOCAL_RANK": placement.local_rank, "WORLD_SIZE": placement.size,
        "LOCAL_WORLD_SIZE": placement.size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1,
        "UNIPAR_STRATEGY": strategy,
    }  # fmt: skip
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in told.items()})
    current.stand(placement, Path(directory, "unipar.yaml"))
    module = types.ModuleType("migrated_script")
    sys.modules[module.__name__] = module
    if "unipar.compat.torch" in code:
        # As its first import in a process does.
        adopting.start()
    try:
        exec(code, module.__dict__)
        job = Job(placement.size)
        module.train(job)
        # AdamW's own, of how often it has stepped, which it keeps on the host.
        job.found.pop("precision.step", None)
        return dict(job.found)
    finally:
        adopting.stop()
        os.environ.clear()
        os.environ.update(before)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda one: one.stem)
def test_a_step_reads_what_the_strategys_own_does(
    world_pool: WorldPools, tmp_path: Path, script: Path, strategy: str
) -> None:
    """Its loss, whose copy began before the backward pass; and the norm where it clips."""
    code = migrate_source(script.read_text()).code
    found = world_pool(2).run(_reads, code, strategy, str(tmp_path))
    # DeepSpeed clips unless it is told not to: an optimizer that takes no flag waits for the norm.
    clipping = {"stepper.step": 1} if "deepspeed" in script.stem else {}
    assert found == [{"processes.wait": 1, **clipping}] * 2
