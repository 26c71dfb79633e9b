import horovod.torch
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def _part(count, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 3, generator=g)
    return TensorDataset(x, (x.prod(1, keepdim=True) * 8).sin())


def loaders(batch):
    size, rank = horovod.torch.size(), horovod.torch.rank()
    train, valid = _part(100, seed=1), _part(30, seed=2)
    return (
        DataLoader(train, batch_size=batch, sampler=DistributedSampler(train, size, rank), drop_last=True),
        DataLoader(valid, batch_size=batch, sampler=DistributedSampler(valid, size, rank, shuffle=False)),
    )
