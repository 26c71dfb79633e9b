import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

import deepspeed
from utils.data import IGNORE, PromptDataset
from utils.ds_utils import get_train_ds_config
from utils.helpers import (
    get_all_reduce_mean, get_optimizer_grouped_parameters, print_rank_0, set_random_seed, to_device,
)


class Model(nn.Module):
    def __init__(self, words, width=32):
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Embedding(16, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.lm_head = nn.Linear(width, words, bias=False)

    def forward(self, input_ids, labels, use_cache=False):
        length = input_ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=input_ids.device)
        x = self.embed(input_ids) + self.place(torch.arange(length, device=input_ids.device))
        logits = self.lm_head(self.layers(x, mask=mask))[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--learning_rate", type=float, default=5e-3)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--num_train_epochs", type=int, default=3)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--dtype", default="fp32", choices=["fp16", "bf16", "fp32"])
    parser.add_argument("--zero_stage", type=int, default=0)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def main():
    args = parse_args()
    deepspeed.init_distributed()
    args.global_rank = torch.distributed.get_rank()
    ds_config = get_train_ds_config(offload=args.offload, dtype=args.dtype, stage=args.zero_stage)
    ds_config["train_micro_batch_size_per_gpu"] = 4
    ds_config["train_batch_size"] = 4 * torch.distributed.get_world_size() * args.gradient_accumulation_steps
    set_random_seed(args.seed)
    torch.distributed.barrier()

    model = Model(14)
    train_dataset, eval_dataset = PromptDataset(64, 14, 0), PromptDataset(16, 14, 1)
    if torch.distributed.get_world_size() == 1:
        train_sampler, eval_sampler = RandomSampler(train_dataset), SequentialSampler(eval_dataset)
    else:
        train_sampler, eval_sampler = DistributedSampler(train_dataset), DistributedSampler(eval_dataset)
    train_dataloader = DataLoader(train_dataset, sampler=train_sampler, batch_size=4)
    eval_dataloader = DataLoader(eval_dataset, sampler=eval_sampler, batch_size=4)

    def evaluation(model):
        model.eval()
        losses = 0
        for step, batch in enumerate(eval_dataloader):
            with torch.no_grad():
                losses += model(**to_device(batch, device)).float()
        losses = get_all_reduce_mean(losses / (step + 1))
        return math.exp(losses.item()), losses.item()

    optimizer = torch.optim.AdamW(
        get_optimizer_grouped_parameters(model, args.weight_decay), lr=args.learning_rate, betas=(0.9, 0.95)
    )
    num_updates = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.num_train_epochs * num_updates)
    model, optimizer, _, lr_scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, args=args, config=ds_config, lr_scheduler=lr_scheduler,
        dist_init_required=True,
    )
    device = model.device
    print_rank_0("***** Running training *****", args.global_rank)
    perplexity, _ = evaluation(model)
    for epoch in range(args.num_train_epochs):
        model.train()
        for batch in train_dataloader:
            loss = model(**to_device(batch, device), use_cache=False)
            model.backward(loss)
            model.step()
        perplexity, eval_loss = evaluation(model)
        print_rank_0(f"ppl: {perplexity:.3f}, loss: {eval_loss:.4f}", args.global_rank)
        model.tput_timer.update_epoch_count()
    model.save_checkpoint("out", tag="last")


if __name__ == "__main__":
    main()
