from .data import RandomTokens
from .options import parse_args

__all__ = ["RandomTokens", "parse_args"]
