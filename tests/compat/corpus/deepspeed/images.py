"""Small images, classified: flags make the configuration, and initialize the loader."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import deepspeed
from deepspeed.accelerator import get_accelerator


def add_argument():
    parser = argparse.ArgumentParser(description="images")
    parser.add_argument("-e", "--epochs", default=2, type=int)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--log-interval", type=int, default=5)
    parser.add_argument("--dtype", default="fp32", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--stage", default=1, type=int, choices=[0, 1, 2, 3])
    return deepspeed.add_config_arguments(parser).parse_args()


def get_ds_config(args):
    return {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.005, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7, "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.005, "warmup_num_steps": 6},
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {
            "enabled": args.dtype == "fp16",
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 15,
        },
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": args.stage,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 5e7,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "cpu_offload": False,
        },
    }


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 8, 3)
        self.fc1 = nn.Linear(8 * 4, 24)
        self.fc2 = nn.Linear(24, 4)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        return self.fc2(F.relu(self.fc1(torch.flatten(x, 1))))


def images(count, seed):
    made = torch.randn(count, 3, 14, 14, generator=torch.Generator().manual_seed(seed))
    means = torch.stack([made[:, :, :7, :7], made[:, :, :7, 7:], made[:, :, 7:, :7], made[:, :, 7:, 7:]]).mean((2, 3, 4))
    return TensorDataset(made, means.argmax(0))


def test(model_engine, testset, local_device, target_dtype):
    loader = DataLoader(testset, batch_size=8, shuffle=False, num_workers=0)
    correct, total = 0, 0
    model_engine.eval()
    with torch.no_grad():
        for x, labels in loader:
            if target_dtype is not None:
                x = x.to(target_dtype)
            outputs = model_engine(x.to(local_device))
            total += labels.size(0)
            correct += (outputs.argmax(1) == labels.to(local_device)).sum().item()
    model_engine.train()
    if model_engine.local_rank == 0:
        print(f"accuracy on {total} images: {100 * correct / total:.0f} %")


def main(args):
    deepspeed.init_distributed()
    torch.manual_seed(0)
    if torch.distributed.get_rank() != 0:
        torch.distributed.barrier()
    trainset, testset = images(160, 1), images(40, 2)
    if torch.distributed.get_rank() == 0:
        torch.distributed.barrier()

    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    model_engine, optimizer, trainloader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=trainset, config=get_ds_config(args)
    )
    local_device = get_accelerator().device_name(model_engine.local_rank)
    target_dtype = None
    if model_engine.bfloat16_enabled():
        target_dtype = torch.bfloat16
    elif model_engine.fp16_enabled():
        target_dtype = torch.half

    criterion = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        running_loss = 0.0
        for i, data in enumerate(trainloader):
            inputs, labels = data[0].to(local_device), data[1].to(local_device)
            if target_dtype is not None:
                inputs = inputs.to(target_dtype)
            loss = criterion(model_engine(inputs), labels)
            model_engine.backward(loss)
            model_engine.step()
            running_loss += loss.item()
            if model_engine.local_rank == 0 and i % args.log_interval == args.log_interval - 1:
                print(f"[{epoch + 1:d}, {i + 1:5d}] loss: {running_loss / args.log_interval:.3f}")
                running_loss = 0.0
    test(model_engine, testset, local_device, target_dtype)


if __name__ == "__main__":
    main(add_argument())
