"""Batches are dictionaries, the model computes its loss, weights are saved after every epoch."""
import torch
from torch.utils.data import DataLoader
from tqdm import tqdm


class Output(dict):
    __getattr__ = dict.__getitem__


class Regressor(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(5, 16), torch.nn.GELU(), torch.nn.Linear(16, 1)
        )

    def forward(self, features, labels=None):
        pred = self.body(features).squeeze(-1)
        return Output(loss=torch.nn.functional.mse_loss(pred, labels), pred=pred)


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(5)
rows = [{"features": f, "labels": f.sum() ** 2} for f in torch.randn(70, 5)]
train_dl = DataLoader(rows, batch_size=9, drop_last=True)

net = Regressor().to(device)
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
for epoch in tqdm(range(2)):
    losses = []
    for batch in train_dl:
        batch = {k: v.to(device) for k, v in batch.items()}
        out = net(**batch)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.loss.item())
    tqdm.write(f"{epoch}: {sum(losses) / len(losses):.4f}")
    torch.save(net.state_dict(), f"epoch{epoch}.pt")
