"""A generator and a critic with an optimizer each, of which one loss goes through both."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
set_seed(21)
generator = nn.Sequential(nn.Linear(3, 16), nn.LeakyReLU(0.2), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
loader = DataLoader(TensorDataset(torch.randn(44, 2) + 2), batch_size=4, shuffle=True)
generator, critic = accelerator.prepare(generator, critic)
g_opt = torch.optim.Adam(generator.parameters(), lr=2e-3)
c_opt = torch.optim.Adam(critic.parameters(), lr=2e-3)
c_opt, g_opt, loader = accelerator.prepare(c_opt, g_opt, loader)
criterion = nn.BCEWithLogitsLoss()
for epoch in range(2):
    for (real,) in loader:
        critic.zero_grad()
        ones = torch.ones(len(real), 1)
        accelerator.backward(criterion(critic(real), ones))
        fake = generator(torch.randn(len(real), 3))
        accelerator.backward(criterion(critic(fake.detach()), ones - 1))
        c_opt.step()
        generator.zero_grad()
        loss = criterion(critic(fake), ones)
        accelerator.backward(loss)
        g_opt.step()
accelerator.print(f"{accelerator.reduce(loss.detach(), reduction='mean').item():.4f}")
