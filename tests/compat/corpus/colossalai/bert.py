"""A small encoder that learns to tell sentences apart, with ZeRO-1 and decay for some weights."""

import colossalai
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin
from colossalai.cluster import DistCoordinator
from colossalai.nn.lr_scheduler import LinearWarmupLR
from colossalai.nn.optimizer import HybridAdam
from colossalai.utils import get_current_device
from torch import nn
from torch.utils.data import Dataset

NUM_EPOCHS = 3
BATCH_SIZE = 5
WARMUP_FRACTION = 0.1


class Pairs(Dataset):
    """Is the second half the first half again?"""

    def __init__(self, size, length=6, words=12):
        half = torch.randint(1, words, (size, length))
        self.labels = torch.arange(size) % 2
        other = torch.randint(1, words, (size, length))
        self.ids = torch.cat([half, torch.where(self.labels[:, None] == 1, half, other)], 1)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


class Encoder(nn.Module):
    def __init__(self, words=12, dim=16, layers=2, positions=12):
        super().__init__()
        self.words = nn.Embedding(words, dim)
        self.positions = nn.Parameter(torch.randn(positions, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(dim, 2)

    def forward(self, input_ids, labels=None):
        hidden = self.layers(self.words(input_ids) + self.positions)
        logits = self.head(hidden.mean(1))
        loss = nn.functional.cross_entropy(logits, labels) if labels is not None else None
        return {"loss": loss, "logits": logits}


def move_to_cuda(batch):
    return {k: v.to(get_current_device()) for k, v in batch.items()}


@torch.no_grad()
def evaluate_model(model, dataloader):
    model.eval()
    accum_loss = torch.zeros(1, device=get_current_device())
    for batch in dataloader:
        accum_loss += model(**move_to_cuda(batch))["loss"]
    dist.all_reduce(accum_loss.div_(dist.get_world_size() * len(dataloader)))
    return accum_loss.item()


def main():
    colossalai.launch_from_torch(seed=42)
    coordinator = DistCoordinator()
    lr = 2.4e-3 * coordinator.world_size

    plugin = LowLevelZeroPlugin(stage=1, precision="fp32", initial_scale=2**5, max_norm=0.8, overlap_communication=False)
    booster = Booster(plugin=plugin)
    train = plugin.prepare_dataloader(Pairs(50), batch_size=BATCH_SIZE, shuffle=True, drop_last=True)
    valid = plugin.prepare_dataloader(Pairs(20), batch_size=BATCH_SIZE)

    model = Encoder()
    no_decay = ["bias", "norm"]
    optimizer_grouped_parameters = [
        {
            "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
            "weight_decay": 0.05,
        },
        {
            "params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)],
            "weight_decay": 0.0,
        },
    ]
    optimizer = HybridAdam(optimizer_grouped_parameters, lr=lr, eps=1e-8)
    total_steps = len(train) * NUM_EPOCHS
    lr_scheduler = LinearWarmupLR(optimizer, total_steps, warmup_steps=int(total_steps * WARMUP_FRACTION))

    def _criterion(outputs, inputs):
        return outputs["loss"]

    model, optimizer, _criterion, _, lr_scheduler = booster.boost(
        model, optimizer, criterion=_criterion, lr_scheduler=lr_scheduler
    )
    for epoch in range(NUM_EPOCHS):
        model.train()
        optimizer.zero_grad()
        for batch in train:
            batch = move_to_cuda(batch)
            outputs = model(**batch)
            loss = _criterion(outputs, None)
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            lr_scheduler.step()
        coordinator.print_on_master(f"epoch {epoch}: {evaluate_model(model, valid):.4f}")


if __name__ == "__main__":
    main()
