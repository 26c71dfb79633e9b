"""Parameter groups that stand in variables."""

from __future__ import annotations

import pytest
from telling import refusal

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
        "params, rest = [], []\nfor n, p in model.named_parameters():\n"
        "    (params if 'bias' in n else rest).append(p)\n",
        "found = dict(model.named_parameters())\nparams = []\nfor n in found:\n"
        "    params += [found[n]]\nprint(len(params))\n",
    ],
)
def test_variables_with_other_uses_stay_as_they_are(lines: str) -> None:
    code = migrate_source(HEAD + lines + "opt = AdamW(params)\n" + LOOP).code
    assert lines in code
    assert "opt = script.prepare(model, optimizer=lambda _: AdamW(params)).optimizer\n" in code


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("params = choose(model)\n", "cannot be seen which model's parameters these are"),
        ("params = list(model.parameters())\nparams.extend(other.parameters())\n",
         "one optimizer over several models"),
        ("opt, params = None, []\n", "cannot be seen which model's parameters these are"),
    ],
)  # fmt: skip
def test_variables_of_other_models_are_refused(lines: str, said: str) -> None:
    head = HEAD + "other = torch.nn.Linear(4, 1)\n"
    assert said in refusal(head + lines + "opt = AdamW(params)\n" + LOOP)


GPT = """\
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
    def forward(self, x):
        return self.linear(x)
    def optimizers(self, lr):
        found = {n: p for n, p in self.named_parameters() if p.requires_grad}
        decay = [p for p in found.values() if p.dim() >= 2]
        groups = [{"params": decay, "weight_decay": 0.1},
                  {"params": [p for p in found.values() if p.dim() < 2]}]
        print(len(decay))
        optimizer = torch.optim.AdamW(groups, lr=lr)
        return optimizer
class Deeper(Net):
    pass
model = Deeper()
opt = model.optimizers(0.1)
"""


def test_a_model_may_build_its_own_optimizer() -> None:
    migration = migrate_source(GPT + LOOP)
    code = migration.code
    assert "optimizer = script.prepare(self, optimizer=lambda _: torch.optim.AdamW(groups" in code
    assert "(script.engine(model)(x) - y)" in code
    assert "self.linear(x)" in code
    assert "fit" in refusal(GPT + LOOP, to="fit")
