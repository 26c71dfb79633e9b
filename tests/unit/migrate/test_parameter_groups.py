"""Parameter groups that stand in variables."""

from __future__ import annotations

import pytest

from unipar.migrate import migrate_source

HEAD = "import torch\nfrom torch.optim import AdamW\nmodel = torch.nn.Linear(4, 1)\n"
LOOP = """\
for x, y in data:
    opt.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    opt.step()
"""


def test_groups_in_a_variable_are_made_when_the_optimizer_is() -> None:
    code = migrate_source(
        HEAD + "named = list(model.named_parameters())\n"
        "groups = [{'params': [p for n, p in named if 'bias' in n], 'lr': 0.1},\n"
        "          {'params': [p for n, p in named if 'bias' not in n]}]\n"
        "opt = AdamW(groups, lr=0.2)\n" + LOOP
    ).code
    assert "named = lambda: list(model.named_parameters())\n" in code
    assert "groups = lambda: [{'params': [p for n, p in named() if 'bias' in n]" in code
    assert "script.prepare(model, optimizer=lambda _: AdamW(groups(), lr=0.2)).optimizer" in code


def test_a_list_of_parameters_is_one_too() -> None:
    code = migrate_source(
        HEAD + "params = [p for p in model.parameters() if p.requires_grad]\n"
        "opt = AdamW(params)\n" + LOOP
    ).code
    assert "params = lambda: [p for p in model.parameters() if p.requires_grad]\n" in code
    assert "lambda _: AdamW(params())" in code


@pytest.mark.parametrize(
    "lines",
    [
        "params = list(model.parameters())\nprint(len(params))\n",
        "params = list(model.parameters())\nparams = params[1:]\n",
        "params = []\nparams.extend(model.parameters())\n",
        "params = choose(model)\n",
    ],
)
def test_variables_with_other_uses_are_refused(lines: str) -> None:
    source = HEAD + lines + "opt = AdamW(params)\n" + LOOP
    migration = migrate_source(source)
    assert migration.code == source
    assert "it cannot be seen which model's parameters these are" in str(migration.notes[0])
