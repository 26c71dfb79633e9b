"""What changes training, or what is measured of it, is called out with its numerical effect."""

from __future__ import annotations

import pytest

from unipar.migrate import Migration, Note, migrate_source

TORCH = """\
import torch, random, math, numpy as np
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
accum = 4
data = TensorDataset(torch.randn(50, 3), torch.randn(50, 1))
loader = DataLoader(data, batch_size=8, shuffle=True)
model = nn.Linear(3, 1)
criterion = nn.MSELoss()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
total, every = 0.0, []
for i, (x, y) in enumerate(loader):
    loss = criterion(model(x), y)
    (loss / accum).backward()
    if (i + 1) % accum == 0 or i + 1 == len(loader):
        opt.step()
        opt.zero_grad()
"""
DDP = """\
import math, random
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
base = 0.1
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    opt.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    opt.step()
"""


def notes(source: str, *changes: tuple[str, str]) -> tuple[list[Note], Migration]:
    """The notes on training after some changes to a script."""
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    migration = migrate_source(source, file="train.py")
    assert migration.changed, [str(note) for note in migration.notes]
    found = [note for note in migration.notes if note.kind == "training"]
    for note in found:
        assert f"# unipar: {note.why}" in migration.code
    return found, migration


def test_the_scripts_that_are_changed_below_are_not_called_out() -> None:
    assert notes(TORCH)[0] == []
    assert notes(DDP)[0] == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("criterion(model(x), y)", "criterion(model(x), y) / accum"),
        ("criterion(model(x), y)\n", "criterion(model(x), y)\n    loss = loss / accum\n"),
        ("criterion(model(x), y)\n", "criterion(model(x), y)\n    loss /= 4\n"),
        ("    loss = criterion(model(x), y)\n",
         "    n = accum\n    loss = criterion(model(x), y) / n\n"),
        ("    loss = criterion(model(x), y)\n",
         "    def compute(a, b):\n        return criterion(a, b) / accum\n"
         "    loss = compute(model(x), y)\n"),
    ],
)  # fmt: skip
def test_a_loss_that_is_divided_twice(old: str, new: str) -> None:
    (note,), _ = notes(TORCH, (old, new))
    assert note.construct == "loss / accum"
    assert note.why.startswith("the loss is divided by 4 twice: here, and in line 1")
    assert "1/4 of the mean over its batches: SGD's steps are 4 times too short" in note.why
    assert note.todo == "Kept as it is; divide once."


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("criterion(model(x), y)", "criterion(model(x), y) / 2"),
        ("criterion(model(x), y)", "criterion(model(x), y).sum() / len(x)"),
        ("criterion(model(x), y)\n",
         "criterion(model(x), y)\n    if i > 3:\n        loss = loss / accum\n"),
        ("criterion(model(x), y)\n",
         "criterion(model(x), y)\n    print(loss / accum)\n    shown = loss / accum\n"),
        ("criterion(model(x), y)", "criterion(model(x), y / accum)"),
    ],
)  # fmt: skip
def test_divisions_by_other_numbers_are_not_called_out(old: str, new: str) -> None:
    assert notes(TORCH, (old, new))[0] == []


def test_a_loss_that_is_divided_by_what_gradients_are_averaged_over() -> None:
    (note,), _ = notes(DDP, ("loss.backward()", "(loss / world_size).backward()"))
    assert "on 2 ranks SGD's steps are 1/2, on 8 ranks 1/8 of what the mean gives" in note.why
    (note,), _ = notes(
        DDP, ("    loss.backward()", "    loss /= dist.get_world_size()\n    loss.backward()")
    )
    assert note.construct == "loss /= dist.get_world_size()"
    assert notes(DDP, ("loss.backward()", "loss.backward()\n    print(loss / world_size)"))[0] == []


@pytest.mark.parametrize(
    ("inside", "after"),
    [
        ("total += loss.item()", "print(total / len(loader))"),
        ("total += float(loss)", "total /= len(loader)"),
        ("total += loss.detach().cpu().item()", "print(total / max(1, len(loader)))"),
        ("total += (model(x) > 0).float().mean().item()", "print(total / len(loader))"),
        ("every.append(loss.item())", "print(sum(every) / len(every))"),
        ("every.append(loss.item())", "print(np.mean(every))"),
    ],
)
def test_a_mean_of_the_means_of_batches(inside: str, after: str) -> None:
    found, _ = notes(
        TORCH,
        ("    (loss", f"    {inside}\n    (loss"),
        ("opt.zero_grad()\n", f"opt.zero_grad()\n{after}\n"),
    )
    (note,) = found
    assert note.line == 18
    assert "a last batch of b samples counts as much as one of 8, so each of its samples counts "
    assert "8/b times as much as others, up to 8 times" in note.why
    assert "add mean * len(x), and divide by the number of samples" in note.todo


