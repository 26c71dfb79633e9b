import argparse
from dataclasses import dataclass

import torch
from horovod import torch as hvd
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Config:
    lr: float = 3e-3
    epochs: int = 3
    max_norm: float = 0.5


class Encoder(nn.Module):
    def __init__(self, width: int = 16):
        super().__init__()
        self.rnn = nn.GRU(4, width, batch_first=True)
        self.out = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, last = self.rnn(x)
        return self.out(last[0])


class Trainer:
    def __init__(self, model: nn.Module, config: Config):
        self.config = config
        self.device = torch.device('cuda', hvd.local_rank()) if torch.cuda.is_available() else torch.device('cpu')
        self.model = model.to(self.device)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        adam = torch.optim.Adam(self.model.parameters(), lr=config.lr * hvd.size(), betas=(0.9, 0.98))
        self.optimizer = hvd.DistributedOptimizer(adam, named_parameters=self.model.named_parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.criterion = nn.CrossEntropyLoss()

    @property
    def chief(self) -> bool:
        return hvd.rank() == 0

    def step(self, x, y):
        self.optimizer.zero_grad()
        logits = self.model(x)
        loss = self.criterion(logits, y)
        loss.backward()
        # Gradients must be complete before they are clipped.
        self.optimizer.synchronize()
        clip_grad_norm_(self.model.parameters(), self.config.max_norm)
        with self.optimizer.skip_synchronize():
            self.optimizer.step()  # of the clipped ones
        return loss.detach(), (logits.argmax(1) == y).sum()

    def fit(self, loader: DataLoader):
        for epoch in range(self.config.epochs):
            loader.sampler.set_epoch(epoch)
            self.model.train()
            correct = torch.zeros(())
            for x, y in loader:
                loss, right = self.step(x.to(self.device), y.to(self.device))
                correct += right.cpu()
            self.schedule.step()
            correct = hvd.allreduce(correct, op=hvd.Sum, name='correct')
            worst = hvd.allreduce(loss.cpu(), op=hvd.Max, name='worst')
            if self.chief:
                print(f'{epoch}: {int(correct)} right, last loss at most {worst:.4f}')

    def predict(self, x):
        self.model.eval()
        share = x[hvd.rank()::hvd.size()].to(self.device)
        with torch.no_grad():
            return hvd.allgather(self.model(share), name='predictions')


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--lr', type=float, default=Config.lr)
    parser.add_argument('--epochs', type=int, default=Config.epochs)
    options = parser.parse_args()
    hvd.init()
    torch.manual_seed(hvd.rank())  # the first one's weights are taken
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(120, 7, 4, generator=generator)
    y = x.sum((1, 2)).div(3).round().clamp(-1, 1).long() + 1
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, hvd.size(), hvd.rank(), shuffle=True)
    trainer = Trainer(Encoder(), Config(lr=options.lr, epochs=options.epochs))
    trainer.fit(DataLoader(data, batch_size=8, sampler=sampler))
    guesses = trainer.predict(x[:21])
    if trainer.chief:
        print('predicted', len(guesses))
    hvd.shutdown()


if __name__ == '__main__':
    main()
