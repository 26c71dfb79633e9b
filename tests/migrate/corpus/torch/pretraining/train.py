"""A small language model: batches from a function, micro-batches, averaged weights."""

import copy
import math
import os
import tempfile

import torch
from torch import nn
from torch.nn import functional as F

block_size, batch_size = 8, 4
accumulation, max_iters, warmup_iters = 2, 9, 3
learning_rate, min_lr, grad_clip = 1e-2, 1e-3, 1.0
device = 'cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available() else 'cpu'
out_dir = tempfile.mkdtemp()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)

    def forward(self, x):
        return x + self.mix(self.norm(x)).relu()


class Model(nn.Module):
    def __init__(self, vocab=16, width=12, depth=2):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, idx, targets=None):
        x = self.tokens(idx)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss

    def configure_optimizers(self, weight_decay, lr):
        decay, rest = [], []
        for name, p in self.named_parameters():
            (decay if p.dim() >= 2 else rest).append(p)
        groups = [{'params': decay, 'weight_decay': weight_decay}, {'params': rest, 'weight_decay': 0.0}]
        print(f'{len(decay)} tensors decay, {len(rest)} do not')
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


class Average:
    def __init__(self, model, decay=0.9):
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for mine, its in zip(self.module.parameters(), model.parameters()):
            mine.lerp_(its, 1 - self.decay)


torch.manual_seed(1337)
data = torch.randint(0, 16, (400,))


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i:i + block_size] for i in ix])
    y = torch.stack([data[i + 1:i + 1 + block_size] for i in ix])
    return x.to(device), y.to(device)


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss(model):
    model.eval()
    losses = torch.zeros(3)
    for k in range(3):
        X, Y = get_batch()
        logits, loss = model(X, Y)
        losses[k] = loss.item()
    model.train()
    return losses.mean()


model = Model()
model.to(device)
average = Average(model)
optimizer = model.configure_optimizers(0.1, learning_rate)
best, path = float('inf'), os.path.join(out_dir, 'best.pt')
X, Y = get_batch()
iter_num = 0
while iter_num < max_iters:
    for param_group in optimizer.param_groups:
        param_group['lr'] = get_lr(iter_num)
    for micro_step in range(accumulation):
        logits, loss = model(X, Y)
        X, Y = get_batch()
        (loss / accumulation).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    average.update(model)
    if iter_num % 4 == 0:
        val = min(estimate_loss(model), estimate_loss(average.module))
        print(f'{iter_num}: loss {loss.item():.4f}, norm {norm.item():.3f}, val {val:.4f}')
        if val < best:
            best = val
            torch.save({'model': model.state_dict(), 'iter_num': iter_num}, path)
    iter_num += 1

model = Model().to(device)
model.load_state_dict(torch.load(path)['model'])
model.eval()
print(model(X)[0].argmax(-1))
