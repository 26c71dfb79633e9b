import torch
from accelerate import Accelerator
from torch import nn
from tqdm import tqdm

bce = nn.BCEWithLogitsLoss()


def run(accelerator: Accelerator, generator, critic, g_opt, c_opt, loader, epochs):
    latent = accelerator.unwrap_model(generator).latent
    history = []
    for epoch in range(epochs):
        for (real,) in tqdm(loader, disable=not accelerator.is_local_main_process):
            ones = torch.ones(len(real), 1, device=accelerator.device)
            zeros = torch.zeros_like(ones)

            # critic
            c_opt.zero_grad()
            fake = generator(torch.randn(len(real), latent, device=accelerator.device))
            loss_c = bce(critic(real), ones) + bce(critic(fake.detach()), zeros)
            accelerator.backward(loss_c)
            c_opt.step()

            # generator
            g_opt.zero_grad()
            loss_g = bce(critic(fake), ones)
            accelerator.backward(loss_g)
            g_opt.step()
        both = accelerator.gather(torch.stack([loss_c.detach(), loss_g.detach()])[None])
        history.append(both.mean(0).tolist())
        accelerator.print(f"{epoch}: critic {history[-1][0]:.3f} generator {history[-1][1]:.3f}")
    return history
