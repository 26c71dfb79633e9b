"""Scripts that would leave some ranks waiting for the others are refused."""

from __future__ import annotations

import pytest
from telling import refusal

from unipar.migrate import migrate_source

SCRIPT = """\
import math, os, time, torch
from pathlib import Path
from torch.utils.data import DataLoader
class Meter:
    def __init__(self):
        self.sum, self.count = 0.0, 0
    def update(self, value, n=1):
        self.sum += value * n
        self.count += n
    @property
    def avg(self):
        return self.sum / self.count
    def mean(self):
        return self.sum / self.count
train_loader = DataLoader(data, batch_size=8, shuffle=True)
val_loader = DataLoader(held_out, batch_size=8)
model = torch.nn.Linear(4, 4)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(opt)
def validate(model, loader):
    total = 0.0
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            total += (model(x) - y).square().mean().item()
    return total / len(loader), 1.0
def train_epoch(model, loader, opt):
    meter, losses = Meter(), []
    for i, (x, y) in enumerate(loader):
        opt.zero_grad()
        loss = (model(x) - y).square().mean()
        {before}
        loss.backward()
        opt.step()
        {after}
        meter.update(loss.item(), len(x))
        losses.append(loss.item())
    return {returned}
best, bad, start, history = math.inf, 0, time.time(), []
for epoch in range(5):
    train_loss = train_epoch(model, train_loader, opt)
    val_loss, accuracy = validate(model, val_loader)
    {then}
"""
SAVE = "torch.save(model.state_dict(), 'best.pt')"


def script(
    *, before: str = "pass", after: str = "pass", returned: str = "meter.avg", then: str = SAVE
) -> str:
    found = SCRIPT.replace("{before}", before).replace("{after}", after)
    return found.replace("{returned}", returned).replace("{then}", then)


@pytest.mark.parametrize(
    "changes",
    [
        {"then": f"if train_loss < best:\n        best = train_loss\n        {SAVE}"},
        {"then": f"is_best = train_loss < best\n    if is_best: {SAVE}"},
        {"then": f"history.append(train_loss)\n    if train_loss == min(history): {SAVE}"},
        {"then": f"if train_loss < best: {SAVE}", "returned": "sum(losses) / len(losses)"},
        {"then": f"if train_loss < best: {SAVE}", "returned": "meter.mean()"},
        {"then": f"if train_loss['loss'] < best: {SAVE}", "returned": "{'loss': meter.avg}"},
        {"then": f"if validate(model, train_loader)[0] < best: {SAVE}"},
        {"then": "if train_loss < best:\n        best, bad = train_loss, 0\n    else:\n"
                 f"        bad += 1\n    if bad > 3: break\n    {SAVE}"},
        {"after": f"if loss < 1e-3 and i % 2 == 0: {SAVE}"},
    ],
)  # fmt: skip
def test_a_file_that_some_ranks_would_write_is_refused(changes: dict[str, str]) -> None:
    said = refusal(script(**changes))
    assert f"refused: {SAVE}: on several ranks all of them wait" in said
    assert "decides if a rank comes to it: each rank has a share of the data. Some would" in said


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("time.time() - start > 60", "ranks read their clocks at different times"),
        ("not os.path.exists('best.pt')", "one rank may look for a file before, another after"),
        ("not Path('best.pt').exists()", "one rank may look for a file before, another after"),
    ],
)
def test_what_else_differs_between_ranks_is_refused(test: str, why: str) -> None:
    said = refusal(script(then=f"if {test}: {SAVE}"))
    assert f"`{test}` decides if a rank comes to it: {why}" in said


@pytest.mark.parametrize(
    "changes",
    [
        {"before": "if torch.isnan(loss): continue"},
        {"before": "if not math.isfinite(loss.item()):\n            continue"},
        {"before": "if len(x) < 8: continue"},
        {"after": "if loss.item() < 0.1: break"},
        {"after": "if time.time() - start > 60: return 0"},
    ],
)
def test_a_backward_pass_that_some_ranks_would_leave_out_is_refused(
    changes: dict[str, str],
) -> None:
    said = refusal(script(**changes))
    assert "refused: loss.backward(): on several ranks all of them compute gradients tog" in said
    assert "refused: opt.step(): on several ranks all of them step together" in said


