"""How a run is going, on the terminal or in a log file."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from typing import TYPE_CHECKING

from unipar.callbacks.base import Callback
from unipar.callbacks.records import RunInfo, RunResult, StepRecord

if TYPE_CHECKING:
    from rich.console import Console

    from unipar.callbacks.views import View


class ProgressBar(Callback):
    """Shows loss, gradient norm, throughput, peak memory and time left, then a closing table.

    On a terminal that is a bar, redrawn in place; anywhere else (a log file, a pipe, a notebook)
    a line now and then: for the first and last step, each tenth of the run, and whenever ten
    seconds, or a fiftieth of the time so far, have gone by without one. All of it goes to standard
    error, so standard output stays the script's own.

    Args:
        console: where to write instead of standard error.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._view: View | None = None

    def on_run_start(self, run: RunInfo) -> None:
        # Here and not above: rich takes time to import, and this module is part of `import unipar`.
        from unipar.callbacks.views import open_view

        self._view = open_view(self._console, run)
        # sys.exit in a user's callback, say: the terminal is to be left as it was found.
        atexit.register(self._stop)

    def on_step_end(self, run: RunInfo, record: StepRecord) -> None:
        if self._view is not None:
            self._view.step(record)

    def on_evaluate_end(self, run: RunInfo, step: int, metrics: Mapping[str, float]) -> None:
        if self._view is not None:
            values = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            self._view.note(f"step {step}: evaluation  {values}")

    def on_run_end(self, run: RunInfo, result: RunResult | None) -> None:
        view = self._view
        self._stop()
        if view is not None and result is not None:
            from unipar.callbacks.summary import places, summary

            view.console.print(summary(run, result))
            for line in places(result):
                view.note(line)

    def on_exception(self, run: RunInfo, error: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        view, self._view = self._view, None
        if view is not None:
            atexit.unregister(self._stop)
            view.stop()
