"""A recurrent language model; its optimizer is chosen by a flag, and its batches are slices."""

import argparse
import math

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--optimizer", default="AdamW")
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--clip", type=float, default=0.25)
parser.add_argument("--bptt", type=int, default=6)
args = parser.parse_args()


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid):
        super().__init__()
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid)
        self.decoder = nn.Linear(nhid, ntoken)
        self.nhid = nhid

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.encoder(input), hidden)
        return torch.log_softmax(self.decoder(output).view(-1, self.decoder.out_features), 1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(1, bsz, self.nhid), weight.new_zeros(1, bsz, self.nhid)


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous()


def get_batch(source, i):
    seq_len = min(args.bptt, len(source) - 1 - i)
    return source[i:i + seq_len], source[i + 1:i + 1 + seq_len].view(-1)


torch.manual_seed(1111)
tokens = (torch.arange(700) * 7 + torch.randint(0, 2, (700,))) % 23
train_data, val_data = batchify(tokens[:600], 8), batchify(tokens[600:], 4)
model = RNNModel(23, 8, 12)
criterion = nn.NLLLoss()
optimizer = None
if args.optimizer == "AdamW":
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
elif args.optimizer == "SGD":
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)


def evaluate(source):
    model.eval()
    total, hidden = 0.0, model.init_hidden(4)
    with torch.no_grad():
        for i in range(0, source.size(0) - 1, args.bptt):
            data, targets = get_batch(source, i)
            output, hidden = model(data, hidden)
            hidden = repackage_hidden(hidden)
            total += len(data) * criterion(output, targets).item()
    return total / (len(source) - 1)


def train():
    model.train()
    total_loss, hidden = 0.0, model.init_hidden(8)
    for i in range(0, train_data.size(0) - 1, args.bptt):
        data, targets = get_batch(train_data, i)
        hidden = repackage_hidden(hidden)
        model.zero_grad()
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        if optimizer is not None:
            optimizer.step()
        else:
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-args.lr)
        total_loss += loss.item()
    return total_loss


best_val_loss = None
for epoch in range(2):
    train()
    val_loss = evaluate(val_data)
    print(f"epoch {epoch}: valid ppl {math.exp(val_loss):8.2f}")
    if not best_val_loss or val_loss < best_val_loss:
        with open("model.pt", "wb") as f:
            torch.save(model, f)
        best_val_loss = val_loss
