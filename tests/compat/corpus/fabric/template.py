"""A trainer of one's own, with callbacks, loggers, checkpoints and a module with steps."""

from pathlib import Path

import lightning as L
import torch
from lightning.fabric.loggers import CSVLogger
from lightning.fabric.utilities import AttributeDict, rank_zero_only
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 1))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        return {"loss": nn.functional.smooth_l1_loss(self(x), y), "index": index}

    def validation_step(self, batch, index):
        x, y = batch
        return nn.functional.l1_loss(self(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)


class Watching:
    def __init__(self):
        self.steps = 0

    def on_train_batch_end(self, outputs, index):
        self.steps += 1

    def on_after_optimizer_step(self, strategy, optimizer):
        assert strategy.world_size == 2
        assert optimizer.param_groups

    def on_train_epoch_end(self, trainer, **more):
        announce(f"epoch {trainer.state.epoch}: {self.steps} batches, {sorted(more)}")


@rank_zero_only
def announce(text):
    print(text)


class Trainer:
    def __init__(self, max_epochs=2, limit=None, every=1, folder="kept"):
        self.fabric = L.Fabric(
            accelerator="cpu", devices=2, strategy="ddp", callbacks=[Watching()],
            loggers=[CSVLogger("logs", flush_logs_every_n_steps=1)],
        )
        self.max_epochs, self.limit, self.every, self.folder = max_epochs, limit, every, Path(folder)
        self.state = AttributeDict(epoch=0, step=0)

    def fit(self, model, train, validation):
        self.fabric.launch()
        train, validation = self.fabric.setup_dataloaders(train, validation)
        optimizer, self.scheduler = model.configure_optimizers()
        model, optimizer = self.fabric.setup(model, optimizer)
        self.state.update(model=model, optimizer=optimizer, scheduler=self.scheduler)
        if newest := sorted(self.folder.glob("*.ckpt")):
            self.state.update(self.fabric.load(newest[-1], self.state))
        while self.state.epoch < self.max_epochs:
            model.train()
            for index, batch in enumerate(train):
                if self.limit is not None and index >= self.limit:
                    break
                outputs = model.training_step(batch, index)
                self.fabric.backward(outputs["loss"])
                self.fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                self.scheduler.step()
                self.state.step += 1
                self.fabric.call("on_train_batch_end", outputs=outputs, index=index, unused=1)
                self.fabric.log("loss", outputs["loss"], step=self.state.step)
            self.validate(model, validation)
            self.state.epoch += 1
            self.fabric.call("on_train_epoch_end", self, epoch=self.state.epoch)
            if self.state.epoch % self.every == 0:
                self.fabric.save(self.folder / f"epoch-{self.state.epoch}.ckpt", self.state)

    @torch.no_grad()
    def validate(self, model, loader):
        model.eval()
        errors = torch.stack([model.validation_step(batch, i) for i, batch in enumerate(loader)])
        mean = self.fabric.all_reduce(errors.mean())
        self.fabric.print(f"validation: {mean:.4f}")


def loader(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator)
    return DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), batch_size=6, shuffle=seed == 0)


if __name__ == "__main__":
    L.seed_everything(5)
    Trainer(max_epochs=1).fit(Regression(), loader(80, 0), loader(20, 1))
    L.seed_everything(6)
    Trainer(max_epochs=3, limit=5).fit(Regression(), loader(80, 0), loader(20, 1))
