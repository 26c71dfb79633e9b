"""A student learns what a teacher says, which is boosted without an optimizer."""

import colossalai
import torch
import torch.nn.functional as F
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.interface import ModelWrapper
from colossalai.logging import disable_existing_loggers, get_dist_logger
from colossalai.nn.lr_scheduler import FlatAnnealingWarmupLR
from colossalai.utils import MultiTimer, get_current_device
from torch import nn
from torch.utils.data import TensorDataset


def network(width):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))


def main():
    colossalai.launch_from_torch(seed=19, verbose=False)
    disable_existing_loggers()
    logger = get_dist_logger()
    timer = MultiTimer()
    plugin = TorchDDPPlugin(find_unused_parameters=True)
    booster = Booster(plugin=plugin)

    dataloader = plugin.prepare_dataloader(TensorDataset(torch.randn(64, 4)), batch_size=8, shuffle=True, pin_memory=False)
    teacher, student = network(64), network(8)
    for parameter in teacher.parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.RMSprop(student.parameters(), lr=8e-3)
    scheduler = FlatAnnealingWarmupLR(optimizer, total_steps=16, warmup_steps=3, pct_start=0.4)
    student, optimizer, _, dataloader, scheduler = booster.boost(
        model=student, optimizer=optimizer, dataloader=dataloader, lr_scheduler=scheduler
    )
    teacher = teacher.to(get_current_device()).eval()
    assert isinstance(student, ModelWrapper)
    assert isinstance(student.unwrap(), nn.Sequential)

    for epoch in range(4):
        dataloader.sampler.set_epoch(epoch)
        timer.start("epoch")
        for (x,) in dataloader:
            x = x.to(get_current_device())
            with torch.no_grad():
                wanted = teacher(x).softmax(-1)
            # The divergence but for a constant: it does not vanish as the student learns, and so
            # keeps its digits.
            loss = F.cross_entropy(student(x), wanted)
            optimizer.backward(loss)
            norm = optimizer.clip_grad_by_norm(0.1)
            optimizer.step()
            assert norm.item() > 0
            optimizer.zero_grad()
            scheduler.step()
        timer.stop("epoch", keep_in_history=True)
        logger.info(f"epoch {epoch}: {loss.item():.4f}, rate {scheduler.get_last_lr()[0]:.5f}", ranks=[0])


if __name__ == "__main__":
    main()
