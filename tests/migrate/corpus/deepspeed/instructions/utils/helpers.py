import random

import torch
from deepspeed.accelerator import get_accelerator


def print_rank_0(msg, rank=None):
    if rank is not None and rank <= 0:
        print(msg, flush=True)


def to_device(batch, device):
    return {k: v.to(device) for k, v in batch.items()}


def set_random_seed(seed):
    random.seed(seed)
    torch.manual_seed(seed)
    get_accelerator().manual_seed_all(seed)


def get_all_reduce_mean(tensor):
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.SUM)
    return tensor / torch.distributed.get_world_size()


def get_optimizer_grouped_parameters(model, weight_decay, no_decay_name_list=("bias", "norm.weight")):
    groups = [
        {
            "params": [
                p for n, p in model.named_parameters()
                if not any(nd in n.lower() for nd in no_decay_name_list) and p.requires_grad
            ],
            "weight_decay": weight_decay,
        },
        {
            "params": [
                p for n, p in model.named_parameters()
                if any(nd in n.lower() for nd in no_decay_name_list) and p.requires_grad
            ],
            "weight_decay": 0.0,
        },
    ]
    return [group for group in groups if group["params"]]
