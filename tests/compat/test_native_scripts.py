"""Scripts that train by PyTorch's and Horovod's calls train the same when their imports change."""

from __future__ import annotations

import functools
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from unipar.migrate import migrate_files
from unipar.migrate.launchers import command
from unipar.migrate.verify import Proof, losses_of

# A script does the same however its interpreter has begun.
pytestmark = [
    pytest.mark.usefixtures("forked_programs"), pytest.mark.slow, pytest.mark.timeout(400),
]  # fmt: skip

CORPUS = Path(__file__).parent / "corpus"
TORCHRUN = command("torchrun", 2)
HOROVODRUN = command("horovodrun", 2)
PYTHON = [sys.executable]
ALONE = ("amp_recipe", "dcgan", "mingpt", "mnist", "vae", "word_language_model")
STARTS = {
    "torch/imagenet": PYTHON, "torch/multigpu_torchrun": TORCHRUN, "torch/nanogpt": TORCHRUN,
    "horovod/elastic": HOROVODRUN, "horovod/imagenet": HOROVODRUN, "horovod/mnist": HOROVODRUN,
    "horovod/synthetic_benchmark": HOROVODRUN,
}  # fmt: skip
"""Programs of several ranks, and what starts them; one starts its ranks itself."""

BOTH = ["model.state_dict()", "optimizer.state_dict()"]
NOTED = {"horovod/imagenet": BOTH, "torch/imagenet": BOTH}
"""What migrating says of them: one rank alone takes it."""

# A class of its own with an endless sampler; ranks of a script's own, with half precision where
# variables say so. Horovod's page has a script that is always run beside Horovod.
QUICK = {("mingpt", "single"), ("torch/nanogpt", "fsdp")}


def migrated(program: str) -> dict[str, str]:
    path = CORPUS / f"{program}.py"
    found = migrate_files({path.name: path.read_text()})[path.name]
    assert [one.construct for one in found.notes] == NOTED.get(program, [])
    pairs = zip(path.read_text().splitlines(), found.code.splitlines(), strict=False)
    changed = [after for before, after in pairs if before != after and "unipar.compat" in after]
    assert changed
    return {path.name: found.code}


@functools.cache
def original(program: str, start: tuple[str, ...]) -> dict[int, list[float]]:
    path = CORPUS / f"{program}.py"
    return losses_of(path.parent, path.name, {}, list(start), name="original", timeout=180)


def under(program: str, strategy: str, start: list[str]) -> dict[int, list[float]]:
    path = CORPUS / f"{program}.py"
    # What one rank alone writes is refused where all of them have a part of it.
    environ = {"UNIPAR_STRATEGY": strategy, "SAVES": "1" if strategy == "ddp" else "0"}
    return losses_of(path.parent, path.name, migrated(program), start, timeout=180, environ=environ)


def cases(*pairs: tuple[str, str]) -> list[object]:
    return [pytest.param(*one, marks=() if one in QUICK else pytest.mark.thorough) for one in pairs]


@pytest.mark.parametrize(("name", "strategy"), cases(*((name, "single") for name in ALONE)))
def test_one_process_trains_as_before(name: str, strategy: str) -> None:
    program = f"torch/{name}"
    proof = Proof(original(program, tuple(PYTHON)), under(program, strategy, PYTHON))
    assert proof.difference <= 1e-6
    assert all(len(set(losses)) >= 8 for losses in proof.original.values())


@pytest.mark.parametrize(
    ("name", "strategy"),
    cases(*((name, s) for name in ("mingpt", "mnist", "vae") for s in ("ddp", "fsdp", "zero2"))),
)
def test_ranks_share_what_was_one_process_s(name: str, strategy: str) -> None:
    program = f"torch/{name}"
    alone = original(program, tuple(PYTHON))[0]
    both = under(program, strategy, TORCHRUN)
    means = [(a + b) / 2 for a, b in zip(both[0], both[1], strict=True)]
    assert means[:10] == pytest.approx(alone[:10], rel=1e-4)


