"""Optimizers that a script chooses among."""

from __future__ import annotations

import pytest
from telling import refusal

from unipar.migrate import migrate_source

SCRIPT = """\
import torch
def build(name, model):
{choice}
model = torch.nn.Linear(4, 1)
opt = build(name, model)
for x in loader:
    opt.zero_grad()
    loss = model(x).sum()
    loss.backward()
    opt.step()
"""
SGD, ADAM = "torch.optim.SGD(model.parameters(), lr=0.1)", "torch.optim.Adam(model.parameters())"
CHOSEN = (
    f"    if name == 'sgd':\n        opt = {SGD}\n    elif name == 'adam':\n        opt = {ADAM}\n"
    "    else:\n        raise ValueError(name)\n    return opt",
    f"    if name == 'sgd':\n        return {SGD}\n    return {ADAM}",
    f"    if name == 'adam':\n        pass\n    else:\n        return {SGD}\n    return {ADAM}",
    f"    return {SGD} if name == 'sgd' else {ADAM}",
    f"    match name:\n        case 'sgd':\n            opt = {SGD}\n        case _:\n"
    f"            opt = {ADAM}\n    return opt",
)
BOTH = (
    f"    if name == 'sgd':\n        opt = {SGD}\n    opt = {ADAM}\n    return opt",
    f"    if name == 'sgd':\n        opt = {SGD}\n        other = {ADAM}\n    return opt",
    f"    match {SGD}:\n        case _:\n            opt = {ADAM}\n    return opt",
    f"    if {SGD}:\n        opt = None\n    else:\n        opt = {ADAM}\n    return opt",
)


@pytest.mark.parametrize("choice", CHOSEN)
def test_each_branch_prepares_its_optimizer(choice: str) -> None:
    migration = migrate_source(SCRIPT.format(choice=choice), file="train.py")
    assert not migration.refused
    assert migration.code.count("script.prepare(model, optimizer=") == 2


@pytest.mark.parametrize("choice", BOTH)
def test_two_of_one_run_are_refused(choice: str) -> None:
    said = refusal(SCRIPT.format(choice=choice))
    assert "a second optimizer over the same model; an engine has one." in said
