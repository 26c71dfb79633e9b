"""All that is Horovod's."""
from horovod.torch import (
    Compression,
    DistributedOptimizer,
    allreduce,
    broadcast_object,
    broadcast_parameters,
    size,
)
from torch.optim import SGD


def optimizer(model, rate):
    sgd = SGD([
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 1e-3},
        {"params": [p for p in model.parameters() if p.ndim == 1]},
    ], lr=rate * size(), momentum=0.8, nesterov=True)
    broadcast_parameters(model.state_dict(), root_rank=0)
    return DistributedOptimizer(
        sgd,
        named_parameters=model.named_parameters(),
        compression=Compression.none,
        gradient_predivide_factor=2.0,
        num_groups=2,
    )


def mean(value, name):
    return allreduce(value, name=name).item()


def share(thing):
    return broadcast_object(thing, root_rank=0)
