"""Ports that are free now."""

from __future__ import annotations

import socket


def free_port() -> int:
    """One of this machine's own address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
