import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset


class TrainSet(Dataset):
    def __init__(self, size):
        self.lengths = [3 + i * 7 % 5 for i in range(size)]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        words = (torch.arange(self.lengths[index]) * (index + 3) + index) % 19 + 1
        return words, words % 3


def collate(rows):
    words, tags = zip(*rows)
    return pad_sequence(words, batch_first=True), pad_sequence(tags, batch_first=True, padding_value=-100)
