"""colossalai run --nproc_per_node 2 train.py --num_epochs 1"""
import json
from contextlib import nullcontext

import torch
import transformers
from tqdm import tqdm

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.cluster import DistCoordinator
from colossalai.logging import disable_existing_loggers, get_dist_logger
from colossalai.nn.optimizer import HybridAdam
from colossalai.utils import get_current_device, set_seed
from gpt import RandomTokens, parse_args


class GPTLMLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.loss_fn = torch.nn.CrossEntropyLoss()

    def forward(self, logits, labels):
        shifted = logits[..., :-1, :].contiguous()
        return self.loss_fn(shifted.view(-1, shifted.size(-1)), labels[..., 1:].contiguous().view(-1))


def main():
    args = parse_args()
    disable_existing_loggers()
    colossalai.launch_from_torch()
    logger, coordinator = get_dist_logger(), DistCoordinator()
    logger.info(f"{args.plugin}, {args.batch_size} rows a rank", ranks=[0])

    if args.plugin == "low_level_zero":
        plugin = LowLevelZeroPlugin(stage=1, precision="fp32", max_norm=args.grad_clip, overlap_communication=False)
    else:
        plugin = TorchDDPPlugin()
    booster = Booster(plugin=plugin)

    set_seed(42)
    with open(args.config) as file:
        config = transformers.GPT2Config(**json.load(file))
    with nullcontext():
        model = transformers.GPT2LMHeadModel(config)
    criterion = GPTLMLoss()
    optimizer = HybridAdam(model.parameters(), lr=args.lr, weight_decay=0.01)
    dataloader = plugin.prepare_dataloader(
        RandomTokens(40, 10, config.vocab_size), batch_size=args.batch_size, shuffle=True, drop_last=True
    )
    lr_scheduler = transformers.get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=2, num_training_steps=args.num_epochs * len(dataloader)
    )
    model, optimizer, criterion, dataloader, lr_scheduler = booster.boost(
        model, optimizer, criterion, dataloader, lr_scheduler
    )
    model.train()
    for epoch in range(args.num_epochs):
        dataloader.sampler.set_epoch(epoch)
        with tqdm(dataloader, desc=f"Epoch [{epoch + 1}]", disable=not coordinator.is_master()) as bar:
            for batch in bar:
                batch = {k: v.to(get_current_device()) for k, v in batch.items()}
                outputs = model(**batch)
                loss = criterion(outputs["logits"], batch["input_ids"])
                booster.backward(loss, optimizer)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                bar.set_postfix({"loss": f"{loss.item():.4f}"})
    booster.save_model(model, "out/model", shard=True)
    coordinator.block_all()
    logger.info("done", ranks=[0])


if __name__ == "__main__":
    main()
