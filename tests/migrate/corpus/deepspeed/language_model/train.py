# Fine-tuning as with transformers' examples, of a model that is made up, under ZeRO.
import argparse
import math
import os

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=4)
parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
parser.add_argument("--learning_rate", type=float, default=5e-3)
parser.add_argument("--weight_decay", type=float, default=0.05)
parser.add_argument("--num_train_epochs", type=int, default=2)
parser.add_argument("--output_dir", type=str, default=None)


def get_train_ds_config(args):
    zero_opt_dict = {
        "stage": 2,
        "offload_optimizer": {"device": "none"},
        "overlap_comm": False,
    }
    return {
        "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "steps_per_print": 10000,
        "zero_optimization": zero_opt_dict,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
    }


def get_optimizer_grouped_parameters(model, weight_decay, no_decay_names=("bias", "norm.weight", "layernorm.weight")):
    return [
        {
            "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay_names)],
            "weight_decay": weight_decay,
        },
        {
            "params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay_names)],
            "weight_decay": 0.0,
        },
    ]


class Collator:
    def __call__(self, rows):
        longest = max(map(len, rows))
        ids = torch.tensor([list(row) + [0] * (longest - len(row)) for row in rows])
        mask = (ids != 0).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}


def main():
    args = parser.parse_args()
    deepspeed.init_distributed()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(get_accelerator().device_name(local_rank))
    torch.manual_seed(1234)

    rows = [[1 + (i + j * (1 + i % 3)) % 23 for j in range(4 + i % 6)] for i in range(80)]
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=32))
    sampler = RandomSampler(rows) if local_rank == -1 else DistributedSampler(rows)
    train_dataloader = DataLoader(rows, collate_fn=Collator(), sampler=sampler, batch_size=args.per_device_train_batch_size)

    optimizer_grouped_parameters = get_optimizer_grouped_parameters(model, args.weight_decay)
    optimizer = torch.optim.AdamW(optimizer_grouped_parameters, lr=args.learning_rate, betas=(0.9, 0.95))
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    lr_scheduler = get_scheduler(
        name="cosine", optimizer=optimizer, num_warmup_steps=1,
        num_training_steps=args.num_train_epochs * num_update_steps_per_epoch)
    model, optimizer, _, lr_scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, args=args, config=get_train_ds_config(args),
        lr_scheduler=lr_scheduler, dist_init_required=True)

    for epoch in range(args.num_train_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            batch = {k: v.to(device) for k, v in batch.items()}
            outputs = model(**batch, use_cache=False)
            loss = outputs.loss
            model.backward(loss)
            model.step()
        if torch.distributed.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
        if args.output_dir is not None:
            model.save_checkpoint(args.output_dir)


if __name__ == "__main__":
    main()
