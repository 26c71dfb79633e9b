from torch.nn.functional import smooth_l1_loss

from utils.distributed import reduce_mean


def train_one_epoch(model, loader, optimizer, device):
    model.train()
    total = 0.0
    for samples, targets in loader:
        samples = samples.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        loss = smooth_l1_loss(model(samples), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += reduce_mean(loss.detach()).item()
    return {"loss": total / len(loader)}
