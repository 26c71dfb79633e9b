import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import engine
from models import build_model
from utils import distributed as du


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--checkpoint", default="last.pt")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    device = du.setup()
    torch.manual_seed(0)
    x = torch.randn(90, 6)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=10, sampler=sampler, drop_last=False)

    model, model_without_ddp = build_model(device)
    optimizer = torch.optim.SGD(model_without_ddp.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    start = 0
    if args.resume:
        state = torch.load(args.checkpoint, map_location=device)
        model_without_ddp.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        start = state["epoch"] + 1

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        stats = engine.train_one_epoch(model, loader, optimizer, device)
        scheduler.step()
        if du.is_main_process():
            print(epoch, stats)
            torch.save(
                {
                    "model": model_without_ddp.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "epoch": epoch,
                },
                args.checkpoint,
            )
    du.cleanup()


if __name__ == "__main__":
    main()
