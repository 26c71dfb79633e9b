import deepspeed
import torch
import torch.nn as nn
from torch.utils.data import TensorDataset

# torchrun --nproc-per-node 2 train.py

torch.manual_seed(42)

config = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.99], "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "steps_per_print": 1000,
}

model = nn.Sequential(nn.Linear(5, 32), nn.GELU(), nn.Linear(32, 1))
x = torch.randn(176, 5)
dataset = TensorDataset(x, (x[:, :2] * x[:, 2:4]).sum(1, keepdim=True))

engine, optimizer, loader, _ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    training_data=dataset,
    config=config,
)
print(f"rank {engine.global_rank} of {engine.world_size}: {engine.train_micro_batch_size_per_gpu()} samples a step")

for epoch in range(2):
    for xb, yb in loader:
        xb, yb = xb.to(engine.device), yb.to(engine.device)
        loss = nn.functional.mse_loss(engine(xb), yb)
        engine.backward(loss)
        engine.step()
    if engine.global_rank == 0:
        print(epoch, loss.item(), engine.get_lr())
