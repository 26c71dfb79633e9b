"""Where ``fabric.log`` writes: loggers of Fabric's, and what scripts derive from."""

from __future__ import annotations

import csv
import os
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unipar.callbacks.loggers.base import flat_config
from unipar.compat.fabric.ranks import rank_zero_only, rank_zero_warn
from unipar.compat.fabric_names import LOGGERS, refuse
from unipar.data.move import with_items
from unipar.utils.replacing import replacing
from unipar.utils.urls import is_url


# As in Fabric, what a logger leaves out does nothing.
class Logger(ABC):
    """What a script's own logger is derived from."""

    @property
    @abstractmethod
    def name(self) -> str | None:
        """The experiment."""

    @property
    @abstractmethod
    def version(self) -> int | str | None:
        """Which of its runs this is."""

    @property
    def root_dir(self) -> str | None:
        """Where all experiments are, if they are files."""
        return None

    @property
    def log_dir(self) -> str | None:
        """Where this run is, likewise."""
        return None

    @property
    def group_separator(self) -> str:
        """What stands between the parts of a name."""
        return "/"

    @abstractmethod
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Write numbers of a step."""

    @abstractmethod
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Write hyperparameters."""

    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:  # noqa: B027
        """Write the model's graph; nothing unless overridden."""

    def save(self) -> None:  # noqa: B027
        """Write what is pending; nothing unless overridden."""

    def finalize(self, status: str) -> None:
        """End."""
        self.save()


