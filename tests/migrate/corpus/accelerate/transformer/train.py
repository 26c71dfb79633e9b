#!/usr/bin/env python
"""Pretrain a toy causal language model on strings of brackets (no Trainer)."""
import argparse
import logging
import math
import os
import random

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler

logger = get_logger(__name__)

PAD, OPEN, CLOSE, END = range(4)


def balanced(depth):
    """A random balanced string as token ids."""
    if depth == 0:
        return []
    inner = balanced(depth - 1)
    return [OPEN] + inner + [CLOSE] if random.random() < 0.6 else inner + [OPEN, CLOSE]


class Collator:
    """Pads to the longest of the batch; padding is ignored by the loss."""

    def __call__(self, examples):
        width = max(len(e) for e in examples)
        input_ids = torch.full((len(examples), width), PAD)
        labels = torch.full((len(examples), width), -100)
        mask = torch.zeros((len(examples), width), dtype=torch.long)
        for row, example in enumerate(examples):
            n = len(example)
            input_ids[row, :n] = labels[row, :n] = torch.tensor(example)
            mask[row, :n] = 1
        return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=4)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=5e-3)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=3)
    parser.add_argument("--num_warmup_steps", type=int, default=2)
    parser.add_argument("--lr_scheduler_type", default="linear")
    parser.add_argument("--output_dir", default="brackets")
    parser.add_argument("--seed", type=int, default=17)
    return parser.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps, cpu=True)
    logging.basicConfig(level=logging.INFO)
    logger.info(accelerator.state, main_process_only=False)
    set_seed(args.seed)

    examples = [balanced(random.randint(2, 6)) + [END] for _ in range(60)]
    train_dataset, eval_dataset = examples[:46], examples[46:]
    train_dataloader = DataLoader(
        train_dataset, shuffle=True, collate_fn=Collator(), batch_size=args.per_device_train_batch_size
    )
    eval_dataloader = DataLoader(
        eval_dataset, collate_fn=Collator(), batch_size=args.per_device_eval_batch_size
    )

    config = GPT2Config(
        vocab_size=4, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=END, eos_token_id=END,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)

    # Biases and layer norms are not decayed.
    no_decay = ["bias", "ln_"]
    optimizer_grouped_parameters = [
        {
            "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
            "weight_decay": args.weight_decay,
        },
        {
            "params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)],
            "weight_decay": 0.0,
        },
    ]
    optimizer = torch.optim.AdamW(optimizer_grouped_parameters, lr=args.learning_rate)

    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    max_train_steps = args.num_train_epochs * num_update_steps_per_epoch
    lr_scheduler = get_scheduler(
        name=args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.num_warmup_steps,
        num_training_steps=max_train_steps,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    total_batch_size = (
        args.per_device_train_batch_size * accelerator.num_processes * args.gradient_accumulation_steps
    )
    logger.info(f"  Total train batch size = {total_batch_size}")
    progress_bar = tqdm(range(max_train_steps), disable=not accelerator.is_local_main_process)
    completed_steps = 0
    for epoch in range(args.num_train_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs.loss
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                progress_bar.update(1)
                completed_steps += 1

        model.eval()
        losses = []
        for step, batch in enumerate(eval_dataloader):
            with torch.no_grad():
                outputs = model(**batch)
            loss = outputs.loss
            losses.append(accelerator.gather_for_metrics(loss.repeat(args.per_device_eval_batch_size)))
        perplexity = math.exp(torch.cat(losses).mean())
        logger.info(f"epoch {epoch}: perplexity: {perplexity}")

    accelerator.wait_for_everyone()
    unwrapped_model = accelerator.unwrap_model(model)
    unwrapped_model.save_pretrained(
        args.output_dir, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    if accelerator.is_main_process:
        print(sorted(os.listdir(args.output_dir)))


if __name__ == "__main__":
    main()
