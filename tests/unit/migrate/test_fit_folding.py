"""Which loops are folded into ``fit``, and what keeps others from it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from unipar.cli import main
from unipar.migrate import Migration, migrate_source

HEAD = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.randn(32, 4), torch.randn(32, 1)), batch_size=8)
model = nn.Linear(4, 1)
loss_fn = nn.MSELoss()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
"""
LOOP = """\
for epoch in range(2):
    for i, (x, y) in enumerate(loader):
        opt.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        opt.step()
"""
FOLDED = """\
def training_loss(model, batch):
    x, y = batch
    loss = loss_fn(model(x), y)
    return loss


unipar.fit(
    model, loader, loss=training_loss,
    optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    epochs=2,
    config=folded.config(),
)
"""
ACCUMULATED = """\
for epoch in range(2):
    for i, (x, y) in enumerate(loader):
        loss = loss_fn(model(x), y) / 4
        loss.backward()
        if (i + 1) % 4 == 0:
            opt.step()
            opt.zero_grad()
"""


def fold(source: str) -> Migration:
    migration = migrate_source(source, file="train.py", to="fit")
    assert migration.changed, [str(note) for note in migration.notes]
    ast.parse(migration.code)
    assert "opt.step" not in migration.code
    assert migrate_source(migration.code, to="fit").code == migration.code
    return migration


def refusal(source: str) -> str:
    ast.parse(source)
    migration = migrate_source(source, file="train.py", to="fit")
    assert not migration.changed
    assert migration.code == source
    (note,) = [one for one in migration.notes if one.kind == "refused"]
    assert "Leave --to fit out" in note.todo
    return str(note)


def test_the_smallest_loop() -> None:
    migration = fold(HEAD + LOOP)
    assert migration.code.endswith(FOLDED)
    assert "import unipar\nfrom unipar.migrated import folded\n" in migration.code
    assert "opt =" not in migration.code
    assert migration.config == {"strategy": "auto", "device": "cpu", "checkpoint": False}


def test_without_being_asked_loops_stay() -> None:
    assert "script.backward(loss, opt)" in migrate_source(HEAD + LOOP).code


def test_a_script_that_does_not_train_comes_back_as_it_is() -> None:
    assert not migrate_source(HEAD, to="fit").changed


def test_moves_to_a_device_are_fits() -> None:
    for moved in ("x, y = x.to(device), y.to(device)", "x = x.to(device)\n        y = y.cuda()"):
        code = fold(
            HEAD + LOOP.replace("opt.zero_grad()", f"{moved}\n        opt.zero_grad()")
        ).code
        assert FOLDED in code
    code = fold(HEAD + LOOP.replace("model(x), y", "model(x.to(device)), y.cuda()")).code
    assert FOLDED in code
    kept = fold(HEAD + LOOP.replace("model(x)", "model(x.to(torch.float32))")).code
    assert "model(x.to(torch.float32))" in kept


def test_what_only_reports_is_left_out_and_told() -> None:
    noisy = LOOP.replace("    for i", "    total = 0\n    for i") + (
        "        total += loss.item()\n        if i % 2 == 0:\n            print(i, loss.item())\n"
        "    print(epoch, total / len(loader))\n"
    )
    migration = fold(HEAD + noisy)
    assert migration.code.endswith(FOLDED)
    assert any("what the loop printed and added up is fit's" in n.why for n in migration.notes)


def test_clipping_and_a_scheduler_of_steps() -> None:
    scheduler = "sched = torch.optim.lr_scheduler.StepLR(opt, 3)\n"
    loop = LOOP.replace(
        "opt.step()", "nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n"
        "        opt.step()\n        sched.step()",
    )  # fmt: skip
    code = fold(HEAD + scheduler + loop).code
    assert "lr_scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 3),\n" in code
    assert "max_grad_norm=0.5,\n" in code


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("/ 4\n", "/ 4\n"),
        (" / 4\n        loss.backward()", "\n        (loss / 4).backward()"),
        (" / 4\n", "\n        loss = loss / 4\n"),
        (" / 4\n", "\n        loss /= 4\n"),
    ],
)
def test_accumulation_becomes_a_global_batch(old: str, new: str) -> None:
    assert old in ACCUMULATED
    migration = fold(HEAD + ACCUMULATED.replace(old, new))
    assert "global_batch_size=loader.batch_size * 4,\n" in migration.code
    assert "    micro_batch_size=loader.batch_size,\n" in migration.code
    assert " / 4" not in migration.code
    assert "return loss" in migration.code
    assert any("fit takes a step on the mean over the rest" in n.why for n in migration.notes)


