import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

x = torch.randn(203, 8)
y = (x[:, :1] * x[:, 1:2]).tanh()
train_loader = DataLoader(TensorDataset(x[:150], y[:150]), batch_size=16, shuffle=True)
val_loader = DataLoader(TensorDataset(x[150:], y[150:]), batch_size=64)

model = nn.Sequential(
    nn.Linear(8, 32),
    nn.Tanh(),
    nn.Linear(32, 1),
)
model = model.to(device)
loss_fn = nn.MSELoss()
optimizer = optim.Adam(model.parameters(), lr=1e-2)

for epoch in range(3):
    model.train()
    running_loss = 0.0
    for inputs, labels in train_loader:
        inputs = inputs.to(device)
        labels = labels.to(device)

        # zero the parameter gradients
        optimizer.zero_grad()

        # forward + backward + optimize
        outputs = model(inputs)
        loss = loss_fn(outputs, labels)
        loss.backward()
        optimizer.step()
        running_loss += loss.item() * inputs.size(0)

    model.eval()
    with torch.no_grad():
        val = sum(loss_fn(model(a.to(device)), b.to(device)).item() for a, b in val_loader)
    print(f"epoch {epoch}: train {running_loss / 150:.4f}, val {val / len(val_loader):.4f}")

torch.save(model.state_dict(), "model.pth")
print('Finished Training')
