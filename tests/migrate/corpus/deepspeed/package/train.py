#!/usr/bin/env python
import json
import sys

import deepspeed

from training import options
from training.data import TrainSet, collate
from training.model import Tagger
from training.steps import run_epoch


def main(argv):
    args = options.parse(argv)
    with open(args.ds_config) as f:
        ds_config = json.load(f)
    options.seed(args.seed)
    ds, _, loader, _ = deepspeed.initialize(
        model=Tagger(words=20, tags=3, width=args.width),
        optimizer=options.optimizer(args.lr),
        training_data=TrainSet(96),
        collate_fn=collate,
        config=ds_config,
    )
    for epoch in range(args.epochs):
        loss = run_epoch(ds, loader)
        if ds.local_rank == 0:
            print(f"{epoch + 1}/{args.epochs}: {loss:.4f} after {ds.global_steps} updates")


if __name__ == "__main__":
    main(sys.argv[1:])