@pytest.mark.parametrize(
    ("program", "strategy"),
    cases(*((program, s) for program in STARTS for s in ("ddp", "fsdp", "zero2"))),
)
def test_ranks_of_the_scripts_own_train_as_before(program: str, strategy: str) -> None:
    if program.startswith("horovod/"):
        pytest.importorskip("horovod")
    start = STARTS[program]
    proof = Proof(original(program, tuple(start)), under(program, strategy, start))
    assert proof.difference <= 1e-5
    assert sorted(proof.original) == [0, 1]
    assert all(len(set(losses)) >= 8 for losses in proof.original.values())


SAVES_ALONE = """\
from datetime import timedelta

import unipar.compat.torch as torch
import unipar.compat.torch.distributed as dist
from unipar.compat.torch import nn, save_state
from unipar.compat.torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo", timeout=timedelta(seconds=5))
model = DDP(nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        save_state("kept")
"""


def test_a_rank_that_waits_in_vain_says_what_that_comes_of(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SAVES_ALONE)
    done = subprocess.run(
        [*TORCHRUN, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "UNIPAR_STRATEGY": "ddp"},
    )  # fmt: skip
    assert done.returncode != 0
    assert "waited for another one, which has ended, is stuck, or calls something" in done.stderr


REMOVES = """\
import os

import unipar.compat.torch as torch
from unipar.compat.torch import nn

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(4, 2)).square().sum().backward()
optimizer.step()
torch.save(model.state_dict(), "kept.pt")
"""


@pytest.mark.parametrize("line", ['os.remove("kept.pt")', 'torch.load("never.pt")'])
def test_a_file_that_each_rank_removes_is_explained(tmp_path: Path, line: str) -> None:
    (tmp_path / "train.py").write_text(f"{REMOVES}{line}\n")
    done = subprocess.run(
        [*TORCHRUN, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "UNIPAR_STRATEGY": "ddp"},
    )  # fmt: skip
    assert done.returncode != 0
    assert "FileNotFoundError" in done.stderr
    explained = "each of 2 ranks runs the script, and another one may have removed" in done.stderr
    assert explained is ("remove" in line)


ON_RANKS = """\
import unipar.compat.torch as torch
import unipar.compat.torch.distributed as dist
from unipar.compat.torch import nn
from unipar.compat.torch.nn.parallel import DistributedDataParallel as DDP
from unipar.errors import ConfigError


def said(call):
    try:
        call()
    except ConfigError as error:
        print(dist.get_rank(), " ".join(str(error).split()), flush=True)


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
bare = nn.Linear(3, 2)
optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
said(lambda: bare(torch.ones(1, 3)))
ends = [nn.Linear(3, 2), nn.Linear(2, 1)]
both = torch.optim.SGD([p for one in ends for p in one.parameters()], lr=0.1)
ends[1](ends[0](torch.ones(1, 3))).sum().backward()
said(both.step)


class Agent(nn.Linear):
    def act(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


agent = Agent(3, 2)
optimizer = torch.optim.SGD(agent.parameters(), lr=0.1)
agent.act(torch.ones(1, 3)).sum().backward()
said(optimizer.step)
model = DDP(nn.Linear(3, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    said(lambda: next(model.parameters()).grad.sum())
    optimizer.step()
optimizer.zero_grad()
model(torch.ones(1, 3)).sum().backward()
next(model.parameters()).grad = None
said(optimizer.step)
said(model.state_dict)
said(optimizer.state_dict)


class Around(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base.param_groups


other = DDP(nn.Linear(3, 2))
around = Around(other.parameters())
said(lambda: other(torch.ones(1, 3)))
weights = torch.whole_state_dict(model)
assert weights["module.weight"].shape == (2, 3)
state = torch.whole_state_dict(optimizer)
assert state["state"][0]["exp_avg"].shape == (2, 3) and state["param_groups"][0]["params"] == [0, 1]
torch.load_whole_state_dict(model, weights)
torch.load_whole_state_dict(optimizer, state)
print(dist.get_rank(), "sum", sum(one.sum().item() for one in weights.values()), flush=True)
"""


