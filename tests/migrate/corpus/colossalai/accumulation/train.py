import contextlib

import colossalai
import torch
from colossalai.booster import Booster, plugin as plugins
from colossalai.utils import get_current_device
from data import Counting
from torch import nn, optim


def main(epochs=2, accumulation=4, batch_size=3):
    colossalai.launch_from_torch()
    plugin = plugins.TorchDDPPlugin(find_unused_parameters=False, gradient_as_bucket_view=True)
    booster = Booster(plugin=plugin)
    device = get_current_device()

    loader = plugin.prepare_dataloader(Counting(54, 9), batch_size, shuffle=True)
    net = nn.Sequential(nn.Linear(9, 18), nn.Tanh(), nn.Linear(18, 1))
    opt = optim.RMSprop(net.parameters(), lr=4e-3)
    net, opt, _, _, _ = booster.boost(net, opt)

    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        opt.zero_grad()
        for i, (bits, count) in enumerate(loader):
            last = (i + 1) % accumulation == 0 or i + 1 == len(loader)
            # 9 batches: two steps of four, and one of one
            with contextlib.nullcontext() if last else booster.no_sync(net):
                loss = nn.functional.l1_loss(net(bits.to(device)), count.to(device)) / accumulation
                booster.backward(loss, opt)
            if (i + 1) % accumulation == 0 or i + 1 == len(loader):
                opt.step()
                opt.zero_grad()


if __name__ == "__main__":
    main()
