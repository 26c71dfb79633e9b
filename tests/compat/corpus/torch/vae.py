"""An autoencoder whose loss is a sum over the batch."""

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(24, 12)
        self.fc21, self.fc22 = nn.Linear(12, 4), nn.Linear(12, 4)
        self.fc3, self.fc4 = nn.Linear(4, 12), nn.Linear(12, 24)

    def forward(self, x):
        h = F.relu(self.fc1(x))
        mu, logvar = self.fc21(h), self.fc22(h)
        # Without noise, so that ranks compute what one process computes.
        z = mu
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x, reduction="sum")
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + KLD


model = VAE()
optimizer = optim.Adam(model.parameters(), lr=1e-2)
train_loader = DataLoader(TensorDataset(torch.rand(90, 24)), batch_size=20, shuffle=True)
for epoch in range(3):
    model.train()
    for (data,) in train_loader:
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        optimizer.step()
    print(epoch, loss.item() / len(data))
