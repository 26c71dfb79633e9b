import copy
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.optim import Adam
from torch.utils.data import DataLoader, Dataset


def exists(x):
    return x is not None


def cycle(dl):
    while True:
        for data in dl:
            yield data


class Denoiser(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(dim, dim), nn.SiLU())
        self.down, self.mid = nn.Conv2d(1, dim, 3, padding=1), nn.Conv2d(dim, dim, 3, padding=1)
        self.norm, self.up = nn.GroupNorm(2, dim), nn.Conv2d(dim, 1, 3, padding=1)
        self.dim = dim

    def forward(self, x, t):
        freqs = torch.exp(-math.log(100.0) * torch.arange(self.dim // 2, device=x.device) / self.dim)
        angles = t[:, None].float() * freqs
        emb = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        h = F.silu(self.norm(self.down(x) + emb[:, :, None, None]))
        return self.up(F.silu(self.mid(h)) + h)


class GaussianDiffusion(nn.Module):
    def __init__(self, model, *, image_size, timesteps=20):
        super().__init__()
        self.model, self.image_size, self.num_timesteps = model, image_size, timesteps
        alphas = torch.cumprod(1.0 - torch.linspace(1e-3, 0.2, timesteps), dim=0)
        self.register_buffer("sqrt_alphas", alphas.sqrt())
        self.register_buffer("sqrt_one_minus", (1.0 - alphas).sqrt())

    def forward(self, img):
        t = torch.randint(0, self.num_timesteps, (img.shape[0],), device=img.device).long()
        noise = torch.randn_like(img)
        a, b = (one[t][:, None, None, None] for one in (self.sqrt_alphas, self.sqrt_one_minus))
        return F.mse_loss(self.model(a * img + b * noise, t), noise)


class EMA:
    def __init__(self, model, beta=0.9, update_every=2):
        self.ema_model = copy.deepcopy(model).requires_grad_(False)
        self.online, self.beta, self.every, self.step = model, beta, update_every, 0

    def update(self):
        self.step += 1
        if self.step % self.every == 0:
            for mine, other in zip(self.ema_model.parameters(), self.online.parameters()):
                mine.data.lerp_(other.data, 1 - self.beta)


class Squares(Dataset):
    def __init__(self, size, length=40):
        self.size, self.length = size, length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        image = -torch.ones(1, self.size, self.size)
        image[:, i % 4 : i % 4 + 3, i % 3 : i % 3 + 3] = 1
        return image


class Trainer:
    def __init__(
        self, diffusion_model, *, train_batch_size=4, gradient_accumulate_every=2, train_lr=2e-3,
        train_num_steps=8, max_grad_norm=1.0, results_folder="./results", amp=False, save_every=4,
    ):
        self.accelerator = Accelerator(cpu=True, mixed_precision="bf16" if amp else "no")
        self.model = diffusion_model
        self.accumulate, self.max_grad_norm, self.save_every = gradient_accumulate_every, max_grad_norm, save_every
        dl = DataLoader(Squares(diffusion_model.image_size), batch_size=train_batch_size, shuffle=True, pin_memory=False)
        dl = self.accelerator.prepare(dl)
        self.dl = cycle(dl)
        self.opt = Adam(diffusion_model.parameters(), lr=train_lr, betas=(0.9, 0.99))
        if self.accelerator.is_main_process:
            self.results_folder = Path(results_folder)
            self.results_folder.mkdir(exist_ok=True)
        self.step, self.train_num_steps = 0, train_num_steps
        self.model, self.opt = self.accelerator.prepare(self.model, self.opt)

    @property
    def device(self):
        return self.accelerator.device

    def save(self, milestone):
        state = self.accelerator.get_state_dict(self.model)
        if not self.accelerator.is_local_main_process:
            return
        torch.save({"step": self.step, "model": state}, str(self.results_folder / f"model-{milestone}.pt"))

    def train(self):
        accelerator = self.accelerator
        while self.step < self.train_num_steps:
            self.model.train()
            total_loss = 0.0
            for _ in range(self.accumulate):
                data = next(self.dl).to(self.device)
                with accelerator.autocast():
                    loss = self.model(data)
                    loss = loss / self.accumulate
                    total_loss += loss.item()
                accelerator.backward(loss)
            accelerator.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
            self.opt.step()
            self.opt.zero_grad()
            accelerator.wait_for_everyone()
            self.step += 1
            if self.step % self.save_every == 0:
                self.save(self.step // self.save_every)
            accelerator.print(f"loss: {total_loss:.4f}")
        accelerator.print("training complete")


if __name__ == "__main__":
    torch.manual_seed(10)
    Trainer(GaussianDiffusion(Denoiser(8), image_size=8)).train()
