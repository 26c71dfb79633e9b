"""A training loop of one's own: a session, an engine, and whole steps.

python examples/own_loop.py --strategy ddp --devices 2
python examples/own_loop.py --strategy fsdp --devices 2 --epochs 5 --resume
torchrun --nproc-per-node 2 examples/own_loop.py --strategy ddp
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import unipar
from examples.digits import accuracy, cnn, digits, loss


def train(
    placement: unipar.Placement, strategy: str, epochs: int, directory: str, resume: bool
) -> None:
    """What each process runs; ``placement`` says which one it is."""
    training, evaluation = digits()
    torch.manual_seed(0)
    with unipar.Session(strategy=strategy, placement=placement) as session:
        engine = session.prepare(
            cnn(),
            optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=3e-3),
            max_grad_norm=1.0,
        )
        batches = session.loader(training, global_batch_size=64)
        unseen = session.loader(evaluation, global_batch_size=64, shuffle=False)
        if resume:
            session.load(directory, loader=batches)
        for epoch in range(batches.position.epoch, epochs):
            steps = [engine.train_step(batch, loss) for batch in batches]
            unseen.rewind()
            metrics = session.evaluate(engine, unseen, loss, metrics={"accuracy": accuracy})
            path = session.save(directory, loader=batches)
            if session.world.is_main:
                print(
                    f"epoch {epoch + 1}: loss {steps[-1].loss:.4f}, "
                    f"gradient norm {steps[-1].grad_norm:.3f}, "
                    f"accuracy {metrics['accuracy']:.1%}, saved {path.name}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output-dir", default="runs/own_loop")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    args = parser.parse_args()

    run = functools.partial(
        train,
        strategy=args.strategy,
        epochs=args.epochs,
        directory=args.output_dir,
        resume=args.resume,
    )
    unipar.spawn(run, devices=args.devices)


if __name__ == "__main__":
    main()
