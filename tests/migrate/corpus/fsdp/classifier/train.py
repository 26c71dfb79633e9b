import functools, os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import CPUOffload, BackwardPrefetch
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

ACCUM = 2


def setup(rank, world_size):
    os.environ['MASTER_ADDR'] = 'localhost'
    os.environ['MASTER_PORT'] = '12377'
    # initialize the process group
    dist.init_process_group('gloo', rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.conv2 = nn.Conv2d(4, 8, 3, 1)
        self.dropout = nn.Dropout(0.0)
        self.fc1 = nn.Linear(8 * 16, 32)
        self.fc2 = nn.Linear(32, 4)

    def forward(self, x):
        x = torch.relu(self.conv1(x))
        x = torch.relu(self.conv2(x))
        x = self.dropout(torch.flatten(x, 1))
        return torch.log_softmax(self.fc2(torch.relu(self.fc1(x))), dim=1)


def batches(rank, world_size, seed, n):
    g = torch.Generator().manual_seed(seed)
    images = torch.rand(n, 1, 8, 8, generator=g)
    labels = images.view(n, 4, 16).sum(-1).argmax(-1)   # which quarter is brightest
    data = TensorDataset(images, labels)
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=True)
    return DataLoader(data, batch_size=8, sampler=sampler), sampler


def train(model, rank, device, loader, optimizer, epoch, sampler):
    model.train()
    sampler.set_epoch(epoch)
    optimizer.zero_grad()
    for batch_idx, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        if (batch_idx + 1) % ACCUM == 0 or batch_idx + 1 == len(loader):
            loss = nn.functional.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with model.no_sync():
                loss = nn.functional.nll_loss(model(data), target)
                loss.backward()
    if rank == 0: print('epoch {}: loss {:.4f}'.format(epoch, loss.item()))


def test(model, rank, device, loader):
    model.eval()
    totals = torch.zeros(2).to(device)
    with torch.no_grad():
        for data, target in loader:
            output = model(data.to(device))
            totals[0] += (output.argmax(1) == target.to(device)).sum().item()
            totals[1] += len(data)
    dist.all_reduce(totals, op=dist.ReduceOp.SUM)
    if rank == 0:
        print('accuracy: {}/{}'.format(int(totals[0]), int(totals[1])))


def fsdp_main(rank, world_size, epochs):
    setup(rank, world_size)
    device = torch.device('cpu')
    loader, sampler = batches(rank, world_size, 0, 100)
    test_loader, _ = batches(rank, world_size, 1, 40)

    my_auto_wrap_policy = functools.partial(size_based_auto_wrap_policy, min_num_params=200)
    torch.manual_seed(5)
    model = FSDP(Net().to(device),
                 auto_wrap_policy=my_auto_wrap_policy,
                 cpu_offload=CPUOffload(offload_params=False),
                 backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
                 device_id=device)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(1, epochs + 1):
        train(model, rank, device, loader, optimizer, epoch, sampler)
        test(model, rank, device, test_loader)

    # save once all ranks are here
    dist.barrier()
    states = model.state_dict()
    if rank == 0:
        torch.save(states, "quarters.pt")
    cleanup()


if __name__ == '__main__':
    WORLD_SIZE = 2
    mp.spawn(fsdp_main, args=(WORLD_SIZE, 2), nprocs=WORLD_SIZE, join=True)
