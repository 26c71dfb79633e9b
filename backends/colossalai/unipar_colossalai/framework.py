"""Bringing Colossal-AI up in this process, and letting go of it."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from unipar.errors import ConfigError
from unipar.utils.logs import quiet_framework
from unipar.world import World
from unipar_colossalai import patches
from unipar_colossalai.installed import VERSION
from unipar_colossalai.patches import optional

LOGGERS = ("colossalai", "colossalai.booster")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep Colossal-AI's messages from the terminal, unless unipar's log level is ``debug``."""
    with quiet_framework(*LOGGERS):
        yield
    if not logging.getLogger("unipar").isEnabledFor(logging.DEBUG):
        # Colossal-AI sets its loggers back to "info" whenever it makes one.
        for name in LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)


def load() -> Any:
    """Colossal-AI's ``booster`` package.

    Raises:
        ConfigError: it is installed, and cannot be imported.
    """
    try:
        with quiet(), optional.stand_ins():
            import colossalai.booster  # pyright: ignore[reportMissingImports]
            import colossalai.booster.plugin  # pyright: ignore[reportMissingImports]
    except Exception as error:
        said = str(error).splitlines()
        raise ConfigError(
            f"Colossal-AI {VERSION} is installed and fails to import: "
            f"{type(error).__name__}: {said[0] if said else ''}. "
            "Install it anew: unipar install colossalai --force."
        ) from error
    return colossalai.booster


class Framework:
    """Colossal-AI as one run has it.

    Args:
        world: the joined processes; Colossal-AI uses their process group.
        plugin: what the run uses of it.
    """

    def __init__(self, world: World, plugin: str) -> None:
        self.booster = load()
        self._api: Any = import_module("colossalai.accelerator.api")
        self._before = self._api._ACCELERATOR
        self._undo = patches.apply(world.device.type, plugin)
        if world.device.type == "cpu":
            from unipar_colossalai.cpu import Host

            self._api.set_accelerator(Host())
        else:
            self._api.set_accelerator(world.device.type)
        if not logging.getLogger("unipar").isEnabledFor(logging.DEBUG):
            # Colossal-AI 0.5.0 calls deprecated functions of torch in every step.
            warnings.filterwarnings("ignore", module=r"(colossalai|torch\.distributed)\b")

    def stop(self) -> None:
        """Take back what was changed."""
        while self._undo:
            self._undo.pop()()
        self._api._ACCELERATOR = self._before
