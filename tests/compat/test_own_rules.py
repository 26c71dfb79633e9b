"""Rules of PyTorch's and Horovod's that a script may rest on, each held against the framework."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from unipar.migrate import migrate_files
from unipar.migrate.launchers import command

TORCHRUN, HOROVODRUN = command("torchrun", 2), command("horovodrun", 2)
pytestmark = [
    pytest.mark.usefixtures("forked_programs"), pytest.mark.slow, pytest.mark.timeout(300),
]  # fmt: skip

SEEDS = """\
import random
import sys

import numpy as np
import torch
import torch.distributed as dist

random.seed(0)
np.random.seed(0)
dist.init_process_group("gloo")
drawn = np.random.permutation(10).tolist(), random.random()
sys.stdout.write(f"rank {dist.get_rank()} draws {drawn}\\n")
"""

BUFFERS = """\
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()


def say(*said):
    sys.stdout.write(f"rank {rank} {said}\\n")


class Center(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.full((1,), float(rank)))

    def forward(self, x):
        self.mean.lerp_(x.mean().detach(), 0.5)
        return self.scale * (x - self.mean)


net = DDP(Center(), forward_sync_buffers=False)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
say(list(get_model_state_dict(net)))
for step in range(3):
    loss = net(torch.tensor([1.0, 2.0]) + 10 * rank + step).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    say(f"{loss.item():.4f} {net.module.mean.item():.4f} {net.module.scale.item():.4f}")
stored = get_model_state_dict(net)
say(list(stored))
fresh = DDP(Center(), forward_sync_buffers=False)
set_model_state_dict(fresh, stored)
say(f"{fresh.module.scale.item():.4f}")
"""

SCALED = """\
import sys

import torch
from torch import nn


class Scaled(torch.optim.SGD):
    factor, steps = 1.0, 0

    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            for one in group["params"]:
                one.data.add_(one.grad, alpha=-group["lr"] * self.factor)


