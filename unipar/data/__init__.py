"""The global data order, and the loaders over it."""

from unipar.data.checks import order_differences
from unipar.data.loader import Loader
from unipar.data.move import move_to
from unipar.data.order import Position
from unipar.data.sources import batch_size_of, in_words, num_samples_of

__all__ = [
    "Loader",
    "Position",
    "batch_size_of",
    "in_words",
    "move_to",
    "num_samples_of",
    "order_differences",
]
