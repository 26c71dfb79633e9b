"""A policy and its value in one agent, whose methods are called; gradients clipped by value."""

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.distributions import Categorical


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def act(self, seen):
        action = Categorical(logits=self.actor(seen)).sample()
        return action, self.critic(seen).squeeze(-1)

    def training_step(self, batch):
        seen, action, advantage, returned = batch
        logits, value = self(seen)
        logged = Categorical(logits=logits).log_prob(action)
        return (-logged * advantage).mean() + 0.5 * (value - returned).square().mean()

    def forward(self, seen):
        return self.actor(seen), self.critic(seen).squeeze(-1)


fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
fabric.seed_everything(3)
agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=0.02, eps=1e-4)
agent, optimizer = fabric.setup(agent, optimizer)
agent.mark_forward_method("act")

generator = torch.Generator(device=fabric.device).manual_seed(fabric.global_rank)
for update in range(4):
    seen = torch.randn(24, 4, generator=generator, device=fabric.device)
    with torch.no_grad():
        action, value = agent.act(seen)
    reward = (action == seen[:, :3].argmax(1)).float()
    advantage = reward - value
    played = {"seen": seen, "reward": reward}
    both = fabric.all_gather(played)
    rewards = both["reward"].flatten()
    for begin in range(0, 24, 8):
        part = slice(begin, begin + 8)
        loss = agent.training_step((seen[part], action[part], advantage[part], reward[part]))
        optimizer.zero_grad(set_to_none=True)
        fabric.backward(loss)
        fabric.clip_gradients(agent, optimizer, clip_val=0.01)
        optimizer.step()
    fabric.print(f"update {update}: reward {rewards.mean():.3f} of {len(rewards)}")
