import math

from lightning_fabric.utilities import rank_zero_only
import torch.nn.functional as F


def chunked_cross_entropy(logits, targets, chunk_size=16):
    logits, targets = logits.reshape(-1, logits.size(-1)), targets.reshape(-1)
    pieces = [
        F.cross_entropy(a, b, reduction="none") for a, b in zip(logits.split(chunk_size), targets.split(chunk_size))
    ]
    return sum(piece.sum() for piece in pieces) / targets.numel()


def get_lr(learning_rate, it, warmup_iters, max_iters, min_lr):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = (it - warmup_iters) / max(1, max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * min(1.0, ratio))) * (learning_rate - min_lr)


def num_parameters(module, requires_grad=None):
    return sum(p.numel() for p in module.parameters() if requires_grad is None or p.requires_grad == requires_grad)


class CycleIterator:
    def __init__(self, iterable):
        self.iterable, self.epoch, self._iterator = iterable, 0, None

    def __next__(self):
        if self._iterator is None:
            self._iterator = iter(self.iterable)
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator, self.epoch = iter(self.iterable), self.epoch + 1
            return next(self._iterator)

    def __iter__(self):
        return self


@rank_zero_only
def tell(*words):
    print(*words, flush=True)
