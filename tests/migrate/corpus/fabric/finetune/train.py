"""Fine-tune a small BERT of Hugging Face to classify sentences, with Fabric."""

import logging
from functools import partial

import torch
from lightning_fabric import Fabric
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_scheduler

log = logging.getLogger("finetune")

WORDS = "[PAD] good great fine nice bad awful poor dull the a film plot was is very not".split()
TEXTS = [
    ("the film was good", 1), ("the plot is dull", 0), ("a very nice film", 1),
    ("a poor plot", 0), ("the film is not bad", 1), ("the film was not good", 0),
    ("great film", 1), ("awful", 0), ("a fine plot", 1), ("the film is very bad", 0),
] * 5


def encode(text):
    return torch.tensor([WORDS.index(word) for word in text.split()])


def collate(samples, pad_id):
    ids = pad_sequence([encode(text) for text, _ in samples], batch_first=True, padding_value=pad_id)
    labels = torch.tensor([label for _, label in samples])
    return {"input_ids": ids, "attention_mask": (ids != pad_id).long(), "labels": labels}


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(1234, verbose=False)
    logging.basicConfig(level=logging.INFO if fabric.is_global_zero else logging.ERROR)

    loader = DataLoader(TEXTS, batch_size=5, shuffle=True, drop_last=True,
                        collate_fn=partial(collate, pad_id=0))
    loader = fabric.setup_dataloaders(loader)

    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, num_labels=2,
    )
    model = BertForSequenceClassification(config)
    no_decay = ["bias", "LayerNorm.weight"]
    groups = [
        {"params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
         "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)],
         "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)
    epochs = 3
    lr_scheduler = get_scheduler(
        "linear", optimizer=optimizer, num_warmup_steps=2, num_training_steps=epochs * len(loader)
    )

    model.train()
    for epoch in range(epochs):
        correct = torch.zeros(1, device=fabric.device)
        seen = 0
        for batch in loader:
            outputs = model(**batch)
            fabric.backward(outputs.loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=2.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            correct += (outputs.logits.argmax(-1) == batch["labels"]).sum()
            seen += len(batch["labels"])
        accuracy = fabric.all_gather(correct / seen).mean()
        log.info("epoch %d: loss %.4f, accuracy %.2f", epoch, outputs.loss.item(), accuracy.item())


if __name__ == "__main__":
    main()