def test_shuffling_in_an_order_of_its_own_is_called_out() -> None:
    migration = fold(HEAD.replace("batch_size=8", "batch_size=8, shuffle=True") + LOOP)
    assert any("an epoch has the same samples as before, in another" in n.why
               for n in migration.notes if n.kind == "training")  # fmt: skip


EVALUATION = """\
    model.eval()
    with torch.no_grad():
        total = 0.0
        for a, b in loader:
            total += loss_fn(model(a), b).item()
        print(total / len(loader))
"""


def test_an_evaluation_of_the_loss_is_fits() -> None:
    assert "    eval_data=loader,\n" in fold(HEAD + LOOP + EVALUATION).code
    more = EVALUATION.replace("loss_fn(model(a), b)", "(model(a) > b).sum()")
    assert "evaluation computes more than the loss" in refusal(HEAD + LOOP + more)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("opt.step()\n", "opt.step()\n        update(model)\n", "this has no place in fit"),
        ("opt.step()\n", "opt.step()\n        model.weight.data.clamp_(-1)\n", "no place in fit"),
        ("        opt.zero_grad()\n", "", "gradients are expected to be cleared once"),
        ("opt.step()\n", "opt.step()\n    print(1) if epoch else opt.zero_grad()\n",
         "this has no place in fit"),
        ("opt.step()", "opt.step(closure)", "without more"),
        ("loss.backward()", "loss.backward(retain_graph=True)", "takes a loss and nothing else"),
        ("loss.backward()", "loss.backward()\n        loss.backward()", "several backward passes"),
        ("range(2)", "range(1, 2)", "a script's own resuming"),
        ("range(2)", "count()", "the number of epochs is not that of a range"),
        ("enumerate(loader)", "enumerate(data)", "it is not seen that this is a DataLoader"),
        ("y)\n", "y) * epoch\n", "the loss depends on `epoch` of the loop"),
        ("y)\n", "y) + 0.1 * i\n", "the loss depends on `i` of the loop"),
        ("opt.step()\n", "opt.step()\n        if i > 3:\n            break\n", "no place in fit"),
        ("opt.step()\n", "opt.step()\nprint(loss.item())\n", "it reads `loss`, which the"),
        ("opt.step()\n", "opt.step()\nprint(opt.state_dict())\n", "nothing else has them"),
        ("opt.step()\n", "opt.step()\n    sched.step()\n", "no place in fit"),
        ("loss = loss", "with torch.autocast('cpu'):\n            loss = loss", "no place in fit"),
    ],
)  # fmt: skip
def test_what_has_no_place_in_fit_is_refused_by_name(old: str, new: str, said: str) -> None:
    assert old in LOOP
    assert said in refusal(HEAD + LOOP.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("SGD(model.parameters()", "SGD([{'params': model.parameters()}]",
         "not built over model.parameters(), of a model with a name"),
        ("MSELoss()", 'MSELoss(reduction="sum")', "a loss that is no mean over samples"),
        ("import torch\n", "import torch\nunipar = 1\n", "something is named `unipar` already"),
    ],
)  # fmt: skip
def test_what_is_built_otherwise_is_refused_by_name(old: str, new: str, said: str) -> None:
    assert old in HEAD
    assert said in refusal(HEAD.replace(old, new, 1) + LOOP)


@pytest.mark.parametrize("fill", ["kept.append(loss.item())", "kept[i] = loss.item()"])
def test_figures_that_are_used_after_the_loop_are_refused(fill: str) -> None:
    noisy = f"kept = {{}}\n{LOOP}        {fill}\n"
    fold(HEAD + noisy)
    assert "it reads `kept`, which the loop fills" in refusal(f"{HEAD}{noisy}print(kept)\n")


def test_a_scheduler_of_epochs_is_refused() -> None:
    scheduler = "sched = torch.optim.lr_scheduler.StepLR(opt, 3)\n"
    said = refusal(HEAD + scheduler + LOOP + "    sched.step()\n")
    assert "this scheduler is stepped once an epoch; fit steps one at every step" in said


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (" / 4", "", "a step is on the sum of their means"),
        (" / 4", " / 8", "a step is on the sum of their means"),
        ("i + 1", "i", "a step is expected under `if (i + 1) % n == 0:`"),
        (
            "            opt.zero_grad()\n",
            "        opt.zero_grad()\n",
            "it is done at every batch",
        ),
        ("== 0:", "== 0 or rest(i):", "it cannot be seen when a step is taken"),
    ],
)
def test_accumulation_of_another_kind_is_refused(old: str, new: str, said: str) -> None:
    assert old in ACCUMULATED
    assert said in refusal(HEAD + ACCUMULATED.replace(old, new))


