from argparse import ArgumentParser


def parse_demo_args():
    parser = ArgumentParser()
    parser.add_argument("--plugin", type=str, default="torch_ddp")
    parser.add_argument("--num_epoch", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=5)
    parser.add_argument("--learning_rate", type=float, default=4e-3)
    parser.add_argument("--warmup_ratio", type=float, default=0.3)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--grad_checkpoint", type=bool, default=True)
    parser.add_argument("--seed", type=int, default=41)
    return parser.parse_args()
