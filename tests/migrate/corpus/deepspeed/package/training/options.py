import argparse
import random

import torch


def parse(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--ds-config", default="conf/zero0.json")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=13)
    parser.add_argument("--width", type=int, default=12)
    parser.add_argument("--local_rank", type=int, default=0)
    return parser.parse_args(argv)


def seed(number):
    random.seed(number)
    torch.manual_seed(number)


def optimizer(lr):
    """DeepSpeed calls it with the parameters."""
    return lambda parameters: torch.optim.Adam(parameters, lr=lr)
