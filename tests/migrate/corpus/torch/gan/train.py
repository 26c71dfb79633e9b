# A small GAN: two models, two optimizers.
import torch
import torch.nn as nn
from torch.optim import Adam
from torch.utils.data import DataLoader

nz = 4
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(nz, 16), nn.ReLU(True), nn.Linear(16, 6))

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, x):
        return self.main(x).view(-1)


def weights_init(m):
    if isinstance(m, nn.Linear):
        nn.init.normal_(m.weight, 0.0, 0.1)


torch.manual_seed(999)
real_data = torch.randn(64, 6) * torch.tensor([1.0, 2, 3, 4, 5, 6])
dataloader = DataLoader(real_data, batch_size=16, shuffle=True)

netG = Generator().to(device)
netG.apply(weights_init)
netD = Discriminator().to(device)
netD.apply(weights_init)
criterion = nn.BCEWithLogitsLoss()
optimizerD = Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))

for epoch in range(2):
    for i, data in enumerate(dataloader, 0):
        # (1) Update D
        netD.zero_grad()
        real = data.to(device)
        label = torch.full((real.size(0),), 1.0, device=device)
        errD_real = criterion(netD(real), label)
        errD_real.backward()
        noise = torch.randn(real.size(0), nz, device=device)
        fake = netG(noise)
        label.fill_(0.0)
        errD_fake = criterion(netD(fake.detach()), label)
        errD_fake.backward()
        optimizerD.step()

        # (2) Update G
        netG.zero_grad()
        label.fill_(1.0)
        errG = criterion(netD(fake), label)
        errG.backward()
        optimizerG.step()
    print(f"[{epoch}] D {errD_real.item() + errD_fake.item():.4f}  G {errG.item():.4f}")
