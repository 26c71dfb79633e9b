import os
import random
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

CKPT = os.environ.get('CHECKPOINT', 'checkpoint.pth.tar')
EPOCHS = int(os.environ.get('EPOCHS', 3))


class AverageMeter(object):
    """Computes and stores the average and current value"""

    def __init__(self, name):
        self.name = name
        self.reset()

    def reset(self):
        self.sum = self.count = 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32)
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total.tolist()

    @property
    def avg(self):
        return self.sum / max(self.count, 1)


class Blobs(Dataset):
    def __init__(self, n=96, classes=5):
        rs = np.random.RandomState(0)
        self.y = rs.randint(0, classes, n)
        self.x = (rs.randn(n, 3, 8, 8) * .5 + self.y[:, None, None, None] / classes).astype('float32')

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class SmallResNet(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.fc = nn.Linear(8, classes)

    def forward(self, x):
        x = F.relu(self.bn(self.stem(x)))
        x = x + self.conv(x)
        return self.fc(x.mean((2, 3)))


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum(0) * (100.0 / target.size(0)) for k in topk]


def adjust_learning_rate(optimizer, epoch, lr=0.05):
    """Decayed by 10 every 2 epochs"""
    for param_group in optimizer.param_groups:
        param_group['lr'] = lr * (0.1 ** (epoch // 2))


def main_worker(local_rank, world_size):
    rank = int(os.environ['RANK'])
    dist.init_process_group('gloo', init_method='env://', world_size=world_size, rank=rank)
    random.seed(3)
    torch.manual_seed(3)

    model = SmallResNet()
    model = DDP(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True)

    start_epoch, best = 0, 0.0
    if os.path.isfile(CKPT):
        print("=> loading checkpoint '{}'".format(CKPT))
        checkpoint = torch.load(CKPT, map_location='cpu')
        start_epoch, best = checkpoint['epoch'], checkpoint['best']
        model.module.load_state_dict(checkpoint['state_dict'])
        optimizer.load_state_dict(checkpoint['optimizer'])

    dataset = Blobs()
    train_sampler = DistributedSampler(dataset)
    train_loader = DataLoader(dataset, batch_size=8, shuffle=(train_sampler is None),
                              num_workers=0, pin_memory=False, sampler=train_sampler)

    for epoch in range(start_epoch, EPOCHS):
        train_sampler.set_epoch(epoch)
        adjust_learning_rate(optimizer, epoch)
        losses, top1 = AverageMeter('Loss'), AverageMeter('Acc@1')
        end = time.time()
        model.train()
        for i, (images, target) in enumerate(train_loader):
            output = model(images)
            loss = criterion(output, target)
            acc1, = accuracy(output, target)
            losses.update(loss.item(), images.size(0))
            top1.update(acc1.item(), images.size(0))

            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        losses.all_reduce()
        top1.all_reduce()
        best = max(best, top1.avg)
        if rank == 0:
            print(f'{epoch}\t{losses.avg:.4f}\t{top1.avg:.1f}\t{time.time() - end:.1f} s')
            torch.save({'epoch': epoch + 1, 'best': best,
                        'state_dict': model.module.state_dict(),
                        'optimizer': optimizer.state_dict()}, CKPT)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == '__main__':
    main_worker(int(os.environ['LOCAL_RANK']), int(os.environ['WORLD_SIZE']))
