"""Objects that hold settings: those that have no counterpart have to stay at their defaults."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, ClassVar

from unipar.errors import ConfigError


class Checked:
    """A dataclass of settings under a framework's names.

    Attributes:
        REFUSED: fields that have to stay at their defaults.
        IGNORED: fields that do not change training.
    """

    REFUSED: ClassVar[tuple[str, ...]] = ()
    IGNORED: ClassVar[tuple[str, ...]] = ()

    def check(self) -> None:
        """Refuse settings that have no counterpart.

        Raises:
            ConfigError: there is one.
        """
        for name, value in self.changed().items():
            if name in self.REFUSED:
                raise ConfigError(
                    f"{type(self).__name__}({name}={value!r}) has no counterpart here. Leave "
                    f"{name} out; options of strategies stand in unipar.yaml."
                )

    def changed(self) -> dict[str, Any]:
        """The fields that are not at their defaults."""
        given = {one.name: one for one in fields(self)}  # pyright: ignore[reportArgumentType]
        return {
            name: value
            for name, one in given.items()
            if (value := getattr(self, name)) != one.default
            and (one.default_factory is MISSING or value != one.default_factory())
        }
