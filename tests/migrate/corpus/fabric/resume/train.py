# Regression with gradient accumulation; goes on from a checkpoint if there is one.
import os
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import lightning_fabric as lf

ACCUMULATE = 4
CKPT = 'state.ckpt'

fabric = lf.Fabric(accelerator='cpu', devices=2, precision='32-true')
fabric.launch()
fabric.seed_everything(11)


def main(epochs):
    x = torch.linspace(-2, 2, 120).unsqueeze(1)
    y = torch.sin(2 * x) + 0.1 * torch.randn(120, 1)
    loader = DataLoader(TensorDataset(x, y), batch_size=6, shuffle=True)
    loader = fabric.setup_dataloaders(loader)

    with fabric.init_module():
        net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    net = fabric.setup_module(net)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    opt = fabric.setup_optimizers(opt)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=2e-2, total_steps=20)

    state = {'net': net, 'opt': opt, 'sched': sched, 'epoch': 0, 'best': float('inf')}
    if os.path.exists(CKPT):
        rest = fabric.load(CKPT, state)
        assert not rest, rest
        fabric.print('resumed after epoch', state['epoch'])

    while state['epoch'] < epochs:
        net.train()
        total = torch.zeros(())
        for i, (xb, yb) in enumerate(loader):
            accumulating = (i + 1) % ACCUMULATE != 0 and i + 1 != len(loader)  # the rest counts too
            with fabric.no_backward_sync(net, enabled=accumulating):
                loss = nn.functional.mse_loss(net(xb), yb)
                fabric.backward(loss / ACCUMULATE)
            if not accumulating:
                fabric.clip_gradients(net, opt, max_norm=0.7)
                opt.step()
                sched.step()
                opt.zero_grad()
            total += loss.detach()
        mean = fabric.all_reduce(total / len(loader), reduce_op='mean').item()
        state['epoch'] += 1
        state['best'] = min(state['best'], mean)
        if fabric.is_global_zero:
            print(f"{state['epoch']:3d} {mean:.5f} (best {state['best']:.5f})")
        fabric.save(CKPT, state)
        fabric.barrier()


main(1)
main(2)  # as if it had been stopped
