"""Tracking, checkpoints by step and by epoch, and going on in the midst of an epoch."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def build(accelerator):
    set_seed(5)
    x = torch.randn(61, 6)
    loader = DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
    return accelerator.prepare(model, optimizer, loader, scheduler)


def train(accelerator, parts, epochs, resume=None, stop_at=None):
    model, optimizer, loader, scheduler = parts
    first, skipped, overall = 0, None, 0
    if resume is not None:
        accelerator.load_state(resume)
        overall = int(os.path.basename(resume).removeprefix("step_"))
        first, skipped = overall // len(loader), overall % len(loader)
    for epoch in range(first, epochs):
        model.train()
        total = 0
        active = loader
        if skipped:
            active = accelerator.skip_first_batches(loader, skipped)
            skipped = None
        for x, y in active:
            loss = nn.functional.mse_loss(model(x), y)
            total += loss.detach().float()
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            overall += 1
            accelerator.log({"norm": norm.item(), "lr": scheduler.get_last_lr()[0]}, step=overall)
            if overall == stop_at:
                accelerator.save_state(os.path.join("out", f"step_{overall}"))
                accelerator.wait_for_everyone()
                return
        accelerator.log({"train_loss": total.item() / len(active), "epoch": epoch}, step=overall)


def main():
    config = ProjectConfiguration(project_dir=".", logging_dir="logs")
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_config=config)
    accelerator.init_trackers("complete", config={"lr": 0.05})
    parts = build(accelerator)
    train(accelerator, parts, 2, stop_at=5)
    train(accelerator, parts, 2, resume=os.path.join("out", "step_5"))
    accelerator.wait_for_everyone()
    accelerator.save_model(parts[0], "weights")
    state = accelerator.get_state_dict(parts[0])
    if accelerator.is_main_process:
        assert sorted(state) == ["0.bias", "0.weight", "2.bias", "2.weight"], sorted(state)
        assert os.path.isfile(os.path.join("weights", "model.safetensors"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
