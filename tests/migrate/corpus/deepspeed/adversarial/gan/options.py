import argparse
import os
import random

import deepspeed
import torch

HERE = os.path.dirname(os.path.abspath(__file__))


def get_argument_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batchSize", type=int, default=8, help="of each rank")
    parser.add_argument("--nz", type=int, default=6)
    parser.add_argument("--ngf", type=int, default=8)
    parser.add_argument("--ndf", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--outf", default="out")
    parser.add_argument("--manualSeed", type=int, default=999)
    parser.add_argument("--local_rank", type=int, default=-1)
    return deepspeed.add_config_arguments(parser)


def parse():
    args = get_argument_parser().parse_args()
    if not args.deepspeed_config:
        args.deepspeed_config = os.path.join(HERE, "..", "configs", "gan.json")
    return args


def set_seed(value):
    random.seed(value)
    torch.manual_seed(value)
    from deepspeed.accelerator import get_accelerator

    get_accelerator().manual_seed_all(value)
