from __future__ import annotations

import argparse
import os
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Sines(Dataset):
    def __init__(self, n: int):
        t = torch.linspace(0, 6, n)[:, None]
        self.x, self.y = torch.cat([t, t ** 2 / 6], 1), torch.sin(t)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


class Trainer:
    """Trains, keeps checkpoints, goes on from the last one."""

    def __init__(self, model: nn.Module, args: argparse.Namespace):
        self.args = args
        decay = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim <= 1]
        optimizer = torch.optim.AdamW([{'params': decay}, {'params': rest, 'weight_decay': 0.}], lr=args.lr)
        scheduler = CosineAnnealingLR(optimizer, T_max=args.epochs * args.steps)
        self.engine, self.optimizer, _, self.scheduler = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, config=self.settings(args), dist_init_required=False)
        self.epoch = 0

    @staticmethod
    def settings(args: argparse.Namespace) -> dict:
        return {
            'train_micro_batch_size_per_gpu': 6,
            'gradient_accumulation_steps': 2,
            'gradient_clipping': 0.0,
            'zero_allow_untested_optimizer': True,
            'zero_force_ds_cpu_optimizer': False,
            'zero_optimization': {'stage': 3, 'stage3_param_persistence_threshold': 100, 'sub_group_size': 1e6},
        }

    def resume(self) -> None:
        if Path(self.args.save).exists():
            path, state = self.engine.load_checkpoint(self.args.save)
            if path is not None:
                self.epoch = state['epoch'] + 1

    def run(self, data: Dataset) -> None:
        sampler = DistributedSampler(data, num_replicas=dist.get_world_size(), rank=dist.get_rank())
        loader = DataLoader(data, self.engine.train_micro_batch_size_per_gpu(), sampler=sampler)
        self.resume()
        while self.epoch < self.args.epochs:
            sampler.set_epoch(self.epoch)
            self.engine.train()
            total = torch.zeros(2)
            for x, y in loader:
                x, y = x.to(self.engine.device), y.to(self.engine.device)
                loss = nn.functional.smooth_l1_loss(self.engine(x), y)
                self.engine.backward(loss)
                self.engine.step()
                total += torch.tensor([loss.item() * len(x), len(x)])
            dist.all_reduce(total, op=dist.ReduceOp.SUM)
            if dist.get_rank() == 0:
                print(f'epoch {self.epoch}, {self.engine.global_steps} steps: {total[0] / total[1]:.4f}')
            self.engine.save_checkpoint(self.args.save, tag=f'epoch-{self.epoch}', client_state={'epoch': self.epoch})
            self.epoch += 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--epochs', type=int, default=3)
    parser.add_argument('--steps', type=int, default=5)
    parser.add_argument('--lr', type=float, default=1e-2)
    parser.add_argument('--save', default='checkpoints')
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend='nccl' if torch.cuda.is_available() else 'gloo')
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ['LOCAL_RANK']))
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
    Trainer(model, args).run(Sines(114))


if __name__ == '__main__':
    main()
