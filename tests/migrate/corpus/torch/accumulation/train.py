import torch
from tasks import corpus, make_model
from torch.utils.data import DataLoader

accumulation_steps = 3
max_norm = 0.7


def train(model, loader, optimizer, scheduler, epochs):
    step = 0
    model.zero_grad()
    for epoch in range(epochs):
        for index, (inputs, targets) in enumerate(loader):
            loss = model(inputs, targets)
            loss = loss / accumulation_steps
            loss.backward()
            if (index + 1) % accumulation_steps == 0 or index + 1 == len(loader):
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
        print("epoch", epoch, "steps", step)
    return model


if __name__ == "__main__":
    torch.manual_seed(2)
    net = make_model()
    train(
        net,
        DataLoader(corpus(), batch_size=7, shuffle=True),
        opt := torch.optim.RMSprop(net.parameters(), lr=1e-3),
        torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 1 / (1 + n)),
        epochs=2,
    )
