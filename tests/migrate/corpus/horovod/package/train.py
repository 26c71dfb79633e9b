#!/usr/bin/env python3
import os
import sys

from horovod.torch import init, rank

from lib import data, distributed
from lib.net import build
from lib.loop import run

if __name__ == "__main__":
    init()
    train, valid = data.loaders(batch=int(os.environ.get("BATCH", 8)))
    model = build(width=20)
    optimizer = distributed.optimizer(model, rate=0.01)
    best = run(model, optimizer, train, valid, epochs=3)
    best = distributed.share({"best": best})
    if rank() == 0:
        print(best, file=sys.stderr)
