"""One cycle of rates and momentum, steps whose end the script says, and a teacher."""

import deepspeed
import deepspeed.comm as dist
import torch
from torch import nn
from torch.nn import functional as F


def mlp(width):
    return nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 4))


def main():
    dist.init_distributed()
    torch.manual_seed(2)
    teacher = mlp(40).eval().requires_grad_(False)
    student = mlp(12)
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=student,
        model_parameters=student.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 6,
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 0.3,
            "optimizer": {"type": "Adam", "params": {"lr": 0.001, "adam_w_mode": False, "torch_adam": True}},
            "scheduler": {
                "type": "OneCycle",
                "params": {
                    "cycle_min_lr": 0.001,
                    "cycle_max_lr": 0.02,
                    "cycle_first_step_size": 3,
                    "cycle_second_step_size": 4,
                    "decay_step_size": 2,
                    "decay_lr_rate": 0.5,
                    "decay_mom_rate": 0.01,
                    "cycle_min_mom": 0.8,
                    "cycle_max_mom": 0.95,
                },
            },
            "zero_optimization": {"stage": 2},
        },
    )
    teacher.to(engine.device)
    generator = torch.Generator().manual_seed(50 + dist.get_rank())
    # Steps of one, two and three micro-batches in turn; the script divides its losses itself.
    for number in range(10):
        parts = 1 + number % 3
        for part in range(parts):
            x = torch.randn(6, 5, generator=generator).to(engine.device)
            with torch.no_grad():
                soft = F.log_softmax(teacher(x), 1)
            loss = F.kl_div(F.log_softmax(engine(x), 1), soft, reduction="batchmean", log_target=True) / parts
            engine.set_gradient_accumulation_boundary(part == parts - 1)
            engine.backward(loss, scale_wrt_gas=False)
            engine.step()
            assert engine.was_step_applied() == (part == parts - 1)
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG) if torch.cuda.is_available() else dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(number, mean.item(), engine.get_lr(), engine.get_mom(), engine.get_global_grad_norm())
    gathered = [torch.zeros_like(mean) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mean)
    assert all(torch.equal(one, gathered[0]) for one in gathered)
    dist.barrier()


if __name__ == "__main__":
    main()
