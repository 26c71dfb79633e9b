import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import colossalai
from args import parse_demo_args
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.cluster import DistCoordinator
from colossalai.logging import get_dist_logger
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.nn.optimizer import HybridAdam
from colossalai.utils import get_current_device
from data import BeansDataset, beans_collator


class ViT(nn.Module):
    def __init__(self, classes, width=16, patch=4):
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, patch)
        self.cls, self.places = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.randn(1, 5, width) * 0.1)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 32, 0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, classes)
        self.checkpointing = False

    def gradient_checkpointing_enable(self):
        self.checkpointing = True

    def forward(self, pixel_values, labels=None):
        x = self.patches(pixel_values).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.places
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing and self.training else block(x)
        logits = self.head(x[:, 0])
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def move_to_cuda(batch, device):
    return {k: v.to(device) for k, v in batch.items()}


def run_forward_backward(model, optimizer, batch, booster):
    outputs = model(**batch)
    booster.backward(outputs["loss"], optimizer)
    return outputs["loss"]


def train_epoch(epoch, model, optimizer, lr_scheduler, dataloader, booster, coordinator):
    torch.distributed.barrier()
    model.train()
    dataloader.sampler.set_epoch(epoch)
    for batch in dataloader:
        loss = run_forward_backward(model, optimizer, move_to_cuda(batch, get_current_device()), booster)
        optimizer.step()
        optimizer.zero_grad()
        lr_scheduler.step()
    coordinator.print_on_master(f"epoch {epoch}: {loss.item():.4f}")


@torch.no_grad()
def evaluate_model(epoch, model, eval_dataloader, coordinator):
    torch.distributed.barrier()
    model.eval()
    sums = torch.zeros(2, device=get_current_device())
    for batch in eval_dataloader:
        batch = move_to_cuda(batch, get_current_device())
        outputs = model(**batch)
        sums += torch.stack([(outputs["logits"].argmax(1) == batch["labels"]).sum(), torch.tensor(len(batch["labels"]))])
    dist.all_reduce(sums)
    if coordinator.is_master():
        print(f"epoch {epoch}: {100 * sums[0] / sums[1]:.1f} %")


def main():
    args = parse_demo_args()
    colossalai.launch_from_torch(seed=args.seed)
    coordinator = DistCoordinator()
    logger = get_dist_logger()
    train_dataset, eval_dataset = BeansDataset(60), BeansDataset(18, split="validation")
    model = ViT(3)
    if args.grad_checkpoint:
        model.gradient_checkpointing_enable()

    booster_kwargs = {}
    if args.plugin == "torch_ddp":
        plugin = TorchDDPPlugin()
    elif args.plugin == "low_level_zero":
        plugin = LowLevelZeroPlugin(initial_scale=2**5, precision="fp32")
    else:
        raise ValueError(f"Plugin with name {args.plugin} is not supported!")
    logger.info(f"Set plugin as {args.plugin}", ranks=[0])
    train_dataloader = plugin.prepare_dataloader(
        train_dataset, batch_size=args.batch_size, shuffle=True, drop_last=True, collate_fn=beans_collator
    )
    eval_dataloader = plugin.prepare_dataloader(
        eval_dataset, batch_size=args.batch_size, shuffle=False, drop_last=False, collate_fn=beans_collator
    )
    optimizer = HybridAdam(model.parameters(), lr=args.learning_rate * coordinator.world_size, weight_decay=args.weight_decay)
    total_steps = len(train_dataloader) * args.num_epoch
    lr_scheduler = CosineAnnealingWarmupLR(
        optimizer=optimizer, total_steps=total_steps, warmup_steps=int(total_steps * args.warmup_ratio)
    )
    booster = Booster(plugin=plugin, **booster_kwargs)
    model, optimizer, _criterion, train_dataloader, lr_scheduler = booster.boost(
        model=model, optimizer=optimizer, dataloader=train_dataloader, lr_scheduler=lr_scheduler
    )
    for epoch in range(args.num_epoch):
        train_epoch(epoch, model, optimizer, lr_scheduler, train_dataloader, booster, coordinator)
        evaluate_model(epoch, model, eval_dataloader, coordinator)


if __name__ == "__main__":
    main()
