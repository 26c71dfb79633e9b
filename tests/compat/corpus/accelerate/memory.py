"""The largest batch that fits: the function is called with a smaller one while memory runs out."""

import torch
from accelerate import Accelerator, PartialState, find_executable_batch_size
from accelerate.utils import gather_object, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def training_function():
    state = PartialState(cpu=True)
    with state.split_between_processes(list(range(5)), apply_padding=True) as mine:
        doubled = [2 * one for one in mine]
    accelerator = Accelerator(cpu=True)
    assert gather_object(doubled)[:3] == [0, 2, 4]
    tried = []

    @find_executable_batch_size(starting_batch_size=16)
    def inner(batch_size):
        nonlocal accelerator
        accelerator.free_memory()
        tried.append(batch_size)
        set_seed(1)
        x = torch.randn(80, 3)
        loader = DataLoader(TensorDataset(x, x.abs()), batch_size=batch_size, shuffle=True)
        model = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for epoch in range(2):
            for inputs, targets in loader:
                if batch_size > 12:
                    raise RuntimeError("CUDA out of memory.")
                loss = nn.functional.l1_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    inner()
    accelerator.print(f"tried {tried}")


if __name__ == "__main__":
    training_function()
