"""Where metrics go: the interface that each writer fills in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib.util import find_spec
from typing import ClassVar

from unipar.callbacks.records import RunInfo
from unipar.errors import ConfigError


class Logger(ABC):
    """Writes a run's metrics somewhere. Lives on rank 0 only.

    A logger is made before the run's processes start and is sent to rank 0, so it must hold
    nothing that cannot be pickled until :meth:`start`.

    Attributes:
        package: the import name of the package it needs, or ``None``.
        extra: the extra of unipar's distribution that brings that package.
    """

    package: ClassVar[str | None] = None
    extra: ClassVar[str | None] = None

    @abstractmethod
    def start(self, run: RunInfo) -> None:
        """Open the writer. Metrics of steps after ``run.start_step`` may already be there, from an
        attempt that failed; they are about to be written again."""

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write metrics of a step (1-based). Evaluation metrics are named ``eval/…``."""

    @abstractmethod
    def close(self) -> None:
        """Write what is pending and let go. Called once after :meth:`start`."""

    def fail(self, error: BaseException) -> None:
        """Called instead of :meth:`close` when the run failed; a tracker can say so."""
        self.close()

    @classmethod
    def check(cls) -> None:
        """Raise :class:`ConfigError` when the package that this logger needs is missing."""
        if cls.package is not None and find_spec(cls.package) is None:
            how = f"pip install 'unipar[{cls.extra}]'" if cls.extra else f"install {cls.package}"
            raise ConfigError(
                f"{cls.__name__} needs the package '{cls.package}', which is not installed. "
                f"Run: {how}, or leave the logger out."
            )


def flat_config(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """A nested config as one level of dotted keys, for trackers that take nothing deeper."""
    flat: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flat_config(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def remember(run: RunInfo, tracker: str, run_id: str) -> None:
    """Keep a tracker's run id in the output directory, for :func:`recall`."""
    run.output_dir.mkdir(parents=True, exist_ok=True)
    (run.output_dir / f".{tracker}-run").write_text(run_id, encoding="utf-8")


def recall(run: RunInfo, tracker: str) -> str | None:
    """The tracker's run that this one continues; ``None`` when it starts from step 0."""
    path = run.output_dir / f".{tracker}-run"
    if run.start_step == 0 or not path.is_file():
        return None
    return path.read_text(encoding="utf-8").strip()
