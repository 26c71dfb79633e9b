"""Clipping, in the ways that scripts ask for it."""

from __future__ import annotations

import pytest
import torch
from telling import refusal

from unipar.migrate import migrate_source
from unipar.migrated import script
from unipar.strategy import StepResult

SCRIPT = """\
import argparse, torch
from torch import nn
args = argparse.ArgumentParser().parse_args()
limit = 0.5
model = nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in data:
    loss = (model(x) - y).square().mean()
    loss.backward()
    CLIP
    opt.step()
    opt.zero_grad()
"""
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), limit)"


@pytest.mark.parametrize("name", ["norm", "stats.norm"])
def test_the_norm_is_known_after_the_step(name: str) -> None:
    code = migrate_source(SCRIPT.replace("CLIP", f"{name} = {CLIP}")).code
    assert "max_grad_norm=limit)" in code
    assert "clip_grad_norm_" not in code
    assert f"    {name} = script.grad_norm(script.engine(opt).step())\n" in code


@pytest.mark.parametrize(
    "lines",
    [
        f"norm = {CLIP}\n    print(norm)",
        f"print({CLIP})",
        f"norm = total = {CLIP}",
        f"if limit:\n        norm = {CLIP}",
    ],
)
def test_a_norm_that_is_used_before_the_step_is_refused(lines: str) -> None:
    assert "its norm is used before the step" in refusal(SCRIPT.replace("CLIP", lines))


def test_the_norm_is_a_tensor_as_torch_gives_it() -> None:
    assert torch.equal(script.grad_norm(StepResult(0.0, 1, 2.5)), torch.tensor(2.5))
    assert script.grad_norm(StepResult(0.0, 1)).isnan()


@pytest.mark.parametrize(
    "test", ["limit", "limit != 0.0", "args.clip is not None and args.clip > 0", "not args.plain"]
)
def test_clipping_on_a_condition_is_the_engines(test: str) -> None:
    code = migrate_source(SCRIPT.replace("CLIP", f"if {test}:\n        {CLIP}")).code
    assert f"max_grad_norm=limit if {test} else None)" in code
    assert "clip_grad_norm_" not in code


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("loss > 1", "the condition `loss > 1` is not known where the optimizer is built"),
        ("late(3)", "the condition `late(3)` is not known where the optimizer is built"),
    ],
)
def test_clipping_by_what_training_finds_is_refused(test: str, said: str) -> None:
    assert said in refusal(SCRIPT.replace("CLIP", f"if {test}:\n        {CLIP}"))


def test_settings_that_are_a_parameters_default_are_followed() -> None:
    source = """\
import torch
class Config:
    clip = 1.0
def make(model, opt, cfg):
    def step(x):
        opt.zero_grad()
        loss = model(x).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        opt.step()
    return step
def main(cfg=Config()):
    model = torch.nn.Linear(4, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    make(model, opt, cfg)(torch.ones(4))
main()
"""
    assert "max_grad_norm=cfg.clip)" in migrate_source(source).code


BRANCHES = """\
if TEST:
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        opt.step()
    else:"""


@pytest.mark.parametrize("clears_first", [False, True])
def test_a_step_in_either_branch_is_clipped_on_its_condition(clears_first: bool) -> None:
    text = SCRIPT.replace("CLIP", BRANCHES).replace(
        "    opt.step()\n    opt", "        opt.step()\n    opt"
    )
    text = text.replace("TEST", "limit")
    if clears_first:
        text = text.replace("    opt.zero_grad()\n", "")
        text = text.replace("    loss =", "    opt.zero_grad()\n    loss =")
    code = migrate_source(text).code
    assert "max_grad_norm=limit if limit else None)" in code
    assert code.count("script.engine(opt).step()") == 2
    said = refusal(text.replace("if limit", "if loss > 1"))
    assert "the condition `loss > 1` is not known where the optimizer is built" in said


@pytest.mark.parametrize("norm", ["", "nn.utils.clip_grad_norm_(model.parameters(), 2 * limit)"])
def test_steps_that_are_not_clipped_alike_are_refused(norm: str) -> None:
    first = SCRIPT.replace("CLIP", CLIP)
    again = (
        "for x"
        + SCRIPT.replace("    CLIP\n", f"    {norm}\n" if norm else "").partition("for x")[2]
    )
    assert "a strategy clips every step alike" in refusal(first + again)
    assert migrate_source(first + "for x" + first.partition("for x")[2]).changed