@pytest.mark.parametrize(
    ("inside", "after", "old", "new"),
    [
        ("total += loss.item() * len(x)", "print(total / len(loader.dataset))", "", ""),
        ("total += loss.item() * len(x)", "print(total / len(loader))", "", ""),
        ("total += loss.item()", "print(total / 7)", "", ""),
        ("total += loss.item()", "print(total / len(loader))", "shuffle=True",
         "shuffle=True, drop_last=True"),
        ("total += loss.item()", "print(total / len(loader))", "batch_size=8, ", ""),
        ("total += loss.item()", "print(total / len(loader))", "MSELoss()",
         'MSELoss(reduction="sum")'),
        ("total += (model(x) > 0).sum().item()", "print(total / len(loader))", "", ""),
        ("every.append(len(x))", "print(np.mean(every))", "", ""),
        ("every.append(loss.item())", "print(every[-1] / len(every))", "", ""),
    ],
)  # fmt: skip
def test_means_over_samples_are_not_called_out(inside: str, after: str, old: str, new: str) -> None:
    found, _ = notes(
        TORCH, ("    (loss", f"    {inside}\n    (loss"),
        ("opt.zero_grad()\n", f"opt.zero_grad()\n{after}\n"), (old, new) if old else ("", ""),
    )  # fmt: skip
    assert found == []


def test_a_mean_of_the_means_of_ranks_with_unequal_shares() -> None:
    strided = ("DistributedSampler(data)", "list(range(rank, 101, world_size))")
    metric = (
        "opt.step()\n",
        "opt.step()\ndist.all_reduce(loss)\nprint(loss.item() / world_size)\n",
    )
    (note,), _ = notes(DDP, strided, metric)
    assert note.construct == "loss.item() / world_size"
    assert "51/50 of 101 samples on 2 ranks, twice of 3" in note.why
    # Every rank has as many where a DistributedSampler pads, and other sums are no means.
    assert notes(DDP, metric)[0] == []
    assert notes(DDP, strided)[0] == []
    assert notes(DDP, strided, ("opt.step()\n", "opt.step()\nprint(base / world_size)\n"))[0] == []


def test_drop_last_says_how_many_samples_it_leaves_out() -> None:
    found, migration = notes(TORCH, ("shuffle=True", "shuffle=True, drop_last=True"))
    assert found == []
    (told,) = [note for note in migration.notes if "drop_last" in note.why]
    assert told.why == "drop_last leaves up to 7 samples out of each epoch, as before."
    (note,), _ = notes(TORCH, ("shuffle=True", "drop_last=True"))
    assert note.why.endswith("the same samples out of every epoch: the last ones, up to 7.")
    assert not any(
        "drop_last" in one.why for one in notes(TORCH, ("shuffle=True", "drop_last=False"))[1].notes
    )


@pytest.mark.parametrize(
    "seed",
    ["torch.manual_seed(rank)", "torch.manual_seed(42 + dist.get_rank())",
     "g = torch.Generator(); g.manual_seed(7 * rank)", "random.seed(base + rank)",
     "seed = 1 + rank\ntorch.manual_seed(seed)"],
)  # fmt: skip
def test_a_seed_of_each_rank(seed: str) -> None:
    (note,), _ = notes(DDP, ("torch.manual_seed(0)", seed))
    assert "dropout and shuffling differ between ranks" in note.why


@pytest.mark.parametrize(
    "seed",
    ["torch.manual_seed(world_size)", "ranking = 3\ntorch.manual_seed(ranking)",
     "torch.manual_seed(1)\nrank = 2", "print(rank)"],
)  # fmt: skip
def test_seeds_that_ranks_share_are_not_called_out(seed: str) -> None:
    assert notes(DDP, ("torch.manual_seed(0)", seed))[0] == []


def test_ranks_that_shuffle_with_seeds_of_their_own() -> None:
    (note,), _ = notes(DDP, ("DistributedSampler(data)", "DistributedSampler(data, seed=rank)"))
    assert "1/4 are seen by no rank of 2, and about 1/3 by none of 8" in note.why
    for given in ("seed=3", "seed=rank, shuffle=False"):
        changed = ("DistributedSampler(data)", f"DistributedSampler(data, {given})")
        assert notes(DDP, changed)[0] == []