torch.manual_seed(0)
model = nn.Linear(3, 1)
optimizer = Scaled(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.factor = 0.5 ** step
    loss = model(torch.ones(4, 3)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    sys.stdout.write(f"rank 0 {loss.item():.4f} {optimizer.steps}\\n")
"""

HALF = """\
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in (net[0], net[2]):
    fully_shard(layer, mp_policy=policy)
fully_shard(net, mp_policy=policy)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
data = torch.randn(2, 8, 4)[dist.get_rank()]
for step in range(4):
    output = net(data)
    loss = (output.float() - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    sys.stdout.write(f"rank {dist.get_rank()} {step} {output.dtype} {loss.item():.3f}\\n")
"""

APART = """\
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
ddp = DDP(net, None, None, bucket_cap_mb=None)
optimizer = torch.optim.Adam(net[2].parameters(), lr=0.1)
data = torch.randn(5, 2, 3, 4)[:, rank]
data[4] += float("inf") * rank
for x in data:
    ddp(x).square().mean().backward()
    try:
        norm = nn.utils.clip_grad_norm_(ddp.parameters(), 0.05, error_if_nonfinite=True)
    except RuntimeError as error:
        sys.stdout.write(f"rank {rank} {str(error)[:40]}\\n")
        optimizer.zero_grad()
        continue
    optimizer.step()
    optimizer.zero_grad()
    first = net[0].weight.grad.sum()
    sys.stdout.write(f"rank {rank} {norm:.4f} {first:.4f} {net[2].weight.sum():.4f}\\n")
"""

UNSHARDED = """\
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
net = FSDP(
    net, sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu"),
    use_orig_params=True,
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for x in torch.randn(3, 2, 3, 4)[:, rank] + rank:
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
net.eval()
with torch.no_grad():
    sys.stdout.write(f"rank {rank} {loss:.4f} {net(torch.ones(2, 4)).sum():.4f}\\n")
config = FullStateDictConfig(rank0_only=True)
with FSDP.state_dict_type(net, StateDictType.FULL_STATE_DICT, config):
    sys.stdout.write(f"rank {rank} {len(FSDP.optim_state_dict(net, optimizer)['state'])}\\n")
"""

UNUSED = """\
import sys

import horovod.torch as hvd
import torch
from torch import nn

hvd.init()
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x, first):
        return (self.first if first else self.second)(x)


net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
for first in (True, False, True, True):
    optimizer.zero_grad()
    net(torch.ones(2, 4) + hvd.rank(), first).mean().backward()
    optimizer.step()
if hvd.rank() == 0:
    for state in optimizer.state.values():
        state["exp_avg"].mul_(3)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for first in (True, False):
    optimizer.zero_grad()
    net(torch.ones(2, 4), first).mean().backward()
    optimizer.step()
found = [f"{one.sum().item():.4f}" for one in net.parameters()]
sampler = hvd.elastic.ElasticSampler(range(9), seed=3)
found.append(list(sampler))
sampler.record_batch(0, 2)
rest = hvd.elastic.ElasticSampler(range(9), seed=3)
if hvd.rank() == 0:
    rest.load_state_dict(sampler.state_dict())
state = hvd.elastic.TorchState(net, optimizer, sampler=rest, plan=[hvd.rank()])
state.sync()
found += [list(rest), len(rest), state.plan]
sys.stdout.write(f"rank {hvd.rank()} {found}\\n")
"""


FROZEN = """\
import sys

import horovod.torch as hvd
import torch
from torch import nn

hvd.init()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
for step in range(4):
    net[0].requires_grad_(step < 2)
    optimizer.zero_grad()
    loss = net(torch.ones(2, 4) + hvd.rank()).mean()
    loss.backward()
    optimizer.step()
    sys.stdout.write(f"rank {hvd.rank()} {step} {loss.item():.4f}\\n")
"""


def said(start: list[str], script: str, at: Path, strategy: str) -> list[str]:
    name = "face.py" if strategy else "own.py"
    code = migrate_files({"own.py": script})["own.py"].code if strategy else script
    (at / name).write_text(code)
    done = subprocess.run(
        [*start, name], cwd=at, timeout=240, capture_output=True, text=True, check=False,
        env={**os.environ, "UNIPAR_STRATEGY": strategy, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(re.findall(r"rank \d .*", done.stdout))


@pytest.mark.parametrize(
    ("script", "strategy"),
    [
        (SEEDS, "ddp"), (BUFFERS, "ddp"), (HALF, "fsdp"),
        pytest.param(HALF, "ddp", marks=pytest.mark.thorough), (APART, "ddp"), (UNSHARDED, "ddp"),
        pytest.param(UNUSED, "ddp", marks=pytest.mark.thorough), (FROZEN, "ddp"),
        pytest.param(FROZEN, "fsdp", marks=pytest.mark.thorough),
        pytest.param(UNUSED, "horovod", marks=pytest.mark.thorough),
    ],
    ids=["seeds", "buffers", "half", "half_ddp", "apart", "unsharded", "unused", "frozen",
         "frozen_fsdp", "unused_horovod"],
)  # fmt: skip
def test_a_script_finds_what_it_finds_under_its_framework(
    script: str, strategy: str, tmp_path: Path
) -> None:
    if script in (UNUSED, FROZEN):
        pytest.importorskip("horovod")
    own = said(HOROVODRUN if script in (UNUSED, FROZEN) else TORCHRUN, script, tmp_path, "")
    found = said(TORCHRUN, script, tmp_path, strategy)
    assert len(own) >= 2
    if script is HALF:
        # Of the losses the last digit may be rounded otherwise.
        assert [one.split()[:4] for one in found] == [one.split()[:4] for one in own]
        losses = [[float(one.split()[-1]) for one in lines] for lines in (found, own)]
        assert losses[0] == pytest.approx(losses[1], abs=0.01)
    else:
        assert found == own


def test_attributes_of_an_optimizer_are_the_scripts_and_the_engines(tmp_path: Path) -> None:
    alone = said([sys.executable], SCALED, tmp_path, "")
    assert said([sys.executable], SCALED, tmp_path, "single") == alone
    assert said(TORCHRUN, SCALED, tmp_path, "ddp") == sorted(alone * 2)
