"""A student of a teacher that is only looked at, in bf16; the loss in autocast, weights filtered."""

import torch
from lightning_fabric import Fabric, is_wrapped
from lightning_fabric.plugins import MixedPrecision
from lightning_fabric.utilities.seed import seed_everything
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def net(width):
    return nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 3))


fabric = Fabric(
    accelerator="cpu", devices=2, strategy="ddp",
    plugins=[MixedPrecision("bf16-mixed", device="cpu")],
)
fabric.launch()
seed_everything(4)
x = torch.randn(72, 5)
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x), batch_size=6, shuffle=True))
# Fabric under DDP takes no model without a parameter that learns.
teacher = fabric.setup(net(24).eval())
student = net(8)
student, optimizer = fabric.setup(student, torch.optim.AdamW(student.parameters(), lr=0.02))
assert is_wrapped(student) and is_wrapped(loader) and not is_wrapped(x)
for epoch in range(3):
    for (x,) in loader:
        with torch.no_grad():
            wanted = teacher(x)
        found = student(x)
        assert found.dtype == torch.float32
        with fabric.autocast():
            near = F.kl_div(F.log_softmax(found, -1), F.softmax(wanted, -1), reduction="batchmean")
        optimizer.zero_grad()
        fabric.backward(near)
        optimizer.step()
    fabric.print(f"epoch {epoch}: {near.item():.4f}")
fabric.save("student.ckpt", {"student": student}, filter={"student": lambda name, _: "bias" not in name})
kept = fabric.load("student.ckpt")
fabric.print(sorted(kept["student"]))
