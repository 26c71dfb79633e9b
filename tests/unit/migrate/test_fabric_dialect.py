"""What ranks write together is refused where they part, and not where they all know the same."""

from __future__ import annotations

import pytest

from unipar.migrate import migrate_source

SCRIPT = """\
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

fabric = Fabric(devices=2)
fabric.launch()
loader = fabric.setup_dataloaders(DataLoader(list(range(9)), batch_size=2))
model = torch.nn.Linear(1, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
for x in loader:
    fabric.backward(model(x).sum())
    optimizer.step()
    optimizer.zero_grad()
if {test}:
    fabric.save("last.ckpt", {{"model": model}})
"""


@pytest.mark.parametrize(
    ("test", "refused"),
    [
        ("fabric.world_size > 1", False),
        ("fabric.is_global_zero", True),
        ("x.sum() > 3", True),
        ("fabric.all_reduce(x.sum()) > 3", False),
    ],
)
def test_a_fabric_is_the_same_on_all_ranks_but_where_it_tells_the_rank(
    test: str, refused: bool
) -> None:
    notes = [str(one) for one in migrate_source(SCRIPT.format(test=test)).notes]
    assert [f"`{test}` decides if a rank comes to it" in one for one in notes] == [True] * refused
