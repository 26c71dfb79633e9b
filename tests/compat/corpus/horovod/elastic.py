"""An elastic loop, with a sampler that knows what is processed and a state that is committed."""

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F

hvd.init()
torch.manual_seed(1)
generator = torch.Generator().manual_seed(3)
inputs = torch.randn(96, 6, generator=generator)
dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = hvd.elastic.ElasticSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, batch_size=8, sampler=sampler)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
lr = 0.02
optimizer = torch.optim.SGD(model.parameters(), lr * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, 3):
        sampler.set_epoch(state.epoch)
        for state.batch, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            sampler.record_batch(state.batch, 8)
            if state.batch % 3 == 0:
                state.commit()
        state.batch = 0


def on_state_reset():
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr * hvd.size()


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0, batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)
