"""The memory of this host that a process may still take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

_UNLIMITED = 1 << 60
"""Kernels write a number of this size for "no limit"."""


class HostMemory(NamedTuple):
    """Memory in bytes.

    Attributes:
        total: of the host, or what this process's control groups allow, if that is less.
        available: of that, without swapping; what only caches files counts as available.
    """

    total: int
    available: int


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Look at the host and at every control group that this process is in.

    Args:
        root: where ``/proc`` and ``/sys`` are.
    """
    host = psutil.virtual_memory()
    found = [HostMemory(host.total, host.available), *_groups(root)]
    return HostMemory(min(one.total for one in found), min(one.available for one in found))


def _groups(root: Path) -> Iterator[HostMemory]:
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers in ("", "memory"):
            base = root / "sys/fs/cgroup" / controllers
            # In a container the name can be the host's, which is not seen there: then the
            # container's own group is at the top.
            own = base / name.lstrip("/")
            for group in (own, *own.parents):
                if (limit := _limit(group)) is not None:
                    yield limit
                if group == base:
                    break


def _limit(group: Path) -> HostMemory | None:
    for most, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, taken = _read(group / most), _read(group / used)
        if limit is None or taken is None or limit == "max" or int(limit) >= _UNLIMITED:
            continue
        stat = dict(line.split() for line in (_read(group / "memory.stat") or "").splitlines())
        left = int(limit) - int(taken) + int(stat.get(cached, 0))
        return HostMemory(int(limit), max(0, left))
    return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