class _FileLogger(Logger):
    """One that writes files, in ``root_dir/name/version_N``."""

    def __init__(self, root_dir: Any, name: str | None, version: int | str | None, prefix: str):
        if is_url(root_dir):
            refuse("CSVLogger('s3://…')", f"{type(self).__name__}({root_dir!r})")
        self._root, self._name, self._version = str(root_dir), name or "", version
        self._prefix = prefix

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> int | str:
        """As given, or the first number that is free."""
        if self._version is None:
            there = Path(self._root, self._name).glob("version_*")
            numbers = [int(one.name[8:]) for one in there if one.name[8:].isdigit()]
            self._version = max(numbers, default=-1) + 1
        return self._version

    @property
    def root_dir(self) -> str:
        return self._root

    @property
    def log_dir(self) -> str:
        version = self.version
        named = version if isinstance(version, str) else f"version_{version}"
        return str(Path(self._root, self._name, named))

    def _prefixed(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        found = {f"{self._prefix}-{k}" if self._prefix else k: v for k, v in metrics.items()}
        return in_numbers(found)


def in_numbers(value: Any) -> Any:
    """What holds tensors, with numbers in their place."""
    return value.item() if isinstance(value, torch.Tensor) else with_items(value, in_numbers)


class CSVLogger(_FileLogger):
    """Writes ``metrics.csv``, a line for each call and a column for each name.

    Args:
        root_dir: where experiments are.
        name: of the experiment.
        version: of the run; left out: the first number that is free.
        prefix: in front of each name.
        flush_logs_every_n_steps: writes to disk.
    """

    def __init__(
        self,
        root_dir: Any,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(root_dir, name, version, prefix)
        self._every = flush_logs_every_n_steps
        self._file: _MetricsFile | None = None

    @property
    def experiment(self) -> Any:
        """The file, on rank 0; elsewhere something that takes every call."""
        return self._opened() or _Nothing()

    @rank_zero_only
    def _opened(self) -> _MetricsFile:
        if self._file is None:
            self._file = _MetricsFile(self.log_dir)
        return self._file

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        step = len(self.experiment.metrics) if step is None else step
        self.experiment.log_metrics(self._prefixed(metrics), step)
        if (step + 1) % self._every == 0:
            self.save()

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Refused, as in Fabric."""
        raise NotImplementedError("CSVLogger writes no hyperparameters. Use TensorBoardLogger.")

    @rank_zero_only
    def save(self) -> None:
        self.experiment.save()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._file is not None:
            self.save()


class _MetricsFile:
    """The lines of one run. Its directory is made at once, so that another run takes another.

    Args:
        log_dir: where the file is; that of an earlier run is removed.

    Attributes:
        metrics: lines that are not in the file yet. Without a step, a line's is its place here.
        metrics_keys: the columns of the file.
        metrics_file_path: the file.
    """

    NAME_METRICS_FILE = "metrics.csv"

    def __init__(self, log_dir: str) -> None:
        self.metrics: list[dict[str, Any]] = []
        self.metrics_keys: list[str] = []
        self.log_dir = log_dir
        self.metrics_file_path = os.path.join(log_dir, self.NAME_METRICS_FILE)
        directory, file = Path(log_dir), Path(self.metrics_file_path)
        if file.exists():
            rank_zero_warn(f"{file} is of an earlier run, and is removed.")
            file.unlink()
        directory.mkdir(parents=True, exist_ok=True)

    def log_metrics(self, metrics_dict: Mapping[str, Any], step: int | None = None) -> None:
        """Take a line."""
        step = len(self.metrics) if step is None else step
        self.metrics.append({**in_numbers(metrics_dict), "step": step})

    def save(self) -> None:
        """Write the lines that are not in the file yet; all of it, where a column comes."""
        if not self.metrics:
            return
        file = Path(self.metrics_file_path)
        columns = sorted({*self.metrics_keys}.union(*self.metrics))
        if columns != self.metrics_keys or not file.exists():
            before = []
            if file.exists():
                with file.open(newline="", encoding="utf-8") as lines:
                    before = list(csv.DictReader(lines))
            self.metrics_keys = columns
            with replacing(file) as partial:
                self._write(partial, before, header=True)
        self._write(file, self.metrics)
        self.metrics = []

    def _write(self, file: Path, lines: list[dict[str, Any]], *, header: bool = False) -> None:
        # Of what is written anew, a process that was killed may have left a part.
        with file.open("w" if header else "a", newline="", encoding="utf-8") as opened:
            writer = csv.DictWriter(opened, self.metrics_keys)
            if header:
                writer.writeheader()
            writer.writerows(lines)


class TensorBoardLogger(_FileLogger):
    """Writes event files for TensorBoard.

    Args:
        root_dir: where experiments are.
        name: of the experiment.
        version: of the run; left out: the first number that is free.
        default_hp_metric: whether hyperparameters without numbers get one that says nothing.
        prefix: in front of each name.
        sub_dir: within the run.
        kwargs: of ``torch.utils.tensorboard.SummaryWriter``.
    """

    def __init__(
        self,
        root_dir: Any,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(root_dir, name, version, prefix)
        self._sub_dir, self._kwargs = sub_dir, kwargs
        self._default_hp_metric, self._writer = default_hp_metric, None

    @property
    def sub_dir(self) -> str | None:
        """Within the run."""
        return None if self._sub_dir is None else str(self._sub_dir)

    @property
    def log_dir(self) -> str:
        directory = Path(super().log_dir, self.sub_dir or "")
        return os.path.expanduser(os.path.expandvars(directory))

    def __getstate__(self) -> dict[str, Any]:
        # Sent to a process, which opens a file of its own.
        return {**self.__dict__, "_writer": None}

    @property
    def experiment(self) -> Any:
        """The writer, on rank 0; elsewhere something that takes every call."""
        return self._opened() or _Nothing()

    @rank_zero_only
    def _opened(self) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self.log_dir, **self._kwargs)
        return self._writer

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        for name, value in self._prefixed(metrics).items():
            add = "add_scalars" if isinstance(value, dict) else "add_scalar"
            getattr(self.experiment, add)(name, value, step)

    @rank_zero_only
    def log_hyperparams(self, params: Any, metrics: Any = None, step: int | None = None) -> None:
        """Write hyperparameters beside numbers that were reached with them."""
        from torch.utils.tensorboard.summary import hparams

        given = flat_config(vars(params) if isinstance(params, Namespace) else params)
        plain = {k: v if isinstance(v, (bool, int, float, str)) else str(v)
                 for k, v in given.items()}  # fmt: skip
        if metrics is None:
            metrics = {"hp_metric": -1} if self._default_hp_metric else {}
        numbers = metrics if isinstance(metrics, dict) else {"hp_metric": metrics}
        if not numbers:
            return
        self.log_metrics(numbers, step)
        # torch 2.13, torch/utils/tensorboard/writer.py: add_hparams opens another directory.
        writer = self.experiment._get_file_writer()
        for summary in hparams(plain, numbers):
            writer.add_summary(summary, step)

    @rank_zero_only
    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        given = getattr(model, "example_input_array", None) if input_array is None else input_array
        self.experiment.add_graph(getattr(model, "module", model), given)

    @rank_zero_only
    def save(self) -> None:
        self.experiment.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()


class _Nothing:
    """Takes every call, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


__getattr__ = LOGGERS.refusing(__name__)
