"""Images of bars, classified by a small convolutional network: OneCycle, accuracy over all ranks."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Bars(Dataset):
    def __init__(self, indices):
        self.indices = indices

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.indices[index])
        image = 0.3 * torch.randn(3, 8, 8, generator=generator)
        label = self.indices[index] % 2
        image[:, 4, :] += 1 - label
        image[:, :, 4] += label
        return {"image": image, "label": label}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default=None)
    parser.add_argument("--cpu", action="store_true", default=True)
    args = parser.parse_args()
    config = {"lr": 3e-2, "num_epochs": 2, "seed": 42, "batch_size": 8}
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    set_seed(config["seed"])

    order = torch.randperm(90).tolist()
    train_loader = DataLoader(Bars(order[:70]), shuffle=True, batch_size=config["batch_size"])
    eval_loader = DataLoader(Bars(order[70:]), shuffle=False, batch_size=config["batch_size"])
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 2)
    )
    model = model.to(accelerator.device)
    for parameter in model[0].parameters():
        parameter.requires_grad = False
    mean = torch.tensor([0.1, 0.1, 0.1])[None, :, None, None].to(accelerator.device)

    optimizer = torch.optim.Adam(params=model.parameters(), lr=config["lr"] / 25)
    lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer=optimizer, max_lr=config["lr"], epochs=config["num_epochs"],
        steps_per_epoch=len(train_loader),
    )
    model, optimizer, train_loader, eval_loader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, lr_scheduler
    )
    for epoch in range(config["num_epochs"]):
        model.train()
        for batch in train_loader:
            inputs = batch["image"] - mean
            outputs = model(inputs)
            loss = nn.functional.cross_entropy(outputs, batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        model.eval()
        accurate, count = 0, 0
        for batch in eval_loader:
            with torch.no_grad():
                outputs = model(batch["image"] - mean)
            predictions, references = accelerator.gather_for_metrics(
                (outputs.argmax(dim=-1), batch["label"])
            )
            accurate += (predictions == references).long().sum()
            count += len(references)
        accelerator.print(f"epoch {epoch}: {100 * accurate.item() / count:.2f} of {count}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
