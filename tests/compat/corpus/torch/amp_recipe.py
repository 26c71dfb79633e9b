"""Half precision as flags say, with a scaler and accumulation."""

import torch
from torch import nn

torch.manual_seed(2)
use_amp, accumulate = True, 2
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", enabled=use_amp)
loss_fn = nn.MSELoss()
data = [torch.randn(10, 16) for _ in range(12)]
targets = [one[:, :8] * 2 for one in data]
for epoch in range(2):
    for i, (input, target) in enumerate(zip(data, targets)):
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16, enabled=use_amp):
            output = net(input)
            loss = loss_fn(output, target) / accumulate
        scaler.scale(loss).backward()
        if (i + 1) % accumulate == 0:
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.5)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
torch.save({"model": net.state_dict(), "optimizer": opt.state_dict(), "scaler": scaler.state_dict()},
           "amp.pt")
