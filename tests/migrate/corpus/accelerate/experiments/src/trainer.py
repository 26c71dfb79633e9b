from __future__ import annotations

import math
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch.optim.lr_scheduler import LambdaLR

from .data import build_loaders
from .model import Classifier
from .utils import AverageMeter, EarlyStopper, group_parameters


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=cfg.accumulation,
            log_with="tensorboard",
            project_config=ProjectConfiguration(project_dir="runs", automatic_checkpoint_naming=True, total_limit=2),
        )
        self.accelerator.init_trackers("experiments", config={"lr": cfg.optimizer["lr"], "seed": cfg.seed})
        set_seed(cfg.seed)
        train, dev = build_loaders(cfg)
        model = Classifier(12, 3, cfg.width)
        optimizer = torch.optim.AdamW(
            group_parameters(model, cfg.optimizer["weight_decay"]),
            lr=cfg.optimizer["lr"], betas=tuple(cfg.optimizer["betas"]),
        )
        scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / cfg.scheduler["warmup"]))
        self.model, self.optimizer, self.train_loader, self.dev_loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, train, dev, scheduler
        )
        self.stopper = EarlyStopper(cfg.patience)
        self.accelerator.register_for_checkpointing(self.stopper)
        self.updates = 0

    def train(self, resume=None):
        first = 0
        if resume:
            self.accelerator.load_state(resume)
            first = int(Path(resume).name.split("_")[-1]) + 1
        for epoch in range(first, self.cfg.epochs):
            meter = AverageMeter()
            self.model.train()
            for batch in self.train_loader:
                with self.accelerator.accumulate(self.model):
                    loss = self.model(**batch)["loss"]
                    meter.update(loss.item(), len(batch["labels"]))
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                        self.updates += 1
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
            accuracy, dev_loss = self.evaluate()
            self.accelerator.log({"train": meter.mean, "dev": dev_loss, "accuracy": accuracy}, step=self.updates)
            self.accelerator.save_state()
            if self.stopper(dev_loss):
                self.accelerator.set_trigger()
            if self.accelerator.check_trigger():
                break
        self.accelerator.end_training()

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        right, losses = [], []
        for batch in self.dev_loader:
            out = self.model(**batch)
            guesses, labels = self.accelerator.gather_for_metrics((out["logits"].argmax(-1), batch["labels"]))
            right.append(guesses == labels)
            losses.append(self.accelerator.gather_for_metrics(out["loss"].repeat(len(batch["labels"]))))
        loss = torch.cat(losses).mean().item()
        assert math.isfinite(loss) and len(torch.cat(right)) == 22
        return torch.cat(right).float().mean().item(), loss
