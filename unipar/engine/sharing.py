"""Parameters that several engines of a session have in common."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from unipar.errors import ConfigError
from unipar.strategy import Engine, Strategy


class Sharing:
    """Which engine has which parameters.

    Args:
        strategy: of the session.
        engines: those that are prepared, by name, as the session adds them.
    """

    def __init__(self, strategy: Strategy, engines: Mapping[str, Engine]) -> None:
        self._strategy, self._engines = strategy, engines
        # By the parameters as they were given, too; a strategy may have put others in their place.
        self._owners = WeakIdKeyDictionary()

    def refuse(self, model: nn.Module, name: str) -> None:
        """Refuse a parameter of another engine's, if the strategy has made parts of it.

        Args:
            model: as it was given.
            name: of the engine that it is for.

        Raises:
            ConfigError: an engine that is there has one of its parameters.
        """
        if not self._strategy.capabilities().splits_tensors:
            return
        for parameter, value in model.named_parameters():
            owner = self._owners.get(value)
            if owner in self._engines:
                raise ConfigError(
                    f"parameter '{parameter}' of the model for engine '{name}' is engine "
                    f"'{owner}'s already, and strategy '{self._strategy.name}' divides each "
                    "engine's parameters among ranks, or keeps a copy of its own of them. Prepare "
                    "one module that holds all that shares parameters, or use a strategy that "
                    "keeps them whole, such as 'ddp'."
                )
            self._owners[value] = name

    def note(self, engine: Engine) -> None:
        """Let engines know of others that have parameters in common with them."""
        if self._strategy.capabilities().splits_tensors:
            for parameter in engine.module.parameters():
                self._owners[parameter] = engine.spec.name
            return
        own = {id(parameter) for parameter in engine.module.parameters()}
        for other in self._engines.values():
            if not own.isdisjoint(id(parameter) for parameter in other.module.parameters()):
                engine.sharing += (other,)
                other.sharing += (engine,)
