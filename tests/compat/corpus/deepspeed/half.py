"""Autocast to bfloat16, asked for by a flag; a reward model that is only asked."""

import argparse

import deepspeed
import torch
from torch import nn


def settings(args):
    config = {
        "train_batch_size": 8 * args.accumulation,
        "gradient_accumulation_steps": args.accumulation,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": args.stage},
    }
    if args.dtype != "fp32":
        config["torch_autocast"] = {"enabled": True, "dtype": args.dtype}
    return config


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(12, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(args))
    generator = torch.Generator().manual_seed(engine.global_rank)
    for step in range(20):
        x = torch.randn(4, 12, generator=generator).to(engine.device)
        output = engine(x)
        loss = nn.functional.cross_entropy(output.float(), x[:, :6].argmax(1))
        engine.backward(loss)
        engine.step()
    if engine.global_rank == 0:
        print(f"{loss.item():.4f} after {engine.global_steps} steps, {engine.skipped_steps} skipped")


if __name__ == "__main__":
    main()
