"""What all ranks do together is noted where only some may come to it, and is never refused."""

from __future__ import annotations

import pytest

from unipar.migrate import migrate_source

FABRIC = """\
import os, time
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

fabric = Fabric(devices=2)
fabric.launch()
start = time.time()
loader = fabric.setup_dataloaders(DataLoader(list(range(9)), batch_size=2))
model = torch.nn.Linear(1, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
state = {{"model": model, "epoch": 0, "rng": torch.get_rng_state()}}
first = fabric.global_rank == 0
device = torch.device("cuda", fabric.local_rank)
number = int(sorted(os.listdir("."))[-1].split("-")[1])


def validate(model, loader):
    losses, count = [], 0
    for x in loader:
        losses.append(model(x).item())
        count += 1
    return sum(losses) / len(losses), count


loss, count = validate(model, loader)
for step, x in enumerate(loader):
    fabric.backward(model(x).sum())
    optimizer.step()
    optimizer.zero_grad()
    torch.set_rng_state(torch.randperm(x))
    number += 1
{saving}
    state["epoch"] += 1
"""
SAVE = 'fabric.save("last.ckpt", state)'
ACCELERATE = """\
import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(1, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(1)).sum())
{code}
"""
RANK = "decides which come to it. On several ranks they would wait for the others in vain."
PART = "a state dict of one rank has only a part, and is refused."
STATE = "divides the optimizer's state (zero1, zero2, zero3, fsdp), a state dict of one rank"
WEIGHTS = "decides which ranks come to it. Strategies that divide the model's weights"


def noted(script: str) -> str:
    migration = migrate_source(script, file="train.py")
    assert migration.changed
    return "\n".join(map(str, migration.notes))


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("fabric.is_global_zero", RANK),
        ("first", RANK),
        ("step % 2 == 0 and (fabric.global_rank == 0 or len(state) > 9)", RANK),
        ("x.sum() > 3", "may differ between them: each rank has a share of the data."),
        ("loss < 1", "each rank has a share of the data."),
        ("time.time() - start > 60", "ranks read their clocks at different times."),
        ('not os.path.exists("last.ckpt")', "one rank may look for a file before"),
        ("fabric.world_size > 1", ""),
        ("fabric.all_reduce(x.sum()) > 3", ""),
        ("fabric.broadcast(first)", ""),
        ("device.type == 'cuda'", ""),
        ("count > 1", ""),
        ("step % 2 == 0", ""),
        ("number % 2 == 0", ""),
        ('state["epoch"] < 4', ""),
    ],
)
@pytest.mark.parametrize(
    "saving",
    ["    if {test}:\n        {save}", "    if {test}:\n        continue\n    {save}",
     "    {test} and {save}"],
)  # fmt: skip
def test_a_save_is_noted_where_a_test_may_differ_between_ranks(
    test: str, said: str, saving: str
) -> None:
    test = f"({test})" if " and {" in saving else test
    notes = noted(FABRIC.format(saving=saving.format(test=test, save=SAVE)))
    assert notes.startswith("train.py:") is bool(said)
    assert said in notes
    assert notes.count("all ranks save together") == bool(said)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("if accelerator.is_main_process:\n    accelerator.save_state('out')", RANK),
        ("if accelerator.process_index == 0:\n    accelerator.save_model(model, 'out')", RANK),
        ("def save():\n    accelerator.save_state('out')\nif accelerator.is_main_process:\n"
         "    save()", RANK),
        ("@accelerator.on_main_process\ndef save():\n    accelerator.save_state('out')\nsave()",
         RANK),
        ("import hydra\n@hydra.main()\ndef save(_):\n    accelerator.save_state('out')\nsave()",
         ""),
        ("if accelerator.is_main_process:\n    accelerator.get_state_dict(model)", WEIGHTS),
        ("def save():\n    if not accelerator.is_main_process:\n        return\n"
         "    accelerator.get_state_dict(model)\nsave()", WEIGHTS),
        ("if accelerator.is_main_process:\n    model(torch.ones(1))", WEIGHTS),
        ("if accelerator.is_main_process:\n"
         "    torch.save(accelerator.unwrap_model(model).state_dict(), 'out')", PART),
        ("if accelerator.is_main_process:\n    torch.save(optimizer.state_dict(), 'out')",
         STATE),
        ("state = accelerator.get_state_dict(model)\nif accelerator.is_main_process:\n"
         "    torch.save(state, 'out')", ""),
    ],
)  # fmt: skip
def test_a_place_that_only_some_ranks_come_to_is_noted(code: str, said: str) -> None:
    notes = noted(ACCELERATE.format(code=code))
    assert said in notes
    assert notes.count("\n") == 0
    assert bool(notes) is bool(said)


DDP = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
master_process = dist.get_rank() == 0
model = DDP(torch.nn.Linear(1, 1))
"""
HOROVOD = """\
import horovod.torch as hvd
import torch

hvd.init()
master_process = hvd.rank() == 0
model = torch.nn.Linear(1, 1)
"""


@pytest.mark.parametrize("start", [DDP, HOROVOD])
def test_a_model_of_ddp_or_horovod_that_one_rank_evaluates_is_noted(start: str) -> None:
    optimizer = "torch.optim.SGD(model.parameters(), lr=0.1)"
    if "hvd" in start:
        optimizer = f"hvd.DistributedOptimizer({optimizer})"
    script = f"""{start}optimizer = {optimizer}


def estimate_loss():
    return model(torch.ones(1)).item()


for step in range(9):
    if step % 3 == 0 and master_process:
        print(estimate_loss())
    model(torch.ones(1)).sum().backward()
    optimizer.step()
"""
    assert WEIGHTS in noted(script)
    assert not noted(script.replace(" and master_process", ""))


@pytest.mark.parametrize("of", ["model", "model.module"])
def test_a_state_dict_of_ddp_that_one_rank_saves_is_noted(of: str) -> None:
    script = f"""{DDP}optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1)).sum().backward()
optimizer.step()
if master_process:
    torch.save({{"model": {of}.state_dict(), "step": 1}}, "last.pt")
"""
    assert PART in noted(script)
    assert f"Call unipar.compat.torch.whole_state_dict({of}) on all ranks" in noted(script)
    assert not noted(script.replace("if master_process:", "if True:"))
    both = script.replace('"step": 1', '"optimizer": optimizer.state_dict()')
    assert STATE in noted(both)
    assert "Call unipar.compat.torch.whole_state_dict(optimizer) on all ranks" in noted(both)


IMPORTED = """\
{start}
from model import GPT

model = GPT()
optimizer = model.configure_optimizers(0.1)
{trained}


def estimate_loss():
    return model(torch.ones(1)).item()


model(torch.ones(1)).sum().backward()
optimizer.step()
if master_process:
    print(estimate_loss())
    torch.save((model.state_dict(), optimizer.state_dict()), "last.pt")
"""


@pytest.mark.parametrize(
    ("start", "trained"),
    [
        (DDP, "model = DDP(model)"),
        (DDP, "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"),
        (HOROVOD, "optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())"),
    ],
)
def test_a_model_whose_optimizer_another_file_builds_is_noted(start: str, trained: str) -> None:
    lines = start.splitlines()[:-1]
    notes = noted(IMPORTED.format(start="\n".join(lines), trained=trained))
    assert WEIGHTS in notes
    assert PART in notes
    assert STATE in notes


def test_a_state_dict_of_fsdp_that_one_rank_saves_would_wait() -> None:
    script = """\
import torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

dist.init_process_group("gloo")
model = FSDP(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1)).sum().backward()
optimizer.step()
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "last.pt")
"""
    assert WEIGHTS in noted(script)
