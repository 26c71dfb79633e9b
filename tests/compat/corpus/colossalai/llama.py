"""A tiny Llama whose script knows pipelines, should there be stages."""

import argparse

import colossalai
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.cluster import DistCoordinator
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 24


def all_reduce_mean(tensor):
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor.div_(dist.get_world_size())


class Motifs(Dataset):
    def __init__(self, size):
        self.rows = torch.randint(0, VOCAB, (size, 4)).repeat(1, 2)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        ids = self.rows[index]
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--plugin", default="3d", choices=["3d", "3d_cpu", "zero2", "ddp"])
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("-n", "--epochs", type=int, default=2)
    args = parser.parse_args()
    colossalai.launch_from_torch(seed=5)
    coordinator = DistCoordinator()
    if args.plugin == "3d":
        plugin = HybridParallelPlugin(
            tp_size=args.tp, pp_size=args.pp, zero_stage=0, enable_fused_normalization=False,
            num_microbatches=2 if args.pp > 1 else None, precision="fp32", max_norm=0.7, parallel_output=False,
        )
    elif args.plugin == "zero2":
        plugin = LowLevelZeroPlugin(stage=2, precision="fp32")
    else:
        plugin = TorchDDPPlugin()
    booster = Booster(plugin=plugin)
    use_pipeline = isinstance(booster.plugin, HybridParallelPlugin) and booster.plugin.pp_size > 1
    is_pp_last_stage = use_pipeline and booster.plugin.stage_manager.is_last_stage()
    print_flag = (not use_pipeline and coordinator.is_master()) or (use_pipeline and is_pp_last_stage)

    dataloader = plugin.prepare_dataloader(Motifs(40), batch_size=4, shuffle=True, drop_last=True)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16, use_cache=False,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    lr_scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=args.epochs * len(dataloader), warmup_steps=2)
    model, optimizer, _, dataloader, lr_scheduler = booster.boost(
        model, optimizer, dataloader=dataloader, lr_scheduler=lr_scheduler
    )
    for epoch in range(args.epochs):
        dataloader.sampler.set_epoch(epoch)
        dataloader_iter = iter(dataloader)
        for _ in range(len(dataloader)):
            if use_pipeline:
                outputs = booster.execute_pipeline(
                    dataloader_iter, model, lambda outputs, inputs: outputs[0], optimizer, return_loss=True
                )
                loss = outputs["loss"]
            else:
                batch = next(dataloader_iter)
                outputs = model(**batch)
                loss = outputs[0]
                booster.backward(loss, optimizer)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        if not use_pipeline:
            all_reduce_mean(loss.detach())
        if print_flag:
            print(f"epoch {epoch}: {loss.item():.4f}")


if __name__ == "__main__":
    main()