def test_a_scheduler_that_is_given_a_ranks_own_loss_is_refused() -> None:
    said = refusal(script(then="scheduler.step(train_loss)"))
    assert (
        "refused: scheduler.step(train_loss): on several ranks it would get another value" in said
    )
    assert not migrate_source(script(then="scheduler.step(val_loss)")).refused


@pytest.mark.parametrize(
    "changes",
    [
        {"then": f"if val_loss < best:\n        best = val_loss\n        {SAVE}"},
        {"then": f"if (epoch + 1) % int(os.environ['EVERY']) == 0: {SAVE}"},
        {"then": f"print(train_loss, time.time() - start)\n    if accuracy > best: {SAVE}"},
        {"then": f"history.append(val_loss)\n    if val_loss == min(history): {SAVE}"},
        {"then": f"if not os.path.exists('out'): os.makedirs('out')\n    {SAVE}"},
        {"then": "if val_loss < best:\n        best, bad = val_loss, 0\n    else:\n"
                 f"        bad += 1\n    if bad > 3: break\n    {SAVE}"},
        {"after": f"if i == len(loader) - 1: {SAVE}"},
        {"after": "if i % 10 == 0: print(i, loss.item(), len(loader))"},
        {"before": "if i > 3: break"},
    ],
)  # fmt: skip
def test_what_all_ranks_decide_alike_is_migrated(changes: dict[str, str]) -> None:
    migration = migrate_source(script(**changes))
    assert not migration.refused, [str(note) for note in migration.notes]
    assert "script.save(" in migration.code


ACCELERATE = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator()
loader = torch.utils.data.DataLoader(data)
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
model, opt, loader = accelerator.prepare(model, opt, loader)
{define}
step, best = 0, 1.0
for x, y in loader:
    loss = (model(x) - y).square().mean()
    accelerator.backward(loss)
    opt.step()
    opt.zero_grad()
    if accelerator.sync_gradients:
        step += 1
    mean = accelerator.gather_for_metrics(loss).mean()
    {save}
"""


@pytest.mark.parametrize(
    ("define", "save", "why"),
    [
        ("", "if accelerator.is_main_process:\n        if step % 3 == 0:\n"
         "            accelerator.save_state('out')", "it asks which rank this is"),
        ("", "if step % 3 == 0 and accelerator.is_main_process: accelerator.save_state('out')",
         "it asks which rank this is"),
        ("", "if loss < best: accelerator.save_model(model, 'out')", "each rank has a share"),
        ("def save():\n    if not accelerator.is_main_process:\n        return\n"
         "    accelerator.save_state('out')", "save()", "it asks which rank this is"),
        ("@accelerator.on_main_process\ndef save():\n    accelerator.save_state('out')", "save()",
         "it asks which rank this is"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_all_ranks_on_some_of_them_is_refused(
    define: str, save: str, why: str
) -> None:
    said = refusal(ACCELERATE.replace("{define}", define).replace("{save}", save))
    assert "all ranks write this together" in said
    assert f"decides if a rank comes to it: {why}" in said


@pytest.mark.parametrize(
    "save",
    [
        "if step % 3 == 0: accelerator.save_state('out')",
        "if mean < best: accelerator.save_state('out')",
        "if accelerator.is_main_process: accelerator.save(model.state_dict(), 'out.pt')",
    ],
)
def test_a_checkpoint_of_all_ranks_on_all_of_them_is_migrated(save: str) -> None:
    migration = migrate_source(ACCELERATE.replace("{define}", "").replace("{save}", save))
    assert not migration.refused, [str(note) for note in migration.notes]


def test_a_boosters_files_on_one_rank_are_refused() -> None:
    source = """\
import colossalai, torch
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.cluster import DistCoordinator
colossalai.launch_from_torch()
coordinator = DistCoordinator()
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
booster = Booster(plugin=TorchDDPPlugin())
model, opt, _, _, _ = booster.boost(model, opt)
for x, y in data:
    booster.backward((model(x) - y).square().mean(), opt)
    opt.step()
    opt.zero_grad()
if coordinator.is_master():
    booster.save_model(model, "model.pt")
"""
    assert 'booster.save_model(model, "model.pt"): all ranks write this' in refusal(source)
    everywhere = source.replace("if coordinator.is_master():", "if True:")
    assert not migrate_source(everywhere).refused
