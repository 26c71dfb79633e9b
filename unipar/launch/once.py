"""The self-test that runs do by themselves: once for a machine, its devices and these versions.

What came of it is a file in the user's cache directory. Of the processes of a run on one machine
the first does it, behind a lock, while the others wait for its outcome.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError

from unipar.errors import ConfigError
from unipar.launch.selftest import Outcome, compare
from unipar.strategy import SelfTest, Strategy, registry
from unipar.utils.cache import cache_directory
from unipar.world import Placement

log = logging.getLogger("unipar")

_PATIENCE = 20.0
"""Seconds for nvidia-smi to answer."""


class Record(BaseModel, frozen=True):
    """The record of a self-test.

    Attributes:
        key: what it holds for.
        outcome: what came of it.
        at: when, in seconds since the epoch.
    """

    key: dict[str, Any]
    outcome: Outcome
    at: float


def ensure(
    strategy: Strategy,
    placement: Placement,
    wanted: SelfTest,
    *,
    test: Callable[[str, str, int], Outcome] = compare,
) -> None:
    """Refuse a strategy that does not train here as a plain loop does.

    Where that was seen before to agree, this asks for the driver, reads a file, and no more.

    Args:
        strategy: with its options.
        placement: of this process.
        wanted: ``"auto"`` for GPUs only; ``True`` anywhere; ``False`` nowhere.
        test: what compares a strategy, a device type and a number of processes.

    Raises:
        ConfigError: the losses differ, with both of them, or the self-test failed.
    """
    kind = placement.device_type
    if not (kind == "cuda" if wanted == "auto" else wanted):
        return
    name = registry.inline(strategy.options)
    devices = min(placement.local_size, torch.cuda.device_count() if kind == "cuda" else 1 << 30)
    key = _key(strategy, name, kind, devices)
    began = time.time()
    outcome: Outcome | None = None
    try:
        with _locked(_file(key)) as file:
            record = _read(file, key)
            # Others on this machine may have waited for this one's.
            if record is None or (record.outcome.wrong and record.at < began):
                log.info(
                    "self-test of '%s' on %d x %s, once for this machine and these versions "
                    "(self_test=False leaves it out)",
                    *(name, devices, kind),
                )
                outcome = test(name, kind, devices)
                _write(file, Record(key=key, outcome=outcome, at=time.time()))
            else:
                outcome = record.outcome
    except (OSError, ConfigError) as error:
        log.warning("no self-test of '%s': its outcome cannot be kept (%s)", name, error)
    # It counts where it could not be kept, too.
    if outcome is not None:
        _judge(outcome)


def keep(strategy: Strategy, outcome: Outcome) -> None:
    """Let runs know what was found at another time.

    Raises:
        ConfigError: the cache directory cannot be written.
    """
    if outcome.compared is not None:
        compared = outcome.compared
        name = registry.inline(strategy.options)
        key = _key(strategy, name, compared.device, compared.devices)
        with _locked(_file(key)) as file:
            _write(file, Record(key=key, outcome=outcome, at=time.time()))


def _judge(outcome: Outcome) -> None:
    again = f"unipar doctor --self-test --strategy {outcome.strategy}"
    if outcome.verdict == "differs":
        raise ConfigError(
            f"strategy '{outcome.strategy}' does not train on this machine as a plain loop does: "
            f"{outcome.compared} Check drivers and the framework's installation, and repeat it by "
            f"`{again}`; self_test=False trains all the same."
        )
    if outcome.verdict == "failed":
        raise ConfigError(
            f"the self-test of strategy '{outcome.strategy}' failed on this machine: {outcome.why}"
            f"\nRepeat it by `{again}`; self_test=False trains without it."
        )
    if outcome.verdict != "agrees":
        log.warning("no self-test of '%s': %s", outcome.strategy, outcome.why)


def _key(strategy: Strategy, name: str, kind: str, devices: int) -> dict[str, Any]:
    """All that an outcome depends on."""
    return {
        "host": platform.node(),
        "strategy": name,
        "device": kind,
        "devices": devices,
        "python": platform.python_version(),
        # Pip's version of torch leaves out which build it is.
        "versions": registry.versions(strategy.name) | {"torch": str(torch.__version__)},
        "hardware": hardware() if kind == "cuda" else [platform.machine()],
    }


@functools.cache
def hardware() -> list[str]:
    """Name and driver of each GPU of the machine, as ``nvidia-smi`` gives them.

    Without it, the names that torch gives to those that it sees.
    """
    if shutil.which("nvidia-smi") is not None:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            told = subprocess.run(
                query, capture_output=True, text=True, check=True, timeout=_PATIENCE
            )
            return told.stdout.strip().splitlines()
    count = torch.cuda.device_count()
    return [torch.cuda.get_device_name(index) for index in range(count)]


def _file(key: dict[str, Any]) -> Path:
    directory = cache_directory() / "self-tests"
    directory.mkdir(exist_ok=True)
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return directory / f"{name}.json"


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[Path]:
    """The file, for one process of this machine at a time."""
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield file


def _read(file: Path, key: dict[str, Any]) -> Record | None:
    """Read what is kept; ``None`` where there is nothing, or nothing that can be read."""
    try:
        record = Record.model_validate_json(file.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    return record if record.key == key else None


def _write(file: Path, record: Record) -> None:
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(record.model_dump_json(indent=1))
    partial.replace(file)
