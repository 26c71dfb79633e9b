# Small causal language model of transformers, from a random config, on Horovod.
import random

import horovod.torch as hvd
import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

PAD = 0


class Collator:
    """Pads to the longest of a batch."""

    def __init__(self, pad):
        self.pad = pad

    def __call__(self, rows):
        longest = max(len(row) for row in rows)
        ids = torch.tensor([row + [self.pad] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def corpus(n):
    rng = random.Random(3)
    for _ in range(n):
        start, step = rng.randrange(1, 20), rng.randrange(1, 4)
        yield [1 + (start + step * i) % 29 for i in range(rng.randrange(5, 12))]


def main():
    hvd.init()
    device = torch.device(f"cuda:{hvd.local_rank()}" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(11)

    rows = list(corpus(96))
    sampler = DistributedSampler(rows, num_replicas=hvd.size(), rank=hvd.rank(), seed=2)
    loader = DataLoader(rows, batch_size=4, sampler=sampler, collate_fn=Collator(PAD))

    config = GPT2Config(vocab_size=30, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1)
    model = GPT2LMHeadModel(config).to(device)
    no_decay = ("bias", "ln_1.weight", "ln_2.weight", "ln_f.weight")
    groups = [
        {"params": [p for n, p in model.named_parameters() if not n.endswith(no_decay)], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if n.endswith(no_decay)], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=2e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    steps = 2 * len(loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=steps // 10, num_training_steps=steps)

    model.train()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step, batch in enumerate(loader):
            batch = {key: value.to(device) for key, value in batch.items()}
            outputs = model(**batch)
            outputs.loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        loss = hvd.allreduce(outputs.loss.detach(), name="loss").item()
        everyone = hvd.allgather_object({"rank": hvd.rank(), "lr": scheduler.get_last_lr()[0]})
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}", everyone)


if __name__ == "__main__":
    main()
