"""The Pythons that take part: frameworks that cannot share an environment are benched by their own.

``python -m unipar.benchmark.environments STRATEGY…`` says, as JSON, what one of them offers.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from pydantic import BaseModel

from unipar.benchmark.cells import REFERENCE
from unipar.errors import ConfigError, did_you_mean
from unipar.strategy import registry

_PATIENCE = 300.0


class Offer(BaseModel):
    """The offer of one environment.

    Attributes:
        strategies: for each that was asked for, why it cannot run there; empty where it can.
        known: the names of all strategies there.
        versions: of Python, and of the packages that matter.
    """

    strategies: dict[str, str]
    known: list[str]
    versions: dict[str, str]


class Environments:
    """This process's Python, and others.

    Args:
        pythons: further interpreters, each of an environment with unipar.
        strategies: what is to be compared.

    Raises:
        ConfigError: an interpreter does not work, or nobody knows a strategy or one of its options.
    """

    def __init__(self, pythons: Sequence[str | Path], strategies: Sequence[str]) -> None:
        asked = list(dict.fromkeys([REFERENCE, *strategies]))
        began = time.monotonic()
        self.offers = {
            python: ask(python, asked) for python in (sys.executable, *map(str, pythons))
        }
        self.seconds = (time.monotonic() - began) / len(self.offers)
        """That it takes to start one of them, with torch."""
        self._check(strategies)

    def python_for(self, strategy: str) -> str | None:
        """The first interpreter that can run it."""
        return next((p for p, offer in self.offers.items() if not offer.strategies[strategy]), None)

    def reason_against(self, strategy: str) -> str:
        """Why none of them can."""
        reasons = dict.fromkeys(offer.strategies[strategy] for offer in self.offers.values())
        return " ".join(reasons)

    @property
    def versions(self) -> dict[str, str]:
        """Of all environments; where they differ, those of the first."""
        found: dict[str, str] = {}
        for offer in self.offers.values():
            found = {**offer.versions, **found}
        return dict(sorted(found.items()))

    def _check(self, strategies: Sequence[str]) -> None:
        known = sorted({name for offer in self.offers.values() for name in offer.known})
        for strategy in strategies:
            name = registry.as_mapping(strategy)["name"]
            if name not in known:
                raise ConfigError(
                    f"there is no strategy '{name}'.{did_you_mean(name, known)} Installed here and "
                    f"in the environments that --python names: {', '.join(known)}."
                )
        if not any(self.python_for(strategy) for strategy in strategies):
            reasons = "\n".join(f"  - {one}: {self.reason_against(one)}" for one in strategies)
            raise ConfigError(f"none of the strategies can run here:\n{reasons}")


def ask(python: str, strategies: Sequence[str]) -> Offer:
    """Ask an environment what it offers.

    Raises:
        ConfigError: it cannot be asked.
    """
    command = [python, "-m", "unipar.benchmark.environments", *strategies]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{python} cannot take part in the benchmark: {error}.") from error
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise ConfigError(
            f"{python} cannot take part in the benchmark: {''.join(last)}\n"
            f"Install unipar there: {python} -m pip install {_own_source()}"
        )
    return Offer.model_validate_json(done.stdout.splitlines()[-1])


def _own_source() -> str:
    """Where this unipar comes from, as pip takes it: a checkout, a wheel, or a package index."""
    distribution = metadata.distribution("unipar")
    # PEP 610: what was not found on an index.
    recorded = distribution.read_text("direct_url.json")
    if recorded is None:
        return f"unipar=={distribution.version}"
    source = json.loads(recorded)
    scheme = f"{source['vcs_info']['vcs']}+" if "vcs_info" in source else ""
    return scheme + source["url"]


def offer(strategies: Sequence[str]) -> Offer:
    """Find what this environment offers."""
    known = registry.names()
    versions = {"python": platform.python_version()}
    reasons = {}
    for strategy in strategies:
        name = registry.as_mapping(strategy)["name"]
        reasons[strategy] = _reason(strategy) if name in known else f"'{name}' is not installed."
        versions |= registry.versions(name)
    return Offer(strategies=reasons, known=known, versions=versions | registry.versions("single"))


def _reason(strategy: str) -> str:
    """Why a strategy cannot run here; empty where it can."""
    try:
        made = registry.resolve(strategy)
    except ConfigError as error:
        return str(error)
    available = made.availability()
    return "" if available.ok else f"{available.reason} {available.remedy}".strip()


if __name__ == "__main__":
    print(json.dumps(offer(sys.argv[1:]).model_dump()))
