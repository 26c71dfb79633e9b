"""A generator and a discriminator, an engine each, in one loop."""

import argparse

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--niter", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--local_rank", type=int, default=-1)


def settings(lr):
    return {
        "train_batch_size": 16,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**6,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": lr, "betas": [0.5, 0.999], "adam_w_mode": False, "torch_adam": True},
        },
    }


def weights_init(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0.0, 0.3)


def main():
    args = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(999)
    netG = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    netD = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid())
    netG.apply(weights_init)
    netD.apply(weights_init)
    netD, _, _, _ = deepspeed.initialize(
        args=args, model=netD, model_parameters=netD.parameters(), config=settings(args.lr))
    netG, _, _, _ = deepspeed.initialize(
        args=args, model=netG, model_parameters=netG.parameters(), config=settings(args.lr))
    device = netG.device

    angles = torch.linspace(0, 6.28, 96)
    data = TensorDataset(torch.stack([angles.cos(), angles.sin()], 1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=netD.train_micro_batch_size_per_gpu(), sampler=sampler)
    criterion = nn.BCELoss()
    generator = torch.Generator().manual_seed(deepspeed.comm.get_rank())

    for epoch in range(args.niter):
        sampler.set_epoch(epoch)
        for i, (real,) in enumerate(loader):
            # (1) Update D: maximize log(D(x)) + log(1 - D(G(z)))
            netD.zero_grad()
            real = real.to(device)
            errD_real = criterion(netD(real).view(-1), torch.ones(len(real), device=device))
            netD.backward(errD_real)
            noise = torch.randn(len(real), 4, generator=generator).to(device)
            fake = netG(noise)
            errD_fake = criterion(netD(fake.detach()).view(-1), torch.zeros(len(real), device=device))
            netD.backward(errD_fake)
            netD.step()

            # (2) Update G: maximize log(D(G(z)))
            netG.zero_grad()
            errG = criterion(netD(fake).view(-1), torch.ones(len(real), device=device))
            netG.backward(errG)
            netG.step()
            if i % 3 == 0 and netD.global_rank == 0:
                print(f"[{epoch}][{i}] D {errD_real.item() + errD_fake.item():.4f} G {errG.item():.4f}")


if __name__ == "__main__":
    main()