@pytest.mark.parametrize(
    ("old", "new", "effect"),
    [
        ("lr=0.1", "lr=0.1 * world_size", "on 2 ranks it is twice, on 8 ranks eight times"),
        ("lr=0.1", "lr=base * dist.get_world_size() / 256", "on 2 ranks it is twice"),
        ("lr=0.1", "lr=base * math.sqrt(world_size)", "1.41 times, on 8 ranks 2.83 times"),
        ("lr=0.1", "lr=base * world_size ** 0.5", "1.41 times, on 8 ranks 2.83 times"),
        ("lr=0.1", "lr=base / world_size", "on 2 ranks it is a half, on 8 ranks an eighth"),
        ("base = 0.1", "base = 0.1\nbase *= world_size", "on 2 ranks it is twice"),
        ("base = 0.1", "base = 0.1 * max(1, world_size)", "on 2 ranks it is twice"),
        ("for x, y", 'for g in opt.param_groups:\n    g["lr"] *= world_size\nfor x, y',
         "on 2 ranks it is twice"),
    ],
)  # fmt: skip
def test_a_learning_rate_that_depends_on_the_number_of_ranks(
    old: str, new: str, effect: str
) -> None:
    rate = [("lr=0.1", "lr=base")] if old == "base = 0.1" else []
    (note,), _ = notes(DDP, *rate, (old, new))
    assert note.why.startswith("the learning rate is ")
    assert effect in note.why


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("lr=0.1", "lr=0.1 if world_size == 1 else 0.2"),
        ("lr=0.1", "lr=rates[world_size]"),
        ("lr=0.1", "lr=0.1, weight_decay=1e-3 * world_size"),
        ("base = 0.1", "base = 0.1\nbatch = 8 * world_size"),
    ],
)
def test_learning_rates_that_do_not_are_not_called_out(old: str, new: str) -> None:
    assert notes(DDP, (old, new))[0] == []


ACCELERATE = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=4)
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(data, batch_size=2)
model, opt, loader = accelerator.prepare(model, opt, loader)
for x, y in loader:
    with accelerator.accumulate(model):
        loss = (model(x) - y).square().mean()
        accelerator.backward(loss)
        opt.step()
        opt.zero_grad()
"""


def test_a_loss_that_the_script_and_the_framework_divide() -> None:
    assert notes(ACCELERATE)[0] == []
    for divided in ("loss / 4", "loss / accelerator.gradient_accumulation_steps"):
        (note,), _ = notes(ACCELERATE, ("backward(loss)", f"backward({divided})"))
        assert "twice: by accelerator.backward too. The gradient of a step is 1/" in note.why
    other = ("gradient_accumulation_steps=4", "gradient_accumulation_steps=1")
    assert notes(ACCELERATE, other, ("backward(loss)", "backward(loss / 4)"))[0] == []
    assert notes(ACCELERATE, ("backward(loss)", "backward(loss / len(x))"))[0] == []


def test_clipping_gradients_that_are_still_scaled_is_refused_with_its_effect() -> None:
    source = TORCH.replace("(loss / accum).backward()", "scaler.scale(loss / accum).backward()")
    source = source.replace(
        "loss = crit", "with torch.autocast('cuda', torch.float16):\n        loss = crit"
    )
    source = source.replace("total,", "scaler = torch.amp.GradScaler('cuda')\ntotal,").replace(
        "        opt.step()\n",
        "        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "        scaler.step(opt)\n        scaler.update()\n",
    )
    (note,) = [one for one in migrate_source(source).notes if one.kind == "refused"]
    assert "multiplied by the loss scale (65536 at first): to max_norm / 65536" in note.why
    fixed = source.replace("        nn.utils", "        scaler.unscale_(opt)\n        nn.utils")
    assert migrate_source(fixed).changed


DEEPSPEED = """\
import torch, deepspeed
data = torch.utils.data.TensorDataset(torch.randn(50, 4), torch.randn(50, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8)
model = torch.nn.Linear(4, 1)
config = {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
          "gradient_clipping": 0.5}
engine, _, _, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=config
)
total = 0.0
for x, y in loader:
    loss = (engine(x) - y).square().mean()
    total += loss.item()
    engine.backward(loss)
    engine.step()
"""


def test_scripts_for_deepspeed_are_read_for_means_and_dropped_samples_too() -> None:
    assert notes(DEEPSPEED)[0] == []
    (note,), _ = notes(
        DEEPSPEED, ("engine.step()\n", "engine.step()\nprint(total / len(loader))\n")
    )
    assert "8/b times as much" in note.why
    (note,), _ = notes(DEEPSPEED, ("batch_size=8", "batch_size=8, drop_last=True"))
    assert "the last ones, up to 7" in note.why