def test_scripts_of_frameworks_are_refused() -> None:
    source = (HEAD + LOOP).replace(
        "import torch\n",
        "import torch, torch.distributed\ntorch.distributed.init_process_group()\n",
    )
    assert "loops of one device are folded into fit" in refusal(source)


def test_the_command_folds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD + LOOP)
    assert main(["migrate", str(script), "--to", "fit"]) == 0
    assert "unipar.fit(" in (tmp_path / "train_unipar.py").read_text()
    script.write_text(HEAD + LOOP.replace("range(2)", "range(1, 2)"))
    assert main(["migrate", str(script), "--to", "fit", "--check"]) == 2
    assert "Leave --to fit out: the loop then stays as it is" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "over", "step"),
    [
        ("", "tqdm(enumerate(loader), total=len(loader))", ""),
        ("    bar = tqdm(enumerate(loader))\n", "bar", "        bar.set_postfix(loss=1.0)\n"),
        ("    bar = tqdm(enumerate(loader))\n", "bar", "        bar.update(1)\n"),
    ],
)
@pytest.mark.parametrize("module", ["tqdm", "tqdm.auto", "tqdm.notebook"])
def test_progress_bars_go(module: str, before: str, over: str, step: str) -> None:
    loop = LOOP.replace("enumerate(loader)", over).replace("    for i", f"{before}    for i") + step
    code = fold(f"from {module} import tqdm\n{HEAD}{loop}").code
    assert FOLDED in code
    assert "bar" not in code


def test_what_updates_more_than_a_progress_bar_is_refused() -> None:
    source = f"{HEAD}average = make(model)\n{LOOP}        average.update(1)\n"
    (note,) = migrate_source(source, to="fit").notes
    assert note.construct == "average.update(1)"
    assert note.why == "this has no place in fit."


def test_schedulers_of_transformers_are_steps_too() -> None:
    made = "get_scheduler('linear', optimizer=opt, num_warmup_steps=2, num_training_steps=8)"
    head = f"from transformers import get_scheduler\n{HEAD}rates = {made}\n"
    code = fold(f"{head}{LOOP}        rates.step()\n").code
    assert f"    lr_scheduler=lambda opt: {made},\n" in code
    assert "rates" not in code


def test_a_pretrained_model_is_saved_by_one_process() -> None:
    end = "model.save_pretrained('out', max_shard_size='1GB')\n"
    code = fold(HEAD + LOOP + end).code
    assert "folded.save_pretrained(model, 'out', max_shard_size='1GB')\n" in code
    (note,) = [
        one for one in migrate_source(HEAD + end + LOOP, to="fit").notes if one.kind == "refused"
    ]
    assert note.why == "it cannot be seen whether this is saved after training."


HELD_OUT = """\
    with torch.no_grad():
        total = 0
        for x, y in held_out:
            total += loss_fn(model(x), y).item()
"""
FUNCTION = """\
@torch.no_grad()
def evaluate(model, data):
    model.eval()
    total = 0
    for x, y in data:
        total += loss_fn(model(x), y).item()
    return total
"""


@pytest.mark.parametrize(
    ("before", "first", "last", "line"),
    [
        ("model.eval()\n", "", "", 9),
        ("", "    model.eval()\n", "", 10),
        ("", "", f"    model.eval()\n{HELD_OUT}", 15),
        ("", "", f"    model.train(False)\n{HELD_OUT}", 15),
        (FUNCTION, "", "    print(evaluate(model, held_out))\n", 11),
        ("", "    model.train()\n", f"    model.eval()\n{HELD_OUT}", 0),
        ("", "", f"    model.eval()\n{HELD_OUT}    model.train()\n", 0),
        ("model.eval()\n", "    model.train()\n", "", 0),
        (FUNCTION, "    model.train()\n", "    print(evaluate(model, held_out))\n", 0),
        ("", "", HELD_OUT, 0),
    ],
)
def test_training_in_eval_mode_is_called_out(before: str, first: str, last: str, line: int) -> None:
    loop = LOOP.replace("    for i", f"{first}    for i")
    held_out = "held_out = DataLoader([1])\n"
    notes = [one.why for one in fold(HEAD + held_out + before + loop + last).notes]
    told = [why for why in notes if "into eval mode" in why]
    assert len(told) == bool(line)
    assert not line or told[0].startswith(f"line {line} puts the model into eval mode")


@pytest.mark.parametrize("place", ["before", "after"])
def test_clipping_that_does_not_stand_before_the_step_is_refused(place: str) -> None:
    clip = "        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
    loop = (
        LOOP + clip if place == "after" else LOOP.replace("        loss.b", f"{clip}        loss.b")
    )
    (note,) = migrate_source(HEAD + loop, to="fit").notes
    assert note.why == "it is expected between the backward pass and the step."
