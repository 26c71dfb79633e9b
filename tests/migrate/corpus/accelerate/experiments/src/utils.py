class AverageMeter:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value, n=1):
        self.total += value * n
        self.count += n

    @property
    def mean(self):
        return self.total / max(1, self.count)


class EarlyStopper:
    def __init__(self, patience):
        self.patience, self.best, self.bad = patience, float("inf"), 0

    def __call__(self, value):
        self.bad = 0 if value < self.best else self.bad + 1
        self.best = min(value, self.best)
        return self.bad >= self.patience

    def state_dict(self):
        return {"best": self.best, "bad": self.bad}

    def load_state_dict(self, state):
        self.best, self.bad = state["best"], state["bad"]


def group_parameters(model, weight_decay):
    decay = [p for n, p in model.named_parameters() if p.ndim > 1 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim < 2 or "embed" in n]
    return [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
