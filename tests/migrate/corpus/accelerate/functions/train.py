"""Fit a small regression network; stops half way, and goes on from its checkpoint.

    accelerate launch train.py --epochs 3 --gradient_accumulation_steps 2
"""

import argparse
import os

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import ProjectConfiguration, set_seed


class Waves(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.rand(n, 3, generator=g) * 6
        self.y = torch.sin(self.x).sum(1, keepdim=True)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.y[i]}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--max_grad_norm", type=float, default=0.5)
    parser.add_argument("--spike", type=float, default=3.7)
    parser.add_argument("--mixed_precision", type=str, default="no", choices=["no", "bf16"])
    parser.add_argument("--output_dir", type=str, default="run")
    parser.add_argument("--seed", type=int, default=3)
    return parser.parse_args()


def get_dataloaders(args):
    train = DataLoader(Waves(52, args.seed), batch_size=args.batch_size, shuffle=True)
    valid = DataLoader(Waves(21, args.seed + 1), batch_size=args.batch_size)
    return train, valid


def evaluate(accelerator, model, loader):
    model.eval()
    losses = []
    for batch in loader:
        with torch.no_grad():
            error = (model(batch["x"]) - batch["y"]) ** 2
        losses.append(accelerator.gather_for_metrics(error))
    return torch.cat(losses).mean().item()


def train_epoch(accelerator: Accelerator, model, loader, optimizer, scheduler, args):
    model.train()
    total = torch.zeros((), device=accelerator.device)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
            total += loss.detach()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if loss > args.spike:
            accelerator.set_trigger()
        if accelerator.check_trigger():  # on whichever process: all go on with the next epoch
            break
    return accelerator.reduce(total, reduction="mean").item() / len(loader)


def main():
    args = parse_args()
    kwargs = DistributedDataParallelKwargs(gradient_as_bucket_view=True, bucket_cap_mb=10)
    project = ProjectConfiguration(project_dir=args.output_dir)
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        project_config=project,
        kwargs_handlers=[kwargs],
        cpu=not torch.cuda.is_available(),
    )
    set_seed(args.seed)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)

    train_loader, valid_loader = get_dataloaders(args)
    model = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = LambdaLR(optimizer, lambda step: 0.97**step)
    model, optimizer, train_loader, valid_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, valid_loader, scheduler
    )

    starting_epoch = 0
    for leg in (1, args.epochs):
        if leg > 1:  # as if it had been stopped after the first epoch
            accelerator.wait_for_everyone()
            accelerator.load_state(os.path.join(args.output_dir, "epoch_0"))
            starting_epoch = 1
        for epoch in range(starting_epoch, leg):
            loss = train_epoch(accelerator, model, train_loader, optimizer, scheduler, args)
            error = evaluate(accelerator, model, valid_loader)
            accelerator.print(f"epoch {epoch} loss {loss:.4f} validation {error:.4f}")
            accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))

    accelerator.wait_for_everyone()
    accelerator.save_model(model, args.output_dir)
    accelerator.end_training()


if __name__ == "__main__":
    main()
