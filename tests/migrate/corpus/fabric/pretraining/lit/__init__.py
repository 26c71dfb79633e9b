from lit.config import Config
from lit.model import GPT, Block

__all__ = ["GPT", "Block", "Config"]
