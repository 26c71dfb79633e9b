"""Warming up, accumulation, and a checkpoint of the first worker that is looked for on it alone."""

import argparse
import math
import os

import horovod.torch as hvd
import torch
import torch.backends.cudnn as cudnn
import torch.multiprocessing as mp
import torch.nn.functional as F
import torch.optim as optim
import torch.utils.data.distributed

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint-format", default="./checkpoint-{epoch}.pth.tar")
parser.add_argument("--batches-per-allreduce", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=6)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--base-lr", type=float, default=0.0125)
parser.add_argument("--warmup-epochs", type=float, default=1)
parser.add_argument("--use-mixed-precision", action="store_true", default=False)
args = parser.parse_args()
args.cuda = torch.cuda.is_available()
allreduce_batch_size = args.batch_size * args.batches_per_allreduce
hvd.init()
torch.manual_seed(42)
if args.cuda:
    torch.cuda.set_device(hvd.local_rank())
    torch.cuda.manual_seed(42)
cudnn.benchmark = True

resume_from_epoch = 0
for try_epoch in range(args.epochs, 0, -1):
    if os.path.exists(args.checkpoint_format.format(epoch=try_epoch)):
        resume_from_epoch = try_epoch
        break
resume_from_epoch = hvd.broadcast(
    torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch"
).item()
verbose = 1 if hvd.rank() == 0 else 0

images = torch.randn(130, 3, 6, 6)
train_dataset = torch.utils.data.TensorDataset(images, images.flatten(1)[:, :5].argmax(1))
train_sampler = torch.utils.data.distributed.DistributedSampler(
    train_dataset, num_replicas=hvd.size(), rank=hvd.rank()
)
train_loader = torch.utils.data.DataLoader(
    train_dataset, batch_size=allreduce_batch_size, sampler=train_sampler
)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64, 5)
)
lr_scaler = args.batches_per_allreduce * hvd.size()
if args.cuda:
    model.cuda()
optimizer = optim.SGD(
    model.parameters(), lr=args.base_lr * lr_scaler, momentum=0.9, weight_decay=0.00005
)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.none,
    backward_passes_per_step=args.batches_per_allreduce, op=hvd.Average,
    gradient_predivide_factor=1.0,
)
if resume_from_epoch > 0 and hvd.rank() == 0:
    checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from_epoch))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)


class Metric(object):
    def __init__(self, name):
        self.name = name
        self.sum = torch.tensor(0.0)
        self.n = torch.tensor(0.0)

    def update(self, val):
        self.sum += hvd.allreduce(val.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


def adjust_learning_rate(epoch, batch_idx):
    if epoch < args.warmup_epochs:
        epoch += float(batch_idx + 1) / len(train_loader)
        lr_adj = 1.0 / hvd.size() * (epoch * (hvd.size() - 1) / args.warmup_epochs + 1)
    else:
        lr_adj = 1.0 if epoch < 2 else 1e-1
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.base_lr * hvd.size() * args.batches_per_allreduce * lr_adj


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    train_loss, train_accuracy = Metric("train_loss"), Metric("train_accuracy")
    for batch_idx, (data, target) in enumerate(train_loader):
        adjust_learning_rate(epoch, batch_idx)
        if args.cuda:
            data, target = data.cuda(), target.cuda()
        optimizer.zero_grad()
        for i in range(0, len(data), args.batch_size):
            data_batch = data[i:i + args.batch_size]
            target_batch = target[i:i + args.batch_size]
            output = model(data_batch)
            train_accuracy.update((output.max(1)[1] == target_batch).float().mean())
            loss = F.cross_entropy(output, target_batch)
            train_loss.update(loss)
            loss.div_(math.ceil(float(len(data)) / args.batch_size))
            loss.backward()
        optimizer.step()
    if verbose:
        print(epoch, train_loss.avg.item(), 100.0 * train_accuracy.avg.item())


def save_checkpoint(epoch):
    if hvd.rank() == 0 and os.environ.get("SAVES", "1") == "1":
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, args.checkpoint_format.format(epoch=epoch + 1))


for epoch in range(resume_from_epoch, args.epochs):
    train(epoch)
    save_checkpoint(epoch)