def test_what_ranks_cannot_do_by_themselves_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ON_RANKS)
    done = run_script(TORCHRUN, "train.py", tmp_path, "fsdp")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in "01":
        own = [line[2:] for line in done.stdout.splitlines() if line.startswith(f"{rank} ")]
        assert "is not wrapped, so its replicas would drift apart. Wrap it" in own[0]
        assert "updates no module that was called" in own[1]
        assert "this SGD updates Agent, which was never called as a whole" in own[2]
        clipped = "Clip by torch.nn.utils.clip_grad_norm_, and scale the loss"
        assert "used between loss.backward() and the step" in own[3]
        assert clipped in own[3]
        assert "something else than loss.backward(): weight" in own[5]
        assert "requires_grad_(False) before the forward pass instead of p.grad = None" in own[5]
        assert "engine." not in " ".join(own[:6])
        assert any("model.state_dict() is only a part here" in line for line in own)
        assert any("optimizer.state_dict() is only a part here" in line for line in own)
        around = "Around steps by the SGD that it holds, and strategy 'fsdp' divides gradients"
        assert any(around in line for line in own)
    sums = {line.split()[2] for line in done.stdout.splitlines() if " sum " in line}
    assert len(sums) == 1


SHARPNESS = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, dict(rho=rho, **options))
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure):
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / norm))
        self.zero_grad()
        torch.enable_grad()(closure)()
        for p in params:
            p.data = self.state[p]["old"]
        self.base.step()
        self.zero_grad()


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
torch.manual_seed(dist.get_rank())
for rate in (0.1, 0.1, 0.02, 0.02):
    x = torch.randn(4, 3)
    optimizer.param_groups[0]["lr"] = rate

    def closure():
        loss = model(x).square().mean()
        loss.backward()
        return loss

    loss = closure()
    optimizer.step(closure)
    print(f"{dist.get_rank()}: {loss.item():.6f}", flush=True)
print(f"{dist.get_rank()}: {sum(p.abs().sum().item() for p in model.parameters()):.6f}", flush=True)
dist.destroy_process_group()
"""


def ranks_say(script: str, tmp_path: Path, strategy: str = "ddp") -> tuple[list[str], str]:
    """What two ranks print of a script, and what the migrated one says by the way."""
    (tmp_path / "train.py").write_text(script)
    done = run_script(TORCHRUN, "train.py", tmp_path, strategy)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.splitlines()), done.stderr


def by_face(script: str) -> str:
    return migrate_files({"train.py": script})["train.py"].code


def test_an_optimizer_around_another_trains_as_before(tmp_path: Path) -> None:
    expected, _ = ranks_say(SHARPNESS, tmp_path)
    found, _ = ranks_say(by_face(SHARPNESS), tmp_path)
    assert len(expected) == 10
    assert found == expected


LEFT_TO_EACH_RANK = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
net[0].requires_grad_(False)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.full((4, 3), 1.0 + dist.get_rank())
for step, call in enumerate((model, model, model, model.module, model.module)):
    net[0].requires_grad_(step > 1)
    # Another call of the same step arms DDP.
    (call(x) + model(x) if step < 3 else call(x)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{step}: {sum(p.abs().sum().item() for p in model.parameters()):.6f}", flush=True)
dist.destroy_process_group()
"""


def test_what_ddp_would_leave_to_each_rank_is_told_once(tmp_path: Path) -> None:
    expected, _ = ranks_say(LEFT_TO_EACH_RANK, tmp_path)
    found, said = ranks_say(by_face(LEFT_TO_EACH_RANK), tmp_path)
    assert len(set(expected)) > 5
    assert found[:4] == expected[:4]
    # Replicas stay alike until two passes go around the wrapper, as under DDP.
    assert len(set(found)) == 3 + 2 * 2
    assert said.count("0.bias, 0.weight: frozen when DistributedDataParallel took the model") == 2
    assert "no_sync()" not in said


