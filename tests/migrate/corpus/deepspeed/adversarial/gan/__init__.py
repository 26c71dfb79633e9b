from .nets import Critic, Generator, weights_init

__all__ = ["Critic", "Generator", "weights_init"]
