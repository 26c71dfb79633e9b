from torch.nn import functional as F


def run_epoch(ds, loader):
    ds.train()
    total = 0.0
    for words, tags in loader:
        words, tags = words.to(ds.device), tags.to(ds.device)
        scores = ds(words)
        loss = F.cross_entropy(scores.transpose(1, 2), tags, ignore_index=-100)
        ds.backward(loss)
        ds.step()
        total += loss.item()
    return total / len(loader)
