import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
inputs = torch.randn(102, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = DataLoader(data, batch_size=16)
val_loader = DataLoader(data, batch_size=50)

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
criterion = nn.MSELoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=21)

for epoch in range(3):  # three epochs
    model.train()
    total = 0.0
    for i, (x, y) in enumerate(loader):
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        out = model(x)  # forward
        loss = criterion(out, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        total += loss.item()
        if i % 3 == 0:
            print(f"{epoch} {i} {loss.item():.3f} {scheduler.get_last_lr()}")
    model.eval()
    with torch.no_grad():
        val = 0.0
        for x, y in val_loader:
            val += criterion(model(x.to(device)), y.to(device)).item() * len(x)
        print(f"epoch {epoch}: {total / len(loader)} val {val / len(data)}")
torch.save(model.state_dict(), "model.pt")
