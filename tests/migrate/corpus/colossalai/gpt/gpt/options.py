import argparse


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="configs/gpt2_pico.json")
    parser.add_argument("--plugin", default="low_level_zero", choices=["torch_ddp", "low_level_zero"])
    parser.add_argument("--num_epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--grad_clip", type=float, default=1.0)
    return parser.parse_args()
