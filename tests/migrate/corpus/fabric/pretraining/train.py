"""python train.py --model nano --max_iters 12"""
import argparse
from functools import partial
from pathlib import Path

import lightning_fabric as L
import torch
from lightning_fabric.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset

from lit import GPT, Config
from lit.utils import CycleIterator, chunked_cross_entropy, get_lr, num_parameters, tell


class Blocks(Dataset):
    def __init__(self, length, config):
        self.data = (torch.arange(length * config.block_size + 1) ** 2 // 3) % config.vocab_size
        self.size = config.block_size

    def __len__(self):
        return (len(self.data) - 1) // self.size

    def __getitem__(self, i):
        return self.data[i * self.size : (i + 1) * self.size + 1].long()


def setup(model, devices, max_iters, resume):
    logger = CSVLogger("out", "pretraining", flush_logs_every_n_steps=2)
    fabric = L.Fabric(accelerator="cpu", devices=devices, strategy="auto" if devices == 1 else "ddp", loggers=[logger])
    hparams = dict(learning_rate=6e-3, weight_decay=1e-1, beta1=0.9, beta2=0.95, grad_clip=1.0)
    fabric.launch(main, Config.from_name(model), hparams, max_iters, resume)


def main(fabric, config, hparams, max_iters, resume, out_dir=Path("out")):
    if fabric.global_rank == 0:
        out_dir.mkdir(parents=True, exist_ok=True)
    fabric.seed_everything(1337)
    with fabric.init_module(empty_init=False):
        model = GPT(config)
        model.apply(model._init_weights)
    tell(f"{num_parameters(model):,} parameters")
    model = fabric.setup(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=hparams["learning_rate"], weight_decay=hparams["weight_decay"],
        betas=(hparams["beta1"], hparams["beta2"]), foreach=False,
    )
    optimizer = fabric.setup_optimizers(optimizer)
    loader = DataLoader(Blocks(40, config), batch_size=3, shuffle=True, drop_last=True)
    val = DataLoader(Blocks(8, config), batch_size=4)
    loader, val = fabric.setup_dataloaders(loader, val)
    state = {"model": model, "optimizer": optimizer, "hparams": hparams, "iter_num": 0, "step_count": 0}
    if resume:
        fabric.load(out_dir / "last.ckpt", state)
    fit(fabric, state, loader, val, max_iters)
    fabric.save(out_dir / "last.ckpt", state)


def fit(fabric, state, loader, val_loader, max_iters, accumulate=2):
    model, optimizer, hparams = state["model"], state["optimizer"], state["hparams"]
    schedule = partial(get_lr, hparams["learning_rate"], warmup_iters=3, max_iters=max_iters, min_lr=6e-4)
    batches = CycleIterator(loader)
    for ids in batches:
        if state["iter_num"] >= max_iters:
            break
        for group in optimizer.param_groups:
            group["lr"] = schedule(state["iter_num"])
        state["iter_num"] += 1
        is_accumulating = state["iter_num"] % accumulate != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            loss = chunked_cross_entropy(model(ids[:, :-1]), ids[:, 1:])
            fabric.backward(loss / accumulate)
        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=hparams["grad_clip"])
            optimizer.step()
            optimizer.zero_grad()
            state["step_count"] += 1
            fabric.log_dict({"loss": loss.item(), "epoch": batches.epoch}, step=state["step_count"])
        if state["iter_num"] % 6 == 0:
            tell(f"iter {state['iter_num']}: val {validate(fabric, model, val_loader):.4f}")
            fabric.barrier()


@torch.no_grad()
def validate(fabric, model, loader):
    model.eval()
    losses = torch.stack([chunked_cross_entropy(model(ids[:, :-1]), ids[:, 1:]) for ids in loader])
    model.train()
    return fabric.all_reduce(losses.mean(), reduce_op="mean").item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="nano")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--max_iters", type=int, default=14)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    setup(args.model, args.devices, args.max_iters, args.resume)
