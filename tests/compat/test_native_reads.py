"""A script for one device that reads its losses and its gradients does the same on two ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from unipar.migrate import migrate_files
from unipar.migrate.launchers import command
from unipar.migrate.verify import losses_of, with_config

pytestmark = [
    pytest.mark.usefixtures("forked_programs"), pytest.mark.slow, pytest.mark.timeout(200),
]  # fmt: skip

BEGINNING = """\
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

torch.manual_seed(3)
lengths = (3, 9, 4, 7, 2, 8, 5, 6) * 5
data = [(torch.randint(1, 20, (n,)), n % 3) for n in lengths]


def collate(samples):
    words = pad_sequence([words for words, _ in samples], batch_first=True)
    return words, torch.tensor([label for _, label in samples])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, words):
        # Also over what is padded, so it matters up to which length a batch is.
        return self.head(self.embed(words).tanh().mean(1))


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
loader = DataLoader(data, batch_size=8, shuffle=True, collate_fn=collate)
"""
READS_LOSSES = f"""{BEGINNING}
weights = torch.tensor([1.0, 4.0, 0.25])
best = float("inf")
for epoch in range(4):
    for words, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(words), labels, weights)
        loss.backward()
        optimizer.step()
        if loss.item() < best:
            best = loss.item()
        else:
            for group in optimizer.param_groups:
                group["lr"] *= 0.8
"""
MASKS_AND_CLAMPS = f"""{BEGINNING}
for epoch in range(4):
    for words, labels in loader:
        losses = nn.functional.cross_entropy(model(words), labels, reduction="none")
        asked = (words > 5).sum(1) % 3 > 0
        loss = losses[asked].mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad.clamp_(-0.01, 0.01)
        if model.embed.weight.grad.norm() > 0.06:
            optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.step()
"""


DECIDES_BY_COUNTS = f"""{BEGINNING}
for epoch in range(4):
    for words, labels in loader:
        optimizer.zero_grad()
        output = model(words)
        loss = nn.functional.cross_entropy(output, labels)
        loss.backward()
        optimizer.step()
        correct = (output.argmax(1) == labels).float().mean()
        optimizer.param_groups[0]["lr"] = 0.05 * (1.5 - correct.item())
"""


def losses_on_two(root: Path) -> dict[int, list[float]]:
    """The losses of a directory's script, migrated, under ``ddp`` on two ranks."""
    found = migrate_files({"train.py": (root / "train.py").read_text()})["train.py"]
    config = yaml.safe_dump({**found.config, "strategy": "ddp"})
    files = with_config("train.py", {"train.py": found.code}, config)
    return losses_of(root, "train.py", files, command("torchrun", 2), timeout=90)


@pytest.mark.parametrize("script", [READS_LOSSES, MASKS_AND_CLAMPS, DECIDES_BY_COUNTS])
def test_two_ranks_train_as_one_does(script: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script)
    alone = losses_of(tmp_path, "train.py", {}, [sys.executable], timeout=90)[0]
    both = losses_on_two(tmp_path)
    assert [(a + b) / 2 for a, b in zip(both[0], both[1], strict=True)] == pytest.approx(
        alone, rel=2e-5
    )
    # Rates that were lowered on one rank alone would show in what comes after.
    assert len(alone) == 20
    assert len(set(alone)) == 20
