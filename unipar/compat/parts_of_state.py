"""An optimizer's state as a script sees it, where a strategy has it in tensors of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch.optim import Optimizer

from unipar.errors import ConfigError


class PartsOfState(MutableMapping[Any, Any]):
    """This rank's parts, without what PyTorch has there of the model's parameters.

    It may be cleared, and what is there be read and written; to ask for a parameter's is refused.

    Args:
        optimizer: what steps the parts.
        name_of: the name of a parameter of the model; ``None``: it is none.
        strategy: the name of the one that divides, for the message.
    """

    def __init__(
        self, optimizer: Optimizer, name_of: Callable[[Any], str | None], strategy: str
    ) -> None:
        self._optimizer, self._name_of, self._strategy = optimizer, name_of, strategy

    def __getitem__(self, key: Any) -> Any:
        self._check(key)
        return self._optimizer.state[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._check(key)
        self._optimizer.state[key] = value

    def __delitem__(self, key: Any) -> None:
        self._check(key)
        del self._optimizer.state[key]

    def __contains__(self, key: object) -> bool:
        self._check(key)
        return key in self._optimizer.state

    def __iter__(self) -> Iterator[Any]:
        return iter(self._optimizer.state)

    def __len__(self) -> int:
        return len(self._optimizer.state)

    def __reduce__(self) -> Any:
        # Copies are what the optimizer has.
        return defaultdict, (dict, dict(self._optimizer.state))

    def _check(self, key: Any) -> None:
        if key in self._optimizer.state or (name := self._name_of(key)) is None:
            return
        raise ConfigError(
            f"the optimizer's state of '{name}' was asked for, and the strategy "
            f"'{self._strategy}' divides it among ranks, in tensors of its own. Use a strategy "
            "that leaves the optimizer whole, such as ddp without shard_optimizer; state that is "
            "saved and loaded is whole under any."
        )