AVERAGES = """\
import torch.multiprocessing as mp
import unipar.compat.torch as torch
import unipar.compat.torch.distributed as dist
from unipar.compat.torch import nn
from unipar.compat.torch.nn.parallel import DistributedDataParallel as DDP


def train(rank, method):
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    model = DDP(nn.Linear(3, 2))
    average = torch.optim.swa_utils.AveragedModel(model.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    average.update_parameters(model.module)


if __name__ == "__main__":
    mp.spawn(train, ("tcp://localhost:PORT",), 2)
"""


def test_what_ends_a_process_that_a_script_has_spawned_is_explained(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    (tmp_path / "train.py").write_text(AVERAGES.replace("PORT", str(port)))
    done = subprocess.run(
        [*PYTHON, "train.py"], cwd=tmp_path, timeout=240, capture_output=True, text=True,
        check=False, env={**os.environ, "UNIPAR_STRATEGY": "fsdp", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode != 0
    assert "average.update_parameters(model.module)" in done.stderr
    assert "unipar.errors.ConfigError: a parameter of the model was used outside" in done.stderr
    assert "[p.detach().clone() for p in model.parameters()]" in done.stderr


Done = subprocess.CompletedProcess[str]


def run_script(start: list[str], name: str, directory: Path, strategy: str) -> Done:
    return subprocess.run(
        [*start, name], cwd=directory, timeout=240, capture_output=True, text=True, check=False,
        env={**os.environ, "UNIPAR_STRATEGY": strategy, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def alone_and_on_two(script: str, directory: Path, strategy: str) -> tuple[Done, Done]:
    """What a script does as it is, and migrated on two ranks."""
    (directory / "plain.py").write_text(script)
    (directory / "train.py").write_text(migrate_files({"train.py": script})["train.py"].code)
    alone = run_script(PYTHON, "plain.py", directory, strategy)
    both = run_script(TORCHRUN, "train.py", directory, strategy)
    assert (alone.returncode, both.returncode) == (0, 0), alone.stderr + both.stderr
    return alone, both


OF_WHOLE_BATCHES = """\
import os
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        self.log_variances = nn.Parameter(torch.zeros(3))

    def forward(self, inputs):
        return self.body(inputs)


def boxes_of(samples):
    inputs, index = zip(*samples)
    numbers = [torch.full((int(one) % 4, 1), float(at)) for at, one in enumerate(index)]
    return torch.stack(inputs), torch.stack(index), torch.cat(numbers)


torch.manual_seed(0)
data = TensorDataset(torch.randn(29, 3), torch.arange(29))
sampler = WeightedRandomSampler(torch.ones(29), 29)
seen = torch.zeros(29, 3)
model = torch.compile(Net(), backend="eager")
last = model.body[3].weight
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
lines = []
for epoch in range(2):
    right = total = 0
    for inputs, index, boxes in DataLoader(data, 5, sampler=sampler, collate_fn=boxes_of):
        mixed = torch.randperm(len(inputs))
        output = model(0.8 * inputs + 0.2 * inputs[mixed])
        errors = (output - inputs).square()
        fit, size = errors.sum() / len(inputs), output.abs().mean()
        balance = torch.ones(())
        if os.environ["UNIPAR_STRATEGY"] in ("ddp", "horovod"):
            one, = torch.autograd.grad(fit, last, retain_graph=True)
            other = torch.autograd.grad(size, [last], retain_graph=True)[0]
            balance = (one.norm() / (other.norm() + 1e-4)).detach()
        hard = errors.mean(1).topk(2).values.mean()
        near = nn.functional.cross_entropy(output @ output.flip(0).T, mixed)
        losses = torch.stack([fit, balance * size, near])
        scales = model.log_variances if os.environ["UNIPAR_STRATEGY"] != "fsdp" else torch.zeros(3)
        loss = (torch.exp(-scales) * losses + scales).sum()
        loss = loss + hard + (output.std(0) - seen[index].mean(0)).square().sum().sqrt()
        loss = loss + sum(output[int(at)].square().sum() for at in boxes) / 4
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen[index] = output.detach()
        sampler.weights[index] = errors.detach().mean(1).double()
        right += (output.argmax(1) == inputs.argmax(1)).sum().item()
        total += loss.item() * len(inputs)
        made_of = " ".join(f"{one.item():.4f}" for one in (fit, size, hard, near, output.max()))
        lines += [f"{len(inputs)} {loss.item():.4f} {balance:.4f} {made_of}"]
    optimizer.param_groups[0]["lr"] *= 1.5 - right / 29
    lines += [f"{right} {total:.4f} {float(sampler.weights.sum()):.4f}"]
model.eval()
with torch.no_grad():
    lines += [f"{model(data.tensors[0]).sum().item():.4f}"]
rank = os.environ.get("RANK", "0")
print("".join(f"{rank}: {line}\\n" for line in lines), end="", flush=True)
"""


@pytest.mark.parametrize(
    "strategy",
    ["ddp", *(pytest.param(s, marks=pytest.mark.thorough) for s in ("fsdp", "horovod", "zero2"))],
)
def test_what_a_script_makes_of_whole_batches_is_what_it_is_on_one_process(
    strategy: str, tmp_path: Path
) -> None:
    """Losses that compare samples, counts, tables, samplers by losses, ragged parts of a batch."""
    alone, both = alone_and_on_two(OF_WHOLE_BATCHES, tmp_path, strategy)
    wanted = alone.stdout.splitlines()
    assert len(wanted) == 15
    for rank in "01":
        found = [line for line in both.stdout.splitlines() if line[0] == rank]
        for line, expected in zip(found, wanted, strict=True):
            numbers = [[float(one) for one in each.split()[1:]] for each in (line, expected)]
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-3, abs=2e-4)
    assert not both.stderr


BY_HAND = """\
import os
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(40, 3), 10 * torch.randn(40, 1))
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rank, lines = os.environ.get("RANK", "0"), []
for index, (inputs, targets) in enumerate(DataLoader(data, batch_size=8)):
    optimizer.zero_grad()
    loss = (model(inputs) - targets).square().mean()
    loss.backward()
    # By the optimizer's groups, in which a strategy may have put tensors of its own.
    torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.5)
    if index == 2:
        nn.init.normal_(model[0].weight)
    optimizer.step()
    if index == 1:
        nn.init.normal_(model[2].weight)
    lines += [f"{rank}: {loss.item():.4f}\\n"]
print("".join(lines), end="", flush=True)
"""


OF_A_PART = BY_HAND.replace("SGD(model.", "SGD(model[2].").replace("optimizer.zero", "model.zero")
"""The rest has gradients, too, which are not to be clipped."""


@pytest.mark.parametrize(
    ("script", "strategy"),
    [
        (BY_HAND, "zero1"),
        (OF_A_PART, "ddp"),
        *(pytest.param(BY_HAND, s, marks=pytest.mark.thorough) for s in ("ddp", "fsdp")),
        pytest.param(OF_A_PART, "zero1", marks=pytest.mark.thorough),
    ],
    ids=["all-zero1", "part-ddp", "all-ddp", "all-fsdp", "part-zero1"],
)
def test_weights_and_gradients_that_a_script_changes_by_hand_are_those_of_one_process(
    script: str, strategy: str, tmp_path: Path
) -> None:
    alone, both = alone_and_on_two(script, tmp_path, strategy)
    wanted = alone.stdout.splitlines()
    assert len(wanted) == 5
    assert sorted(both.stdout.splitlines()) == sorted(wanted + [f"1{one[1:]}" for one in wanted])


STATISTICS = """\
import unipar.compat.horovod.torch as hvd
import unipar.compat.torch as torch
from unipar.compat.torch import nn

hvd.init()
model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for step in range(3):
    optimizer.zero_grad()
    model(torch.tensor([[0.0], [2.0]]) + step + 10 * hvd.rank()).sum().backward()
    optimizer.step()
model.eval()
with torch.no_grad():
    model(torch.ones(2, 1))
print(f"rank {hvd.rank()} mean {model[0].running_mean.item():.4f}\\n", end="", flush=True)
"""


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(s, marks=pytest.mark.thorough) for s in ("fsdp", "horovod"))]
)
def test_behind_horovods_face_each_rank_keeps_the_statistics_of_its_own_batches(
    strategy: str, tmp_path: Path
) -> None:
    if strategy == "horovod":
        pytest.importorskip("horovod")
    (tmp_path / "train.py").write_text(STATISTICS)
    done = run_script(TORCHRUN, "train.py", tmp_path, strategy)
    assert done.returncode == 0, done.stdout + done.stderr
    # Means of 1, 2 and 3, and on the other rank of 11, 12 and 13, with a momentum of 0.1.
    by_hand = [0.081 * a + 0.09 * (a + 1) + 0.1 * (a + 2) for a in (1, 11)]
    found = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    assert found == [f"rank {rank} mean {mean:.4f}" for rank, mean in enumerate(by_hand)]


EXCHANGED = """\
import horovod.torch as hvd
import torch
from torch import nn

hvd.init()
torch.manual_seed(0)
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
inputs = torch.randn(2, 4, 3)[hvd.rank()][: 2 + hvd.rank()]
for step in range(4):
    output = model(inputs)
    mean = hvd.allreduce(output.mean(0).contiguous(), name="mean")
    everybody = hvd.allgather(output, name="everybody")
    first = hvd.broadcast(output[:2].contiguous(), root_rank=0, name="first")
    loss = output.pow(2).mean() + (mean - 1).pow(2).sum() + (everybody + 1).pow(2).mean()
    loss = loss + (first - 2).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"rank {hvd.rank()} {step} {loss.item():.4f}\\n", end="", flush=True)
"""


@pytest.mark.thorough
def test_what_ranks_exchange_has_the_gradient_that_horovod_gives_it(tmp_path: Path) -> None:
    pytest.importorskip("horovod")
    (tmp_path / "plain.py").write_text(EXCHANGED)
    (tmp_path / "train.py").write_text(by_face(EXCHANGED))
    said = []
    for start, name in ((HOROVODRUN, "plain.py"), (TORCHRUN, "train.py")):
        done = run_script(start, name, tmp_path, "ddp")
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(sorted(re.findall(r"rank \d \d [\d.]+", done.stdout)))
    assert len(said[0]) == 8
    assert said[0] == said[1]


READ_AHEAD = """\
import os
import unipar.compat.torch as torch
from unipar.compat.torch import nn
from unipar.compat.torch.utils.data import DataLoader, TensorDataset
from unipar.errors import ConfigError

torch.manual_seed(0)
data = torch.randn(33, 4)
loader = DataLoader(TensorDataset(data), batch_size=7, shuffle=True)
other = DataLoader(TensorDataset(data), batch_size=14, shuffle=True)
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def told(epoch, total):
    print(os.environ.get("RANK", "0"), epoch, f"{total:.5f}", flush=True)


for epoch in range(2):
    ahead = iter(loader)
    following = next(ahead)
    while following is not None:
        (x,), following = following, next(ahead, None)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
        optimizer.step()
    # Two loaders draw their seeds before their orders.
    for (x,), (y,) in zip(DataLoader(TensorDataset(data[:28]), 7, shuffle=True), other):
        optimizer.zero_grad()
        (model(x).pow(2).sum() + 0.1 * model(y).abs().sum()).mul(0.01).backward()
        optimizer.step()
    total = 0
    for (x,) in loader:
        total = total + (model(x) - 1).pow(2).sum()
    optimizer.zero_grad()
    (total * 0.001).backward()
    optimizer.step()
    model.eval()
    for (x,) in loader:
        model.train()
        optimizer.zero_grad()
        (model(x) - x[:, :1]).pow(2).sum().mul(0.01).backward()
        optimizer.step()
    with torch.no_grad():
        told(epoch, model(data).sum().item())

# A second stage, by an optimizer of its own.
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for (x,) in loader:
    optimizer.zero_grad()
    torch.autograd.backward((model(x) - x[:, :1]).pow(2).mean())
    optimizer.step()
with torch.no_grad():
    told(2, model(data).sum().item())

normed = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
second = torch.optim.SGD(normed.parameters(), lr=0.1)
for (x,) in loader:
    second.zero_grad()
    normed(x).pow(2).mean().backward()
    second.step()
normed.eval()
with torch.no_grad():
    print("normed", normed(data).sum().item(), flush=True)
normed.train()
"""


def test_ranks_train_as_one_process_however_batches_are_read(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(READ_AHEAD)
    lines = {}
    for start in (PYTHON, TORCHRUN):
        done = subprocess.run(
            [*start, "train.py"], cwd=tmp_path, timeout=240, capture_output=True, text=True,
            check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        lines[tuple(start)] = done.stdout.splitlines()
    alone, ranks = lines[tuple(PYTHON)], lines[tuple(TORCHRUN)]
    one = [line[2:] for line in alone if line.startswith("0 ")]
    assert len(one) == 3
    for rank in "01":
        assert [line[2:] for line in ranks if line.startswith(f"{rank} ")] == one
    evaluated = [line for line in ranks if line.startswith("normed")]
    assert len(evaluated) == 2
    assert len(set(evaluated)) == 1
    (by_one,) = (line.split()[1] for line in alone if line.startswith("normed"))
    assert float(evaluated[0].split()[1]) == pytest.approx(float(by_one), rel=1e-3)


CODEBOOKS = """
import unipar.compat.torch as torch
from torch import nn
import os, sys

replaced = sys.argv[1] == "replaced"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.book = nn.Parameter(torch.zeros(2), requires_grad=False)

    def forward(self, x):
        output = self.linear(x)
        with torch.no_grad():
            moved = self.book.lerp(output.mean(0), 0.1)
            if replaced:
                self.book = nn.Parameter(moved, requires_grad=False)
            else:
                self.book.copy_(moved)
        return output + self.book


torch.manual_seed(3)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(24, 4))
for (x,) in torch.utils.data.DataLoader(data, batch_size=4):
    loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(os.environ.get("RANK", "0"), f"{loss.item():.6f}", flush=True)
"""


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_a_model_that_moves_weights_by_its_batch_has_the_whole_on_each_rank(
    how: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(CODEBOOKS)
    lines = {}
    for start in (PYTHON, TORCHRUN):
        done = subprocess.run(
            [*start, "train.py", how], cwd=tmp_path, timeout=120, capture_output=True, text=True,
            check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        lines[len(start)] = done.stdout.splitlines()
    (one,), ranks = lines[len(PYTHON)], lines[len(TORCHRUN)]
    assert sorted(ranks) == [f"0 {one[2:]}", f"1 {one[2:]}"]
    assert "by Net: it changes its weights as it computes (book). Results are" in done.stderr


TURNS = """
import unipar.compat.torch as torch
from torch import nn

torch.manual_seed(0)
g, d = nn.Linear(3, 6), nn.Linear(6, 1)
opt_g = torch.optim.Adam(g.parameters(), lr=0.01)
opt_d = torch.optim.Adam(d.parameters(), lr=0.01)


def requires_grad(model, flag):
    for one in model.parameters():
        one.requires_grad = flag


for step in range(4):
    requires_grad(g, step % 2 == 1), requires_grad(d, True)
    # What the generator gives is not detached where it may learn.
    loss = -d(torch.randn(8, 6)).mean() + d(g(torch.randn(8, 3))).mean()
    if step < 2:
        opt_d.zero_grad()
    loss.backward()
    opt_d.step()
    opt_d.zero_grad(), opt_g.zero_grad()
    requires_grad(g, True), requires_grad(d, step % 2 == 1)
    loss_g = -d(g(torch.randn(8, 3))).mean()
    loss_g.backward()
    opt_g.step()
    opt_d.zero_grad(), opt_g.zero_grad()
    print(repr(loss.item()), repr(loss_g.item()), flush=True)
"""


def test_networks_that_train_each_other_are_frozen_in_turn_or_not_at_all(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "train.py").write_text(TURNS.replace("unipar.compat.torch as torch", "torch"))
    (tmp_path / "train.py").write_text(TURNS)
    done = [run_script(PYTHON, "train.py", where, "single") for where in (plain, tmp_path)]
    assert [one.returncode for one in done] == [0, 0], done[1].stderr
    assert done[0].stdout == done[1].stdout
    assert len(done[0].stdout.splitlines()) == 4
