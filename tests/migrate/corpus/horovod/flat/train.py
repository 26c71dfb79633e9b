# Regression with Horovod. Run: horovodrun -np 4 python train.py
import torch
import torch.nn as nn
import torch.optim as optim
import torch.utils.data.distributed
import horovod.torch as hvd

EPOCHS, BATCH, LR = 3, 10, 0.005

hvd.init()
torch.manual_seed(1234)
if torch.cuda.is_available():
    # One GPU per process.
    torch.cuda.set_device(hvd.local_rank())

x = torch.randn(130, 6)
y = (x * torch.arange(6.)).sum(1, keepdim=True) + 0.1 * torch.randn(130, 1)
dataset = torch.utils.data.TensorDataset(x, y)
sampler = torch.utils.data.distributed.DistributedSampler(
    dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, sampler=sampler)

net = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 1))
if torch.cuda.is_available():
    net.cuda()

# Horovod: scale learning rate by the number of workers.
opt = optim.SGD(net.parameters(), lr=LR * hvd.size(), momentum=0.9)

hvd.broadcast_parameters(net.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(opt, root_rank=0)

opt = hvd.DistributedOptimizer(opt, named_parameters=net.named_parameters())
loss_fn = nn.MSELoss()

for epoch in range(EPOCHS):
    net.train()
    sampler.set_epoch(epoch)
    seen, total = 0, 0.
    for xb, yb in loader:
        if torch.cuda.is_available():
            xb, yb = xb.cuda(), yb.cuda()
        opt.zero_grad()
        loss = loss_fn(net(xb), yb)
        loss.backward()
        opt.step()
        total += loss.item() * len(xb); seen += len(xb)
    mean = hvd.allreduce(torch.tensor(total / seen), name='epoch_loss')
    if hvd.rank() == 0:
        print('epoch %d: %.4f' % (epoch, mean.item()))

if hvd.rank() == 0:
    torch.save(net.state_dict(), 'net.pt')
