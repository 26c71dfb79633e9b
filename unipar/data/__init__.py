"""The global data order, and the loaders over it."""

from unipar.data.checks import check_shares, order_differences, shuffles, slicing_of
from unipar.data.feed import on_device
from unipar.data.loader import Loader
from unipar.data.move import move_to
from unipar.data.order import Position, epoch_order
from unipar.data.sources import batch_size_of, in_words, num_samples_of, open_source

__all__ = [
    "Loader",
    "Position",
    "batch_size_of",
    "check_shares",
    "epoch_order",
    "in_words",
    "move_to",
    "num_samples_of",
    "on_device",
    "open_source",
    "order_differences",
    "shuffles",
    "slicing_of",
]
