"""Masked-language-model pre-training of a toy BERT, without the Trainer."""

import random

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM, get_scheduler, set_seed

CLS, SEP, PAD, MASK = 0, 1, 2, 3
WORDS = 40


def sentences(n):
    rng = random.Random(4)
    for _ in range(n):
        start = rng.randrange(4, WORDS)
        yield [CLS] + [4 + (start + i) % (WORDS - 4) for i in range(rng.randint(4, 9))] + [SEP]


class MaskingCollator:
    """Pads a batch, and masks every fourth token, beginning anywhere."""

    def __init__(self, every=4):
        self.every = every

    def __call__(self, examples):
        length = max(map(len, examples))
        input_ids = torch.tensor([e + [PAD] * (length - len(e)) for e in examples])
        attention_mask = (input_ids != PAD).long()
        labels = torch.full_like(input_ids, -100)
        for row in range(len(examples)):
            where = slice(1 + int(torch.randint(self.every, ())), len(examples[row]) - 1, self.every)
            labels[row, where] = input_ids[row, where]
            input_ids[row, where] = MASK
        return dict(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


def main():
    set_seed(8)
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    config = BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, pad_token_id=PAD,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.0,
    )
    model = BertForMaskedLM(config)
    model.to(device)

    dataset = list(sentences(70))
    dataloader = DataLoader(dataset, shuffle=True, batch_size=8, collate_fn=MaskingCollator())
    no_decay = ["bias", "LayerNorm.weight"]
    optimizer_grouped_parameters = [
        {
            "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
            "weight_decay": 0.01,
        },
        {
            "params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)],
            "weight_decay": 0.0,
        },
    ]
    optimizer = torch.optim.AdamW(optimizer_grouped_parameters, lr=5e-3)
    num_training_steps = 2 * len(dataloader)
    lr_scheduler = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=num_training_steps)

    model.train()
    for epoch in range(2):
        for batch in dataloader:
            batch = {k: v.to(device) for k, v in batch.items()}
            outputs = model(**batch)
            loss = outputs.loss
            loss.backward()

            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        print(f"epoch {epoch} | loss {loss.item():.4f} | lr {lr_scheduler.get_last_lr()[0]:.2e}")


if __name__ == "__main__":
    main()
