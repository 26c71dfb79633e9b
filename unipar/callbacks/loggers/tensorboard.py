"""Metrics to TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from unipar.callbacks.loggers.base import Logger
from unipar.callbacks.records import RunInfo

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger(Logger):
    """Writes event files into ``tensorboard/`` in the output directory.

    Args:
        flush_secs: seconds between writes to disk.
    """

    package = "tensorboard"
    extra = "tensorboard"

    def __init__(self, flush_secs: int = 10) -> None:
        self.flush_secs = flush_secs
        self._writer: SummaryWriter | None = None

    def start(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(
            str(run.output_dir / "tensorboard"),
            # Readers drop the events of an attempt that failed from this step on.
            purge_step=run.start_step + 1,
            flush_secs=self.flush_secs,
        )
        config = json.dumps(dict(run.config), indent=2, default=str)
        self._writer.add_text("config", f"```json\n{config}\n```", run.start_step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        assert self._writer is not None, "log before start"
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
