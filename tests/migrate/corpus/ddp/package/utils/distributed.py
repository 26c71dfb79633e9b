import os

import torch
import torch.distributed as dist


def is_dist_avail_and_initialized():
    return dist.is_available() and dist.is_initialized()


def get_world_size():
    return dist.get_world_size() if is_dist_avail_and_initialized() else 1


def is_main_process():
    return not is_dist_avail_and_initialized() or dist.get_rank() == 0


def setup():
    gpu = int(os.environ["LOCAL_RANK"])
    dist.init_process_group(backend="gloo", init_method="env://")
    dist.barrier()
    return torch.device(f"cuda:{gpu}") if torch.cuda.is_available() else torch.device("cpu")


def reduce_mean(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    tensor /= get_world_size()
    return tensor


def cleanup():
    # Without it, torch's destructors may wait for one another; seen with 2.13.
    dist.barrier()
    dist.destroy_process_group()
