"""Where a script puts its tensors, in the ways that scripts say it."""

from __future__ import annotations

import pytest

from unipar.migrate import migrate_source

LOOP = """\
model = torch.nn.Linear(4, 1).to(device)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in data:
    opt.zero_grad()
    loss = (model(x.to(device)) - y.to(device)).square().mean()
    loss.backward()
    opt.step()
"""
MPS = '"mps" if torch.backends.mps.is_available() else "cpu"'
ACCELERATOR = "torch.accelerator"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f'device = ("cuda" if torch.cuda.is_available() else {MPS})', "script.device().type"),
        (f'device = torch.device("cuda" if torch.cuda.is_available() else {MPS})',
         "script.device()"),
        (f"device = {ACCELERATOR}.current_accelerator().type if "
         f'{ACCELERATOR}.is_available() else "cpu"', "script.device().type"),
        ('device = f"cuda:{rank}" if torch.cuda.is_available() else "cpu"',
         "str(script.device())"),
        ('device = "cuda"', "script.device().type"),
        ('device: str = "cuda:0"', "script.device().type"),
        ('device = f"cuda:{rank}"', "str(script.device())"),
        ("cfg = {'device': 'cuda'}\ndevice = cfg['device']", "{'device': script.device().type}"),
        ("parser.add_argument('--device', default='cuda')\ndevice = parser.parse_args().device",
         "default=script.device().type"),
        ("def main(device='cuda'): ...\ndevice = None", "main(device=script.device().type)"),
        ("x = torch.zeros(3, device='cuda')\ndevice = x.device",
         "torch.zeros(3, device=script.device().type)"),
    ],
)  # fmt: skip
def test_the_run_decides_on_the_device(before: str, after: str) -> None:
    migration = migrate_source(f"import torch\nrank = 0\n{before}\n{LOOP}")
    assert after in migration.code
    assert "cuda" not in migration.code
    assert "device" not in migration.config


def test_a_question_about_the_device_is_no_choice_of_one() -> None:
    source = f'import torch\ndevice = "cpu"\npinned = device == "cuda"\n{LOOP}'
    migration = migrate_source(source)
    assert 'pinned = device == "cuda"' in migration.code
    assert migration.config["device"] == "cpu"
