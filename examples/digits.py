"""A small CNN on scikit-learn's handwritten digits.

python examples/digits.py --strategy fsdp --devices 2
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import unipar


def digits() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """1,797 images of shape (1, 8, 8) in [0, 1] with their classes; each fifth for evaluation."""
    # Only where the images are made of it: ranks get them as tensors.
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    classes = torch.tensor(bunch.target)
    held_out = torch.arange(len(images)) % 5 == 4
    return (images[~held_out], classes[~held_out]), (images[held_out], classes[held_out])


def training() -> tuple[torch.Tensor, torch.Tensor]:
    """The images and classes to train on."""
    return digits()[0]


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def loss(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, classes = batch
    return functional.cross_entropy(model(images), classes)


def accuracy(predictions: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return (predictions.argmax(dim=-1) == classes).float().mean()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    training, evaluation = digits()
    torch.manual_seed(0)
    result = unipar.fit(
        cnn(),
        training,
        strategy=args.strategy,
        devices=args.devices,
        loss=loss,
        optimizer={"name": "adamw", "lr": 3e-3},
        global_batch_size=64,
        epochs=args.epochs,
        eval_data=evaluation,
        metrics={"accuracy": accuracy},
    )
    print(f"accuracy on {len(evaluation[0])} unseen digits: {result.metrics['accuracy']:.1%}")


if __name__ == "__main__":
    main()
