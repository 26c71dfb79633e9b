"""A class derived from Fabric, whose run is the training, and two losses of one model in a step."""

import torch
from lightning_fabric.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Training(Fabric):
    def run(self, epochs, rate):
        self.seed_everything(30)
        x = torch.randn(64, 4)
        loader = DataLoader(TensorDataset(x, x.flip(1)), batch_size=8, shuffle=True)
        loader = self.setup_dataloaders(loader, move_to_device=False)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
        model, optimizer, scheduler = self.setup(model, optimizer, scheduler=scheduler)
        for epoch in range(epochs):
            for x, y in loader:
                x, y = self.to_device((x, y))
                optimizer.zero_grad()
                with self.no_backward_sync(model):
                    self.backward(nn.functional.l1_loss(model(x), y))
                self.backward(0.5 * nn.functional.mse_loss(model(x + 0.01), y))
                optimizer.step()
                scheduler.step()
            self.print(f"epoch {epoch}: {scheduler.get_last_lr()[0]:.4f}")
        return model


if __name__ == "__main__":
    model = Training(accelerator="cpu", devices=2, strategy="ddp").run(3, rate=0.2)
    assert len(list(model.parameters())) == 2
