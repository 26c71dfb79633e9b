"""PyTorch's FSDP by its plugin, with a sampler of the script's own."""

import colossalai
import torch
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchFSDPPlugin
from colossalai.cluster import DistCoordinator
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset


class StatefulSampler(DistributedSampler):
    """Begins an epoch behind what was seen of it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.start = 0

    def __iter__(self):
        return iter(list(super().__iter__())[self.start :])


def main():
    colossalai.launch_from_torch(seed=77)
    coordinator = DistCoordinator()
    plugin = TorchFSDPPlugin()
    booster = Booster(plugin=plugin)
    x = torch.randn(60, 7)
    data = TensorDataset(x, x.cumsum(1))
    loader = plugin.prepare_dataloader(
        data, batch_size=5, shuffle=True, distributed_sampler_cls=StatefulSampler, num_workers=0
    )
    model = nn.Sequential(nn.Linear(7, 24), nn.SiLU(), nn.Linear(24, 7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8)
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, dataloader=loader)

    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        loader.sampler.start = 10 if epoch == 0 else 0
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            booster.backward(loss, optimizer)
            optimizer.step()
        coordinator.print_on_master(f"{epoch}: {loss.item():.4f}")


if __name__ == "__main__":
    main()
