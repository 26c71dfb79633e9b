# Fine-tunes a (tiny, random) GPT-2 on sentences of unequal length, with metrics over all ranks.
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

VOCAB, PAD = 61, 60
MAX_LEN = 12


class Sentences(Dataset):
    """Arithmetic progressions, of three to twelve tokens."""

    def __init__(self, size, seed):
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(size):
            n, start, step = (torch.randint(*lim, (1,), generator=g).item()
                              for lim in ((3, MAX_LEN + 1), (0, 20), (1, 4)))
            self.rows.append(torch.arange(n) * step + start)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Collator:
    def __init__(self, pad):
        self.pad = pad

    def __call__(self, rows):
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.pad)
        mask = (ids != self.pad).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def gather_mean(value, count):
    both = torch.stack([value * count, count])
    parts = [torch.zeros_like(both) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, both)
    total = torch.stack(parts).sum(0)
    return (total[0] / total[1]).item()


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    loss, tokens = torch.tensor(0.0, device=device), torch.tensor(0.0, device=device)
    for batch in loader:
        batch = {k: v.to(device) for k, v in batch.items()}
        n = (batch["labels"][:, 1:] != -100).sum()
        loss += model(**batch).loss * n
        tokens += n
    model.train()
    return gather_mean(loss / tokens, tokens)


def main():
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    device = torch.device("cpu")
    torch.manual_seed(17)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=MAX_LEN, n_embd=16, n_layer=2, n_head=2, pad_token_id=PAD,
        bos_token_id=PAD, eos_token_id=PAD, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config).to(device)
    train, valid = Sentences(90, 1), Sentences(20, 2)
    sampler = DistributedSampler(train, seed=17)
    loader = DataLoader(train, batch_size=5, sampler=sampler, collate_fn=Collator(PAD))
    valid_loader = DataLoader(
        valid, batch_size=10, sampler=DistributedSampler(valid, shuffle=False), collate_fn=Collator(PAD)
    )

    ddp_model = DDP(model)
    optimizer = AdamW(ddp_model.parameters(), lr=5e-3, weight_decay=0.01)
    scheduler = get_linear_schedule_with_warmup(optimizer, 3, 2 * len(loader))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step, batch in enumerate(loader):
            batch = {key: value.to(device) for key, value in batch.items()}
            outputs = ddp_model(**batch)
            outputs.loss.backward()
            torch.nn.utils.clip_grad_norm_(ddp_model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        perplexity = evaluate(ddp_model, valid_loader, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: validation loss {perplexity:.4f}")
    if dist.get_rank() == 0:
        ddp_model.module.save_pretrained(os.environ.get("OUTPUT", "gpt2"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
