import torch
from accelerate.logging import get_logger
from torch.utils.data import DataLoader, Dataset

logger = get_logger(__name__)


class Sequences(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, 9, (count,), generator=generator)
        self.rows = [torch.randint(1, 12, (int(n),), generator=generator) for n in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i], int(self.rows[i].sum() % 3)


class Collator:
    def __call__(self, samples):
        rows, labels = zip(*samples)
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"input_ids": ids, "mask": ids.ne(0), "labels": torch.tensor(labels)}


def build_loaders(cfg):
    train, dev = Sequences(70, cfg.seed), Sequences(22, cfg.seed + 1)
    logger.info(f"{len(train)} rows to train on")
    return (
        DataLoader(train, batch_size=cfg.batch_size, shuffle=True, collate_fn=Collator()),
        DataLoader(dev, batch_size=cfg.batch_size, collate_fn=Collator()),
    )
