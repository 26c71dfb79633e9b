"""A backend's recipe for installing its framework: plain data, which the core carries out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from unipar.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Program:
    """A program that the steps call.

    Attributes:
        names: what it may be called; one of them on the ``PATH`` is enough.
        debian: the Debian package that has it.
    """

    names: tuple[str, ...]
    debian: str


@dataclass(frozen=True)
class Edit:
    """A change to a source file, which must hold ``old`` exactly once.

    Attributes:
        file: path in the unpacked source distribution.
        old: the text to replace.
        new: what to put there.
        why: the reason, for whoever reads the plan.
    """

    file: str
    old: str
    new: str
    why: str


@dataclass(frozen=True)
class Pip:
    """``pip install`` into this environment; torch is never changed by it.

    Attributes:
        requirements: what to install.
        args: further arguments, such as ``--no-deps``.
        environment: variables to set for it.
    """

    requirements: tuple[str, ...]
    args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Build:
    """A wheel built here against the installed torch, kept in a cache, and installed by itself.

    Attributes:
        distribution: its name on the package index.
        version: its version there.
        sha256: of the source distribution.
        edits: changes to the sources.
        tools: requirements of the build; they are put beside the environment, not into it.
        environment: variables to set for the build.
        sensitive: beginnings of further environment variables that change the wheel. Wheels built
            under other values of them, or of a compiler's usual ones, are kept apart.
        minutes: how long it takes on two cores, about.
    """

    distribution: str
    version: str
    sha256: str
    edits: tuple[Edit, ...] = ()
    tools: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    sensitive: tuple[str, ...] = ()
    minutes: int = 1


@dataclass(frozen=True)
class Python:
    """``python`` with these arguments, such as ``("-m", "unipar_name.prepare")``.

    Attributes:
        args: its arguments.
        title: what it does, for the plan: "compile the optimizer's kernels".
        environment: variables to set for it.
    """

    args: tuple[str, ...]
    title: str
    environment: Mapping[str, str] = field(default_factory=dict)


Step = Pip | Build | Python


@dataclass(frozen=True)
class Extra:
    """A part of a framework that not everybody wants: ``unipar install NAME --with EXTRA``.

    Attributes:
        name: what it is called there.
        title: what it is, in a few words.
        steps: what is done for it, after the framework is there.
        programs: what must be on the ``PATH`` for that.
    """

    name: str
    title: str
    steps: tuple[Step, ...]
    programs: tuple[Program, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """How one framework gets into an environment that holds torch.

    Attributes:
        name: what ``unipar install`` calls it; the strategy's name.
        framework: its own name and the version installed: "Horovod 0.28.1".
        steps: what is done, in this order.
        programs: what must be on the ``PATH`` for that.
        needs: distributions that must have exactly this version beside it.
        alone: why it wants an environment that no other framework shares; empty if it does not.
        smoke: the strategy that the installation is checked with, such as ``"name:stage=1"``;
            empty: ``name``.
        smoke_precision: the precision of that check.
        extras: what can be had beside it.
    """

    name: str
    framework: str
    steps: tuple[Step, ...]
    programs: tuple[Program, ...] = ()
    needs: Mapping[str, str] = field(default_factory=dict)
    alone: str = ""
    smoke: str = ""
    smoke_precision: str = "fp32"
    extras: tuple[Extra, ...] = ()

    def including(self, names: Sequence[str], *, only: bool = False) -> Recipe:
        """This recipe with the steps of some extras.

        Args:
            names: of the extras.
            only: without the framework's own steps, for it is there already.

        Raises:
            ConfigError: there is no such extra.
        """
        known = {extra.name: extra for extra in self.extras}
        for name in names:
            if name not in known:
                listed = "; ".join(f"{extra.name} ({extra.title})" for extra in self.extras)
                raise ConfigError(
                    f"{self.name} has no extra '{name}'.{did_you_mean(name, known)} "
                    f"It has: {listed or 'none'}."
                )
        wanted = [known[name] for name in dict.fromkeys(names)]
        steps = tuple(step for extra in wanted for step in extra.steps)
        programs = tuple(program for extra in wanted for program in extra.programs)
        return replace(
            self,
            steps=steps if only else self.steps + steps,
            programs=programs if only else self.programs + programs,
        )

    def can_share(self, other: Recipe) -> bool:
        """Return whether the two frameworks can live in one environment."""
        agree = all(other.needs.get(name, wanted) == wanted for name, wanted in self.needs.items())
        return agree and not self.alone and not other.alone


@runtime_checkable
class Installable(Protocol):
    """A strategy class whose framework ``unipar install`` brings, since pip alone does not."""

    @classmethod
    def recipe(cls) -> Recipe:
        """How the framework is installed in this environment."""
        ...
