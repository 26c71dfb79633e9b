import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 2
ACCUMULATE = 4

set_seed(42)
accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE, cpu=True)

# two moons, more or less
angle = torch.rand(150) * 3.14159
side = torch.randint(0, 2, (150,))
points = torch.stack([torch.cos(angle) + side, torch.sin(angle) * (1 - 2 * side)], dim=1)
points = points + 0.1 * torch.randn_like(points)

train_set = TensorDataset(points[:118], side[:118])
test_set = TensorDataset(points[118:], side[118:])
train_dataloader = DataLoader(train_set, batch_size=4, shuffle=True)
test_dataloader = DataLoader(test_set, batch_size=8)

model = torch.nn.Sequential(
    torch.nn.Linear(2, 24),
    torch.nn.GELU(),
    torch.nn.Dropout(0.1),
    torch.nn.Linear(24, 2),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=2e-2, total_steps=EPOCHS * len(train_dataloader)
)

model, optimizer, train_dataloader, test_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, test_dataloader, lr_scheduler
)

for epoch in range(EPOCHS):
    model.train()
    for inputs, targets in train_dataloader:
        # the last batches of an epoch make a shorter step
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()

    model.eval()
    right = 0
    total = 0
    for inputs, targets in test_dataloader:
        with torch.no_grad():
            predictions = model(inputs).argmax(dim=-1)
        predictions, targets = accelerator.gather_for_metrics((predictions, targets))
        right += (predictions == targets).sum().item()
        total += targets.numel()
    accelerator.print(f"epoch {epoch}: {right}/{total} right, lr {lr_scheduler.get_last_lr()[0]:.5f}")

accelerator.wait_for_everyone()
accelerator.save(accelerator.unwrap_model(model).state_dict(), "moons.pt")
