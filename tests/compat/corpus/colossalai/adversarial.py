"""Two networks against each other, each with its optimizer, under one Booster."""

import colossalai
import torch
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.utils import get_current_device
from torch import nn
from torch.utils.data import TensorDataset

LATENT = 3

colossalai.launch_from_torch(seed=8)
plugin = TorchDDPPlugin(broadcast_buffers=False)
booster = Booster(plugin=plugin)
device = get_current_device()

real = torch.randn(48, 2) * torch.tensor([0.4, 1.2]) + torch.tensor([2.0, -1.0])
dataloader = plugin.prepare_dataloader(TensorDataset(real), batch_size=8, shuffle=True)
generator = nn.Sequential(nn.Linear(LATENT, 16), nn.ReLU(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=5e-3, betas=(0.5, 0.9))
optimizer_d = torch.optim.Adam(critic.parameters(), lr=5e-3, betas=(0.5, 0.9))
criterion = nn.BCEWithLogitsLoss()
generator, optimizer_g, criterion, dataloader, _ = booster.boost(generator, optimizer_g, criterion, dataloader)
critic, optimizer_d, _, _, _ = booster.boost(critic, optimizer_d)

for epoch in range(4):
    dataloader.sampler.set_epoch(epoch)
    for (batch,) in dataloader:
        batch = batch.to(device)
        ones, zeros = torch.ones(len(batch), 1, device=device), torch.zeros(len(batch), 1, device=device)

        optimizer_d.zero_grad()
        fake = generator(torch.randn(len(batch), LATENT, device=device))
        loss_d = criterion(critic(batch), ones) + criterion(critic(fake.detach()), zeros)
        booster.backward(loss_d, optimizer_d)
        optimizer_d.step()

        optimizer_g.zero_grad()
        loss_g = criterion(critic(fake), ones)
        booster.backward(loss_g, optimizer_g)
        optimizer_g.step()
