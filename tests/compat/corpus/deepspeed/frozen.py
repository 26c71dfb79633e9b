"""A backbone with BatchNorm, whose running statistics are trained through in its second half."""

import deepspeed
import torch
from torch import nn

CONFIG = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 0.7,
    "steps_per_print": 10,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True, "weight_decay": 0.02}},
    "zero_optimization": {"stage": 1},
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(7, 16).requires_grad_(False)
        self.norm = nn.BatchNorm1d(16)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.embed(x))) * self.scale)


def main():
    deepspeed.init_distributed()
    torch.manual_seed(4)
    net = Net()
    trained = [p for p in net.parameters() if p.requires_grad]
    engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=trained, config=CONFIG)
    generator = torch.Generator().manual_seed(30 + engine.global_rank)
    for number in range(16):
        engine.train(number < 8)
        x = torch.randn(8, 7, generator=generator) * (1 + engine.global_rank)
        loss = nn.functional.cross_entropy(engine(x.to(engine.device)), x[:, :5].argmax(1).to(engine.device))
        engine.backward(loss)
        engine.step()
    assert engine.global_steps == 8
    if engine.global_rank == 0:
        print(loss.item(), [name for name, _ in engine.named_parameters()], engine.module.norm.num_batches_tracked)


if __name__ == "__main__":
    main()
