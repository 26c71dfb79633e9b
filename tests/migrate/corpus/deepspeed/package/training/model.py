from torch import nn


class Tagger(nn.Module):
    def __init__(self, words, tags, width):
        super().__init__()
        self.embed = nn.Embedding(words, width, padding_idx=0)
        self.rnn = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, tags)

    def forward(self, words):
        return self.head(self.rnn(self.embed(words))[0])
