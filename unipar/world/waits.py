"""Waiting for rank 0's host, and what is said of it: else nothing shows that a rank waits."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import torch.distributed as dist

from unipar.errors import ConfigError

log = logging.getLogger("unipar")

QUIET = 20.0
"""Seconds of waiting that nothing is said of."""
_AGAIN = 1.0


@contextlib.contextmanager
def told_of(warning: str) -> Iterator[None]:
    """Give a warning, where the block takes longer than :data:`QUIET`."""
    timer = threading.Timer(QUIET, log.warning, ("%s", warning))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def await_name(host: str, timeout: float) -> None:
    """Wait until a host has an address: a cluster may give it its name after it has started.

    Args:
        host: a name, or an address itself.
        timeout: in seconds.

    Raises:
        ConfigError: it can be no name.
        torch.distributed.DistStoreError: it has none within ``timeout``.
    """
    began, told = time.monotonic(), False
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except UnicodeError as error:
            raise ConfigError(f"{host!r}, where the ranks meet, is no name of a host.") from error
        except socket.gaierror as error:
            waited = time.monotonic() - began
            unknown = (
                f"this machine knows no host {host!r}, where the ranks meet ({error.strerror})"
            )
            remedy = "set MASTER_ADDR to rank 0's host, by a name or address that all hosts know"
            if waited >= timeout:
                raise dist.DistStoreError(
                    f"timed out after {timeout:g} s: {unknown}. {remedy[0].upper()}{remedy[1:]}."
                ) from error
            if waited >= QUIET and not told:
                log.warning(
                    "%s. It waits for up to %g s, since a cluster may name a host late; if it is "
                    "another that is meant, end the run, and %s.",
                    unknown,
                    timeout,
                    remedy,
                )
                told = True
        time.sleep(min(_AGAIN, timeout))


def host_of(method: str) -> tuple[str, str] | None:
    """The host and port of a meeting point; ``None`` of one that has none, or does not say it."""
    if method == "env://":
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    else:
        parts = urlsplit(method)
        host, port = parts.hostname, parts.scheme == "tcp" and str(parts.port or "")
    return (host, port) if host and port else None
