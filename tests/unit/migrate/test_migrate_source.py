"""What is rewritten, what is refused, and that nothing else is touched."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

import pytest
from telling import refusal

from unipar.errors import ConfigError
from unipar.migrate import Migration, migrate_source

HEAD = """\
import torch
from torch import nn
model = nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
"""
LOOP = """\
for x, y in data:
    opt.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    opt.step()
"""
DDP = """\
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def test_the_smallest_loop() -> None:
    migration = migrate_source(HEAD + LOOP)
    assert migration.changed
    assert migration.dialect == "torch"
    assert "script.backward(loss, opt)\n    script.engine(opt).step()\n" in migration.code
    assert "zero_grad" not in migration.code
    assert migration.config == {"strategy": "auto", "device": "cpu"}


def test_names_are_followed_not_read() -> None:
    source = """\
import torch as t
import torch.optim as o
make = o.Adam
class Holder:
    def __init__(self, net):
        self.inner = net
        self.tool = make(self.inner.parameters())
    def go(self, data):
        for x in data:
            self.tool.zero_grad()
            value = self.inner(x).sum()
            value.backward()
            self.tool.step()
Holder(t.nn.Linear(2, 2)).go([])
"""
    code = migrate_source(source).code
    assert "script.engine(self.inner)(x).sum()" in code
    assert "script.backward(value, self.tool)" in code
    assert "lambda named: make([p for _, p in named])" in code


@pytest.mark.parametrize(
    "made",
    [
        "(torch.optim.SGD if fast else torch.optim.Adam)",
        "getattr(torch.optim, args.optimizer)",
        "getattr(torch.optim, 'SGD')",
        "{'sgd': torch.optim.SGD, 'adam': torch.optim.Adam}[args.optimizer]",
    ],
)
def test_an_optimizer_of_one_class_or_another_is_prepared_once(made: str) -> None:
    code = migrate_source(HEAD.replace("torch.optim.SGD", made) + LOOP).code
    assert f"script.prepare(model, optimizer=lambda named: {made}([p for _, p in named]" in code
    assert code.count("script.prepare") == 1


def test_an_optimizer_may_have_groups_for_parts_of_its_model() -> None:
    groups = "[{'params': model[0].parameters()}, {'params': model[1].parameters(), 'lr': 1}]"
    code = migrate_source(HEAD.replace("model.parameters()", groups) + LOOP).code
    assert f"script.prepare(model, optimizer=lambda _: torch.optim.SGD({groups}" in code
    two = groups.replace("model[1]", "other")
    assert "over several models" in refusal(HEAD.replace("model.parameters()", two) + LOOP)


def test_an_average_of_weights_is_no_optimizer() -> None:
    source = HEAD + "mean = nn.Linear(4, 1)\n" + LOOP + (
        "    for a, b in zip(mean.parameters(), model.parameters()):\n"
        "        a.data.lerp_(b.data, 0.1)\n"
    )  # fmt: skip
    code = migrate_source(source).code
    assert "in zip(mean.parameters(), model.parameters()):" in code
    assert code.count("script.prepare") == 1


def test_text_that_only_looks_alike_is_left() -> None:
    source = HEAD + LOOP + 'print("loss.backward()")\nclass DDP: ...\nDDP()\n'
    assert migrate_source(source).code.endswith('print("loss.backward()")\nclass DDP: ...\nDDP()\n')


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_comments_and_formatting_outside_the_changes_stay(newline: str) -> None:
    odd = "table = { 'a':1 ,\n          'b' : 2 }   # kept\n\n\nif True :\n\tpass\n"
    source = (HEAD + odd + LOOP.replace("zero_grad()", "zero_grad()  # first")).replace(
        "\n", newline
    )
    code = migrate_source(source).code
    assert odd.replace("\n", newline) in code
    assert f"    # first{newline}" in code
    assert code.count("\n") == code.count(newline)
    before, after = source.splitlines(), code.splitlines()
    assert [line for line in after if "script" not in line] == [
        line.replace("opt.zero_grad()  ", "") for line in before
        if not any(part in line for part in ("model(x)", "backward", "step()", "optim."))
    ]  # fmt: skip


def test_a_file_with_nothing_to_migrate_comes_back_as_it_is() -> None:
    for source in ("", "x = 1\n", "import torch\r\nprint( torch.ones(1) )", LOOP, HEAD):
        migration = migrate_source(source)
        assert migration.code == source
        assert not migration.changed


def test_a_syntax_error_has_its_file_and_line() -> None:
    with pytest.raises(ConfigError, match=r"^broken\.py:2: syntax error: "):
        migrate_source("import torch\nfor x in:\n", file="broken.py")


def test_an_unknown_dialect_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no dialect 'jax'. Choose one of auto, .*torch"):
        migrate_source("", dialect="jax")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("loss.backward()", "loss.backward(retain_graph=True)", "takes a loss and nothing else"),
        ("opt.step()", "opt.step(closure)", "a closure runs the model several times"),
        ("    opt.zero_grad()\n", "", "gradients are never cleared"),
        (
            "opt.step()",
            "nn.utils.clip_grad_value_(model.parameters(), 1)\n    opt.step()",
            "clipped by value",
        ),
        ("opt.step()", "model.weight.grad.mul_(2)\n    opt.step()", "gradients are read"),
        ("model(x)", "model.forward(x)", "goes around the engine's forward"),
        ("model(x)", "helper(model, x)", "code that is not seen"),
        ("opt.step()", "if n % 4 == 0: opt.step()", "thrown away here"),
        ("opt.step()", "opt.zero_grad()\n    opt.step()", "thrown away here"),
        ("opt.step()\n", "if n % 4 == 0: opt.step()\nopt.zero_grad()\n", "thrown away here"),
    ],
)
def test_what_is_not_safe_is_refused(old: str, new: str, said: str) -> None:
    assert old in LOOP
    assert said in refusal(HEAD + LOOP.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("model = nn", "model = torch.compile(nn.Linear(4, 1))\nother = nn", "compiled model"),
        ("SGD(model.parameters()", "SGD(weights", "which model's parameters"),
        (
            "SGD(model.parameters()",
            "SGD(list(model.parameters()) + list(head.parameters())",
            "one optimizer over several models",
        ),
        ("torch.optim.SGD", "torch.optim.LBFGS", "several times in a step"),
        ("import torch\n", "import torch\nscript = 1\n", "is named `script` too"),
    ],
)
def test_what_no_engine_holds_is_refused(old: str, new: str, said: str) -> None:
    assert old in HEAD
    assert said in refusal(HEAD.replace(old, new, 1) + LOOP)


