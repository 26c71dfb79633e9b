"""A loop of Colossal-AI's."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import colossalai
import torch
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin


def train(job: Any) -> None:
    colossalai.launch_from_torch()
    plugin = TorchDDPPlugin()
    booster = Booster(plugin=plugin)
    model = job.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = plugin.prepare_dataloader(job.data, batch_size=job.batch_size, shuffle=True)
    model, optimizer, *_ = booster.boost(model, optimizer)
    for inputs, targets in job.turns(loader):
        optimizer.zero_grad()
        loss = job.loss(model(inputs), targets)
        booster.backward(loss, optimizer)
        optimizer.step()
