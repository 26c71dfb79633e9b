"""The data that the training loop goes over."""

from __future__ import annotations

LOADER = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
