"""deepspeed train.py --deepspeed_config configs/gan.json --epochs 1"""
import os
from time import time

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import deepspeed
from gan import Critic, Generator, weights_init
from gan.options import parse, set_seed


def pictures(count, size=8):
    rows = torch.arange(count)[:, None, None] + torch.arange(size)[None, :, None]
    columns = torch.arange(size)[None, None, :]
    return ((rows + columns) % 4 < 2).float().mul(2).sub(1).unsqueeze(1)


def train(args):
    deepspeed.init_distributed()
    set_seed(args.manualSeed)
    data = TensorDataset(pictures(64))
    loader = DataLoader(data, batch_size=args.batchSize, sampler=DistributedSampler(data, seed=args.manualSeed))

    netG, netD = Generator(args.nz, args.ngf), Critic(args.ndf)
    netG.apply(weights_init)
    netD.apply(weights_init)
    criterion = nn.BCELoss()
    model_engineD, optimizerD, _, _ = deepspeed.initialize(args=args, model=netD, model_parameters=netD.parameters())
    model_engineG, optimizerG, _, _ = deepspeed.initialize(args=args, model=netG, model_parameters=netG.parameters())
    device = model_engineD.device
    torch.manual_seed(args.manualSeed + torch.distributed.get_rank())

    for epoch in range(args.epochs):
        began = time()
        loader.sampler.set_epoch(epoch)
        for (real,) in loader:
            real = real.to(device)
            label = torch.full((len(real),), 1.0, device=device)

            model_engineD.zero_grad()
            errD_real = criterion(model_engineD(real), label)
            model_engineD.backward(errD_real)
            fake = model_engineG(torch.randn(len(real), args.nz, 1, 1, device=device))
            errD_fake = criterion(model_engineD(fake.detach()), label.fill_(0.0))
            model_engineD.backward(errD_fake)
            model_engineD.step()

            model_engineG.zero_grad()
            errG = criterion(netD(fake), label.fill_(1.0))  # the module: its engine has no part in this
            model_engineG.backward(errG)
            model_engineG.step()
        if torch.distributed.get_rank() == 0:
            print(f"[{epoch}/{args.epochs}] {errD_real + errD_fake:.4f} {errG:.4f} in {time() - began:.1f} s")


if __name__ == "__main__":
    args = parse()
    os.makedirs(args.outf, exist_ok=True)
    train(args)
