import torch
import torch.nn.functional as F
from colossalai import launch_from_torch
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin
from colossalai.cluster import DistCoordinator
from torch import nn
from torch.utils.data import TensorDataset


class Tagger(nn.Module):
    def __init__(self, words, tags, dim=12):
        super().__init__()
        self.embed = nn.Embedding(words, dim)
        self.mix = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, tags)

    def forward(self, tokens):
        states, _ = self.mix(self.embed(tokens))
        return self.head(states)


class Trainer:
    def __init__(self, data, coordinator, epochs=2, batch_size=4):
        self.coordinator = coordinator
        self.epochs = epochs
        self.plugin = LowLevelZeroPlugin(
            stage=2, precision="fp32", reduce_bucket_size_in_m=1, overlap_communication=False, verbose=True
        )
        self.booster = Booster(plugin=self.plugin)
        self.loader = self.plugin.prepare_dataloader(data, batch_size=batch_size, shuffle=True, seed=9)
        model = Tagger(16, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.8)
        self.model, self.optimizer, _, self.loader, _ = self.booster.boost(
            model=model, optimizer=optimizer, dataloader=self.loader
        )

    def loss(self, batch):
        tokens, tags = batch
        return F.cross_entropy(self.model(tokens).flatten(0, 1), tags.flatten())

    def fit(self):
        for epoch in range(self.epochs):
            self.loader.sampler.set_epoch(epoch)
            total = 0.0
            for batch in self.loader:
                self.optimizer.zero_grad()
                loss = self.loss(batch)
                self.booster.backward(loss, self.optimizer)
                self.optimizer.step()
                total += loss.item()
            self.report(epoch, total / len(self.loader))

    def report(self, epoch, loss):
        @self.coordinator.on_master_only()
        def write():
            with open("losses.txt", "a") as file:
                file.write(f"{epoch} {loss}\n")

        write()


def main():
    launch_from_torch(seed=2024)
    tokens = torch.randint(0, 16, (50, 7))
    data = TensorDataset(tokens, tokens % 4)
    Trainer(data, DistCoordinator()).fit()


if __name__ == "__main__":
    main()
