"""Sending Ctrl-C as a terminal does."""

from __future__ import annotations

import signal
import subprocess


def interrupt(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
