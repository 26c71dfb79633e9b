"""Stage 3: built under zero.Init, initialized under GatheredParameters, saved whole."""

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 12, "warmup_num_steps": 3, "cos_min_ratio": 0.01},
    },
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 1000,
        "contiguous_gradients": True,
        "round_robin_gradients": True,
    },
}


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 32)
        self.rest = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.last = nn.Linear(32, 3)

    def forward(self, x):
        x = torch.relu(self.first(x))
        for layer in self.rest:
            x = x + torch.relu(layer(x))
        return self.last(x)


def main():
    deepspeed.init_distributed()
    torch.manual_seed(11)
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = Tower()
    for layer in model.rest:
        with GatheredParameters([layer.weight, layer.bias], modifier_rank=0):
            if deepspeed.comm.get_rank() == 0:
                nn.init.orthogonal_(layer.weight)
                nn.init.constant_(layer.bias, 0.01)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    generator = torch.Generator().manual_seed(deepspeed.comm.get_rank())
    for step in range(12):
        x = torch.randn(8, 10, generator=generator)
        target = (x[:, :3] * x[:, 3:6]).argmax(1)
        loss = nn.functional.cross_entropy(engine(x.to(engine.device)), target.to(engine.device))
        engine.backward(loss)
        engine.step()
    state = engine._zero3_consolidated_16bit_state_dict()
    if engine.global_rank == 0:
        assert state["first.weight"].shape == (32, 10)
        print(f"{loss.item():.4f}", {name: tuple(one.shape) for name, one in state.items()}, engine.get_lr())


if __name__ == "__main__":
    main()
