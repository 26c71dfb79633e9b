"""Pairs of sentences, padded by batch: a warmed-up linear schedule, and accumulation by hand."""

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import set_seed
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

MAX_BATCH = 4


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 12, padding_idx=0)
        self.mix = nn.GRU(12, 12, batch_first=True)
        self.head = nn.Linear(12, 2)

    def forward(self, input_ids, labels=None):
        hidden, _ = self.mix(self.embed(input_ids))
        logits = self.head(hidden.mean(1))
        loss = nn.functional.cross_entropy(logits, labels) if labels is not None else None
        return {"loss": loss, "logits": logits}


def samples(count, seed):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(3, 9, (), generator=generator))
        tokens = torch.randint(1, 30, (length,), generator=generator)
        made.append({"input_ids": tokens, "labels": int(tokens.sum() % 2)})
    return made


def training_function(config):
    accelerator = Accelerator(cpu=True)
    batch_size, accumulate = config["batch_size"], 1
    if batch_size > MAX_BATCH and accelerator.distributed_type != DistributedType.XLA:
        accumulate = batch_size // MAX_BATCH
        batch_size = MAX_BATCH
    set_seed(config["seed"])

    def collate(examples):
        longest = 10 if accelerator.distributed_type == DistributedType.XLA else None
        padded = nn.utils.rnn.pad_sequence([e["input_ids"] for e in examples], batch_first=True)
        if longest is not None:
            padded = nn.functional.pad(padded, (0, longest - padded.shape[1]))
        return {"input_ids": padded, "labels": torch.tensor([e["labels"] for e in examples])}

    with accelerator.main_process_first():
        train, held_out = samples(50, 1), samples(18, 2)
    train_loader = DataLoader(
        train, shuffle=True, collate_fn=collate, batch_size=batch_size, drop_last=True
    )
    eval_loader = DataLoader(held_out, collate_fn=collate, batch_size=16)
    model = Classifier().to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=config["lr"])
    total = len(train_loader) * config["num_epochs"] // accumulate
    lr_scheduler = LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 3) * max(0.1, 1 - s / total))
    model, optimizer, train_loader, eval_loader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, lr_scheduler
    )
    for epoch in range(config["num_epochs"]):
        model.train()
        for step, batch in enumerate(train_loader):
            outputs = model(**batch)
            loss = outputs["loss"] / accumulate
            accelerator.backward(loss)
            if step % accumulate == accumulate - 1:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        seen = 0
        for batch in eval_loader:
            with torch.no_grad():
                predictions = model(batch["input_ids"])["logits"].argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            seen += len(references)
        accelerator.print(f"epoch {epoch}: {seen} sentences")


if __name__ == "__main__":
    training_function({"lr": 2e-3, "num_epochs": 2, "seed": 7, "batch_size": 8})
