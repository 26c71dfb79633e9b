"""The cells of a benchmark: every strategy in every shape asked for."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from pydantic import BaseModel

from unipar.errors import ConfigError
from unipar.strategy import Precision
from unipar.utils.plugins import split

REFERENCE = "single"
"""The strategy whose losses are right by definition: one process, no framework."""

_NEW_STRATEGY = re.compile(r"[^=\[{(\"']*(:|$)")


class Cell(BaseModel, frozen=True):
    """One shape of the job.

    Attributes:
        strategy: as ``strategy=`` takes it: ``"fsdp"``, ``"deepspeed:stage=3"``.
        devices: number of processes.
        precision: the compute dtype.
        micro_batch_size: samples of one forward pass on one rank; ``None`` leaves it to the run.
        raw: whether a hand-written loop ran it, without unipar.
    """

    strategy: str
    devices: int = 1
    precision: Precision = "fp32"
    micro_batch_size: int | None = None
    raw: bool = False

    @property
    def key(self) -> str:
        """A name for files: letters, digits, and ``-_.=``; different for different cells."""
        shape = [self.strategy, f"{self.devices}x", self.precision]
        if self.micro_batch_size is not None:
            shape.append(f"micro={self.micro_batch_size}")
        if self.raw:
            shape.append("raw")
        return re.sub(r"[^\w.=-]", "_", "--".join(shape))

    @property
    def label(self) -> str:
        """How people read it: the strategy, and only what is not as usual."""
        extras = [self.precision] if self.precision != "fp32" else []
        if self.micro_batch_size is not None:
            extras.append(f"micro-batch {self.micro_batch_size}")
        name = f"{self.strategy} by hand" if self.raw else self.strategy
        return f"{name} ({', '.join(extras)})" if extras else name


def make_cells(
    strategies: Sequence[str],
    devices: Sequence[int],
    precisions: Sequence[Precision],
    micro_batch_sizes: Sequence[int | None],
) -> list[Cell]:
    """Every combination, in order, each once.

    Args:
        strategies: each may sweep over options (``"deepspeed:stage=1|2|3"``).
        devices: numbers of processes.
        precisions: compute dtypes.
        micro_batch_sizes: samples of one forward pass on one rank.

    Raises:
        ConfigError: nothing to run, a sweep that cannot be read, or a number below 1.
    """
    for name, given in (("strategies", strategies), ("devices", devices)):
        if not given:
            raise ConfigError(f"{name} is empty: name at least one.")
    for number in [*devices, *(size for size in micro_batch_sizes if size is not None)]:
        if number < 1:
            raise ConfigError(f"{number} was given where a number from 1 on is needed.")
    swept = [variant for strategy in strategies for variant in sweep(strategy)]
    combined = itertools.product(swept, devices, precisions, micro_batch_sizes)
    return list(
        dict.fromkeys(
            Cell(strategy=strategy, devices=size, precision=precision, micro_batch_size=micro)
            for strategy, size, precision, micro in combined
        )
    )


def split_strategies(text: str) -> list[str]:
    """Cut ``"ddp,fsdp:sharding=hybrid,cpu_offload=true"`` at the commas before a strategy.

    Raises:
        ConfigError: an option stands before any strategy.
    """
    found: list[str] = []
    for piece in split(text):
        if _NEW_STRATEGY.match(piece):
            found.append(piece.strip())
        elif found and ":" in found[-1]:
            found[-1] += f",{piece.strip()}"
        else:
            raise ConfigError(
                f"strategies '{text}': '{piece.strip()}' is an option without a strategy. "
                "Write it like 'ddp,deepspeed:stage=3,overlap_comm=true'."
            )
    if not all(found):
        raise ConfigError(f"strategies '{text}': there is nothing between two commas.")
    return found


def sweep(strategy: str) -> list[str]:
    """Every strategy that ``name:option=a|b`` stands for.

    Raises:
        ConfigError: an option is not ``key=value``, or one of its values is empty.
    """
    name, colon, rest = strategy.partition(":")
    if not colon:
        return [strategy]
    choices: list[list[str]] = []
    for item in split(rest):
        key, equals, values = item.partition("=")
        if not equals or not key.strip().isidentifier():
            raise ConfigError(
                f"strategy '{strategy}': '{item.strip()}' is not option=value. "
                "Write a sweep like 'deepspeed:stage=1|2|3'."
            )
        variants = [value.strip() for value in split(values, at="|")]
        if not all(variants):
            raise ConfigError(
                f"strategy '{strategy}': one of the values in '{item.strip()}' is empty. "
                "Write a sweep like 'deepspeed:stage=1|2|3'."
            )
        choices.append([f"{key.strip()}={value}" for value in variants])
    return [f"{name}:{','.join(combined)}" for combined in itertools.product(*choices)]
