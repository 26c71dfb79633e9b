import colossalai
import torch
import torch.nn as nn
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.cluster import DistCoordinator
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import TensorDataset

NUM_EPOCHS = 3
LEARNING_RATE = 2e-3

colossalai.launch_from_torch(seed=77)
coordinator = DistCoordinator()

plugin = TorchDDPPlugin(bucket_cap_mb=4)
booster = Booster(plugin=plugin)

# which of five clusters is a point from?
centers = torch.randn(5, 6)
labels = torch.randint(0, 5, (66,))
train_set = TensorDataset(centers[labels] + 0.5 * torch.randn(66, 6), labels)
train_dataloader = plugin.prepare_dataloader(train_set, batch_size=8, shuffle=True, drop_last=True)

model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 5))
criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
lr_scheduler = MultiStepLR(optimizer, milestones=[1, 2], gamma=0.5)

model, optimizer, criterion, train_dataloader, lr_scheduler = booster.boost(
    model, optimizer, criterion=criterion, dataloader=train_dataloader, lr_scheduler=lr_scheduler
)

for epoch in range(NUM_EPOCHS):
    train_dataloader.sampler.set_epoch(epoch)
    model.train()
    for inputs, targets in train_dataloader:
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        booster.backward(loss, optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
    lr_scheduler.step()
    coordinator.print_on_master(f"epoch {epoch}: loss {loss.item():.4f}")

booster.save_model(model, "clusters.pth")
