"""The environment variables of a launcher, read and checked."""

from __future__ import annotations

import ipaddress
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping

from unipar.errors import ConfigError
from unipar.world import Placement


class Environment(ABC):
    """The environment variables of one launcher.

    Args:
        variables: the variables, the process's own by default.
    """

    name: str
    """The launcher's command, as messages name it."""

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self.variables = os.environ if variables is None else variables

    @abstractmethod
    def detect(self) -> bool:
        """Return whether this launcher has started the process."""

    @abstractmethod
    def placement(self) -> Placement:
        """Where the process stands.

        Raises:
            ConfigError: a variable is missing, is not a number, or contradicts another.
        """

    def text(self, *names: str) -> str:
        """The first of the variables ``names`` that is set."""
        for name in names:
            if self.variables.get(name):
                return self.variables[name]
        raise ConfigError(
            f"{self.name} seems to have started this process, but {' or '.join(names)} is not set. "
            f"{self.remedy()}"
        )

    def number(self, *names: str, default: int | None = None) -> int:
        """The first of the variables ``names`` that is set, as a count from 0."""
        if default is not None and not any(self.variables.get(name) for name in names):
            return default
        text = self.text(*names)
        if not text.isdecimal():
            name = next(name for name in names if self.variables.get(name))
            raise ConfigError(
                f"{name}={text!r}, which {self.name} sets, is not a whole number from 0 on. "
                f"{self.remedy()}"
            )
        return int(text)

    def below(self, rank: int, rank_name: str, size: int, size_name: str) -> None:
        """Check that a rank fits its size."""
        if size < 1:
            raise ConfigError(
                f"{size_name}={size}, but this process is one of those that it counts: it must be "
                f"at least 1. {self.remedy()}"
            )
        if rank >= size:
            raise ConfigError(
                f"{rank_name}={rank}, but {size_name}={size}: ranks count from 0, so {rank_name} "
                f"must be at most {size - 1}. One of them comes from another launch; unset it."
            )

    def address(self) -> str | None:
        """The meeting point that the user has set, as ``tcp://host:port``, or ``None``."""
        if not self.variables.get("MASTER_PORT") or not self.variables.get("MASTER_ADDR"):
            return None
        host = self.host()
        # An address of IPv6 has colons of its own.
        host = f"[{host}]" if ":" in host else host
        return f"tcp://{host}:{self.port()}"

    def host(self) -> str:
        """Rank 0's host, by ``MASTER_ADDR``."""
        host = self.text("MASTER_ADDR")
        if not (re.fullmatch(r"[\w.-]+", host) or _is_ipv6(host)):
            raise ConfigError(
                f"MASTER_ADDR={host!r} is neither the name of a host nor its address. Set it to "
                "that of rank 0's host, with nothing before or behind (the port is MASTER_PORT), "
                "for all processes alike."
            )
        return host

    def port(self) -> int:
        """The port on rank 0's host where all meet, by ``MASTER_PORT``."""
        text = self.text("MASTER_PORT")
        if not (text.isdecimal() and len(text) <= 5 and 0 < int(text) < 2**16):
            raise ConfigError(
                f"MASTER_PORT={text!r} is not a port, which is a number from 1 to 65535. Set it to "
                "one that is free on rank 0's host, for all processes alike."
            )
        return int(text)

    def remedy(self) -> str:
        """What to do about variables that cannot be followed."""
        present = sorted(name for name in self.variables if name.startswith(self.prefixes))
        return (
            f"Start all processes by {self.name}, or unset its variables ({', '.join(present)}) to "
            "start them from here."
        )

    prefixes: tuple[str, ...] = ()
    """How this launcher's variables begin."""


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
