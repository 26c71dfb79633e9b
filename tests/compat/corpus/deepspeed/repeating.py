"""Steps are counted, not epochs: data that begins again, functions as optimizer and scheduler."""

import deepspeed
import torch
from deepspeed.utils import RepeatingLoader, log_dist, logger
from torch import nn
from torch.utils.data import Dataset


class Ramp(Dataset):
    def __init__(self, count=60):
        self.x = torch.linspace(-1, 1, count * 3).view(count, 3)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.x[i].square().sum()}


def collate(rows):
    return {key: torch.stack([row[key] for row in rows]) for key in ("x", "y")}


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    x, y = batch["x"].to(model.device), batch["y"].to(model.device)
    output = model(x).squeeze(1)
    return nn.functional.smooth_l1_loss(output, y)


def main():
    deepspeed.init_distributed()
    torch.manual_seed(21)
    model = nn.Sequential(nn.Linear(3, 24), nn.SiLU(), nn.Dropout(0.0), nn.Linear(24, 1))
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        optimizer=lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, alpha=0.9),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8),
        training_data=Ramp(),
        collate_fn=collate,
        config={
            "train_batch_size": 24,
            "train_micro_batch_size_per_gpu": 4,
            "dataloader_drop_last": True,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 1e6},
        },
    )
    log_dist(f"{len(loader)} batches on each rank", ranks=[0])
    logger.info("training")
    data_iterator = iter(RepeatingLoader(loader))
    while engine.global_steps < 8:
        for _ in range(engine.gradient_accumulation_steps()):
            loss = forward_step(data_iterator, engine)
            engine.backward(loss)
            engine.step()
        if engine.global_steps == 5:
            engine.set_train_batch_size(16)
        deepspeed.utils.logger.debug(engine.get_batch_info())
    assert engine.train_batch_size() == 16 and engine.global_samples == 5 * 24 + 3 * 16
    if engine.global_rank == 0:
        print(engine.micro_steps, engine.global_samples, scheduler.get_last_lr(), engine.get_lr())


if __name__ == "__main__":
    main()
