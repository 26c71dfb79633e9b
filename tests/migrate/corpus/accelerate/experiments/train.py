"""accelerate launch train.py --config configs/wide.json --epochs 1"""
import argparse

from src.config import load
from src.trainer import Trainer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="configs/wide.json")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--resume_from_checkpoint", default=None)
    args = parser.parse_args()
    overrides = {k: v for k, v in vars(args).items() if k == "epochs" and v is not None}
    trainer = Trainer(load(args.config, **overrides))
    trainer.train(args.resume_from_checkpoint)


if __name__ == "__main__":
    main()