def test_clipping_before_unscaling_is_called_out_with_its_effect() -> None:
    source = (
        HEAD
        + """\
scaler = torch.amp.GradScaler("cuda")
for x, y in data:
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = (model(x) - y).square().mean()
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
"""
    )
    assert "max_norm / 65536" in refusal(source)
    fixed = source.replace("    nn.utils", "    scaler.unscale_(opt)\n    nn.utils")
    migration = migrate_source(fixed)
    assert migration.config["precision"] == "fp16"
    assert "max_grad_norm=1.0" in migration.code
    assert "scaler = None\n" in migration.code


def test_a_scaler_that_is_asked_for_is_refused() -> None:
    source = (
        HEAD
        + """\
scaler = torch.amp.GradScaler("cuda")
for x in data:
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).mean()
    if scaler is not None:
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
"""
    )
    assert "what is done depends on there being a GradScaler" in refusal(source)


def test_a_step_that_is_handed_on_is_refused() -> None:
    assert "the method is handed on" in refusal(HEAD + LOOP + "hooks.append(opt.step)\n")


def test_training_without_an_optimizer_in_sight_is_refused() -> None:
    assert "no optimizer is seen" in refusal("import torch\n" + LOOP)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("from helpers import *", "it hides what names mean"),
        ("from apex import amp", "takes part in training in ways that are not followed"),
    ],
)
def test_imports_that_hide_what_happens_are_refused(line: str, said: str) -> None:
    assert said in refusal(f"{HEAD}{line}\n{LOOP}")


def test_names_of_the_script_are_not_hidden() -> None:
    source = HEAD.replace("lr=0.1", "lr=named[_]").replace("model =", "named, _ = [1], 0\nmodel =")
    code = migrate_source(source + LOOP).code
    assert "lambda named_parameters_: torch.optim.SGD([p for _, p in named_parameters_]" in code


def test_one_loss_for_two_optimizers_is_refused() -> None:
    source = HEAD + "head = nn.Linear(1, 1)\nopt2 = torch.optim.SGD(head.parameters(), lr=1)\n"
    loop = LOOP.replace("opt.zero_grad()", "opt.zero_grad(); opt2.zero_grad()")
    loop = loop.replace("model(x)", "head(model(x))").replace(
        "opt.step()", "opt.step(); opt2.step()"
    )
    assert "several optimizers step on the gradients of one backward pass" in refusal(source + loop)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("DDP(torch.nn.Linear(4, 1))", "DDP(torch.nn.Linear(4, 1), process_group=g)",
         "unipar.yaml cannot say `process_group=g`"),
        ('dist.init_process_group("gloo")', "if rank > 0:\n    dist.init_process_group()",
         "only some ranks come to it"),
        ('"gloo"', '"gloo", init_method="tcp://10.0.0.1:1"', "meet at a place of their own"),
        ('"gloo")', '"gloo")\ng = dist.new_group([0])', "groups of ranks"),
    ],
)  # fmt: skip
def test_what_ddp_scripts_do_on_their_own_is_refused(old: str, new: str, said: str) -> None:
    assert old in DDP
    assert said in refusal(DDP.replace(old, new) + LOOP)


def test_options_of_ddp_go_into_the_run_config() -> None:
    source = DDP.replace("Linear(4, 1))", "Linear(4, 1), static_graph=True, bucket_cap_mb=5)")
    migration = migrate_source(source + LOOP)
    assert migration.config["strategy"] == {
        "name": "ddp", "static_graph": True, "bucket_cap_mb": 5
    }  # fmt: skip


def test_what_changes_training_is_called_out_and_noted_in_the_code() -> None:
    source = DDP.replace("lr=0.1", "lr=0.1 * dist.get_world_size()") + LOOP
    migration = migrate_source(source, file="train.py")
    (note,) = migration.notes
    assert note.kind == "training"
    assert "on 8 ranks eight times" in note.why
    assert note.line == 5
    assert "# unipar: the learning rate is multiplied by the number of ranks" in migration.code


def library() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in sorted(root.rglob("*.py")) if "site-packages" not in p.parts]
    return [p for p in files if p.stat().st_size < 40_000]


@pytest.mark.timeout(300)
def test_any_valid_file_is_migrated_or_noted_and_still_parses() -> None:
    files = library()
    # How many there are depends on how the system divides the library into packages.
    taken = files[:: len(files) // 9]
    assert len(taken) > 7
    for path in taken:
        try:
            source = path.read_text()
            ast.parse(source)
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        assert migrate_source(source).code == source
        for tail in (HEAD + LOOP, DDP + LOOP):
            migration: Migration = migrate_source(f"{source}\n{tail}")
            ast.parse(migration.code)
            assert migration.changed != migration.refused, path
            if migration.changed:
                assert migrate_source(migration.code).code == migration.code
