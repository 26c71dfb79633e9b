"""deepspeed train.py --deepspeed --deepspeed_config ds_config.json"""
import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import deepspeed


class Net(nn.Module):
    def __init__(self, classes=4):
        super(Net, self).__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1 = nn.Linear(4 * 3 * 3, 24)
        self.fc2 = nn.Linear(24, classes)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = x.view(-1, 4 * 3 * 3)
        return self.fc2(F.relu(self.fc1(x)))


def add_argument():
    parser = argparse.ArgumentParser(description='tiny images')
    parser.add_argument('-e', '--epochs', default=3, type=int, help='number of total epochs')
    parser.add_argument('--local_rank', type=int, default=-1, help='local rank passed from distributed launcher')
    parser.add_argument('--log-interval', type=int, default=6, help='output logging information at a given interval')

    # Include DeepSpeed configuration arguments
    parser = deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=os.path.join(os.path.dirname(os.path.abspath(__file__)), 'ds_config.json'))
    return parser.parse_args()


def images(count, seed):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(count, 1, 8, 8, generator=generator)
    quarter = torch.stack([pixels[..., :4, :4], pixels[..., :4, 4:], pixels[..., 4:, :4], pixels[..., 4:, 4:]])
    return TensorDataset(pixels, quarter.sum((2, 3, 4)).argmax(0))


args = add_argument()
deepspeed.init_distributed()
torch.manual_seed(0)

trainset, testset = images(84, 1), images(24, 2)
net = Net()
parameters = filter(lambda p: p.requires_grad, net.parameters())

# Initialize DeepSpeed to use the following features
# 1) Distributed model  2) Optimizer of the JSON file  3) Its learning rates
model_engine, optimizer, _, scheduler = deepspeed.initialize(args=args, model=net, model_parameters=parameters)
sampler = DistributedSampler(trainset)
trainloader = DataLoader(trainset, batch_size=model_engine.train_micro_batch_size_per_gpu(), sampler=sampler)

criterion = nn.CrossEntropyLoss()
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    running_loss = 0.0
    for i, data in enumerate(trainloader):
        inputs, labels = data[0].to(model_engine.device), data[1].to(model_engine.device)
        outputs = model_engine(inputs)
        loss = criterion(outputs, labels)
        model_engine.backward(loss)
        if model_engine.is_gradient_accumulation_boundary() and args.local_rank in (-1, 0):
            print('updating, lr', scheduler.get_last_lr())
        model_engine.step()

        running_loss += loss.item()
        if i % args.log_interval == args.log_interval - 1:
            print('[%d, %5d] loss: %.3f' % (epoch + 1, i + 1, running_loss / args.log_interval))
            running_loss = 0.0

correct, total = 0, 0
with torch.no_grad():
    for data in DataLoader(testset, batch_size=4):
        outputs = net(data[0].to(model_engine.device))
        total += len(data[1])
        correct += (outputs.argmax(1) == data[1].to(model_engine.device)).sum().item()
print('Accuracy on the test images: %d %%' % (100 * correct / total))
