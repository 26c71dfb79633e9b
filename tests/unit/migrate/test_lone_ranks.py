"""Where one rank computes alone: told, since a divided model needs all ranks."""

from __future__ import annotations

import pytest
from telling import told

from unipar.migrate import migrate_source

SCRIPT = """\
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank = dist.get_rank()
class Trainer:
    def __init__(self, model):
        self.model = model
    def validate(self, loader):
        return sum(self.model(x).sum() for x in loader)
def evaluate(model, loader):
    return total(model, loader) / len(loader)
def total(model, loader):
    return sum((model(x) - y).square().mean().item() for x, y in loader)
def log(value):
    print(value)
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in data:
    opt.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    opt.step()
    {place}
"""


@pytest.mark.parametrize(
    "place",
    [
        "if rank == 0: evaluate(model, held_out)",
        "if dist.get_rank() == 0: print(model.module(x))",
        "if rank == 0: Trainer(model).validate(held_out)",
        "if rank > 0: log(loss)\n    else: evaluate(model.module, held_out)",
    ],
)
def test_a_model_that_one_rank_computes_is_told(place: str) -> None:
    migration = migrate_source(SCRIPT.replace("{place}", place))
    assert not migration.refused
    assert "Strategies that divide the model's weights (fsdp, zero3)" in told(migration, "changed")


@pytest.mark.parametrize(
    "place",
    [
        "value = evaluate(model, held_out)\n    if rank == 0: log(value)",
        "if rank == 0: torch.save(model.module.state_dict(), 'model.pt')",
        "if len(x) == 8: evaluate(model, held_out)",
    ],
)
def test_what_all_ranks_compute_is_not(place: str) -> None:
    migration = migrate_source(SCRIPT.replace("{place}", place))
    assert not migration.refused
    assert "only some ranks compute" not in str(migration.notes)


FABRIC = """\
from lightning.fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=2)
fabric.launch()
model, opt = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
for x, y in data:
    opt.zero_grad()
    fabric.backward((model(x) - y).square().mean())
    opt.step()
if fabric.is_global_zero:
    evaluate(model, data)
"""
HOROVOD = """\
import horovod.torch as hvd
hvd.init()
opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for x, y in data:
    opt.zero_grad()
    (model(x) - y).square().mean().backward()
    opt.step()
if hvd.rank() == 0:
    evaluate(model, data)
"""
DEEPSPEED = """\
import deepspeed
config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
for x, y in data:
    model.backward((model(x) - y).square().mean())
    model.step()
if model.global_rank == 0:
    evaluate(model, data)
"""
ABOVE = """\
import torch
def evaluate(model, loader):
    return sum((model(x) - y).square().mean().item() for x, y in loader)
model = torch.nn.Linear(4, 1)
"""


@pytest.mark.parametrize("source", [FABRIC, HOROVOD, DEEPSPEED])
def test_it_is_told_whatever_the_script_is_written_for(source: str) -> None:
    migration = migrate_source(ABOVE + source)
    assert not migration.refused
    assert "evaluate(model, data): only some ranks compute this" in told(migration, "changed")
