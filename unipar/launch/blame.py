"""Blame by exception: whether a rank failed by itself, or because another one did."""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from unipar.errors import Terminated


class Kind(str, Enum):
    """The kinds of failures, by what each says about its rank."""

    ERROR = "error"
    """The rank failed by itself."""
    INTERRUPT = "interrupt"
    """The rank was stopped by a signal (Ctrl-C, SIGTERM)."""
    APART = "apart"
    """The rank met another one in a different collective."""
    TIMEOUT = "timeout"
    """The rank waited in a collective until its time was up: another rank is missing."""
    LOST = "lost"
    """The rank lost its connection to another one, which is the one that failed."""

    @property
    def is_echo(self) -> bool:
        """The cause is to be looked for on other ranks too."""
        return self in (Kind.APART, Kind.TIMEOUT, Kind.LOST)


class Echo(NamedTuple):
    """How one backend says that another rank is gone.

    Attributes:
        kind: what it means.
        text: matches ``module.Class: message`` of the exception.
        source: the backend, and where its text is from.
    """

    kind: Kind
    text: re.Pattern[str]
    source: str


def _echo(kind: Kind, text: str, source: str) -> Echo:
    return Echo(kind, re.compile(text, re.IGNORECASE | re.DOTALL), source)


_GLOO = r"^(builtins\.RuntimeError|torch\.distributed\.Dist\w+): \[.*gloo/.*\]"
_TORCH = r"^torch\.distributed\.Dist\w+: "

# The first that matches counts: of an error that led to others, what names a time comes before
# what names a connection.
ECHOES = (
    _echo(
        Kind.APART,
        _GLOO + r".*op\.preamble\.length <= op\.nbytes",
        "gloo of torch 2.13, seen: what comes is longer than what this rank waits for",
    ),
    _echo(
        Kind.TIMEOUT,
        _GLOO + r".*(timed out|timeout)",
        "gloo of torch 2.13, seen: 'Timed out waiting …ms for send/recv operation to complete'",
    ),
    _echo(
        Kind.TIMEOUT,
        r"^builtins\.RuntimeError: Application timeout caused pair closure",
        "gloo of torch 2.13, seen: where another operation of this rank has timed out first",
    ),
    _echo(
        Kind.LOST,
        _GLOO + r".*(connection (closed|reset|refused)|broken pipe|socket|unreachable|no route)",
        "gloo of torch 2.13, seen: 'Connection closed by peer', 'Read error: Connection reset …'",
    ),
    _echo(
        Kind.TIMEOUT,
        r"watchdog caught collective operation timeout",
        "NCCL, torch 2.13's ProcessGroupNCCL.cpp, not seen: the watchdog, where it raises",
    ),
    _echo(
        Kind.LOST,
        _TORCH + r".*(nccl communicator was aborted|ncclRemoteError|ncclSystemError|"
        r"remote process exited)",
        "NCCL, torch 2.13's NCCLUtils.cpp, not seen: what its error codes are explained by",
    ),
    _echo(
        Kind.TIMEOUT,
        _TORCH + r".*(timed out|timeout)",
        "the store of torch 2.13, seen: 'wait timeout after …ms, keys: …'",
    ),
    _echo(
        Kind.LOST,
        _TORCH + r".*(connection (was )?(closed|reset|refused|aborted|likely)|broken pipe|socket|"
        r"recvvalue|failed to (send|recv))",
        "the store of torch 2.13, seen: 'Connection was likely closed', 'recvValue failed on …'",
    ),
    _echo(
        Kind.LOST,
        r"^horovod\.common\.exceptions\.HorovodInternalError: ",
        "Horovod 0.28.1, seen: 'Horovod has been shut down …'; it says nothing else of lost ranks",
    ),
    _echo(
        Kind.LOST,
        r"^\S+: .*MPI_ERR_(PROC_FAILED|PROC_ABORTED|REVOKED)",
        "MPI 4 with fault tolerance (Open MPI 5's mpi-ext.h), not seen: mpirun ends all ranks",
    ),
)


def classify(error: BaseException) -> Kind:
    """Tell a failure that began on this rank from one that came through a collective."""
    if isinstance(error, (KeyboardInterrupt, Terminated)):
        return Kind.INTERRUPT
    return _match([_described(link) for link in chain(error)])


# What torch 2.13 puts before the error of a communication hook (ivalue_inl.h, Future::then).
_CALLBACK = re.compile(
    r"Got the following error when running the callback: (?:torch\.distributed\.)?(\w+): (.*)",
    re.DOTALL,
)


def _described(error: BaseException) -> str:
    """``module.Class: message``, of an error in a callback as it was there."""
    if hooked := _CALLBACK.match(str(error)):
        name, message = hooked.groups()
        module = "torch.distributed" if name.startswith("Dist") else "builtins"
        return f"{module}.{name}: {message}"
    return f"{type(error).__module__}.{type(error).__qualname__}: {error}"


def classify_output(text: str) -> Kind:
    """The same of what an aborted process has printed.

    By default NCCL's watchdog raises in a thread of its own, which aborts the process that waited.
    """
    return _match([text])


def chain(error: BaseException) -> list[BaseException]:
    """``error`` and the exceptions that led to it, the first of them first."""
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in links:
        links.append(link)
        hidden = link.__suppress_context__
        link = link.__cause__ or (None if hidden else link.__context__)
    return links[::-1]


def _match(texts: list[str]) -> Kind:
    matching = (echo.kind for echo in ECHOES if any(echo.text.search(text) for text in texts))
    return next(matching, Kind.ERROR)
