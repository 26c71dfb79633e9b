"""The abilities of this machine: the facts behind ``unipar doctor``."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from unipar.errors import ConfigError
from unipar.install import Installable, Recipe
from unipar.strategy import registry

_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
"""Kernels write a number of this size for "no limit"."""


@dataclass(frozen=True)
class Software:
    """Versions, and what torch was built with."""

    python: str
    executable: str
    platform: str
    unipar: str
    torch: str
    cuda_build: str | None
    communication: dict[str, bool]


@dataclass(frozen=True)
class Device:
    """One accelerator; memory in bytes."""

    index: int
    name: str
    memory: int
    free_memory: int
    bf16: bool
    peers: tuple[int, ...]


@dataclass(frozen=True)
class Interface:
    """A network interface that is up; speed in Mbit/s, ``None`` where the driver does not say."""

    name: str
    addresses: tuple[str, ...]
    speed: int | None


@dataclass(frozen=True)
class Host:
    """Cores and memory that this process may use; bytes, ``None`` for no limit."""

    cores: int
    cores_allowed: int
    cores_limit: float | None
    memory: int
    memory_available: int
    memory_limit: int | None
    shared_memory: int | None

    @property
    def usable_cores(self) -> float:
        """Cores by affinity and by the container's limit."""
        return min(self.cores_allowed, self.cores_limit or self.cores_allowed)


@dataclass(frozen=True)
class StrategyReport:
    """An installed strategy: whether it runs on this machine, and what fixes it if not."""

    name: str
    distribution: str
    ok: bool
    reason: str
    remedy: str
    device_types: tuple[str, ...]
    precisions: tuple[str, ...]
    sharded: tuple[str, ...]


@dataclass(frozen=True)
class FrameworkReport:
    """A framework that ``unipar install`` knows, and what it can share an environment with."""

    name: str
    framework: str
    shares_with: tuple[str, ...]
    apart: str


@dataclass(frozen=True)
class Report:
    """All that ``unipar doctor`` tells."""

    software: Software
    devices: tuple[Device, ...]
    interfaces: tuple[Interface, ...]
    host: Host
    strategies: tuple[StrategyReport, ...]
    frameworks: tuple[FrameworkReport, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {**asdict(self), "usable_cores": self.host.usable_cores}


def examine() -> Report:
    """Look at this machine; takes nothing and changes nothing."""
    devices = _devices()
    return Report(
        software=_software(),
        devices=devices,
        interfaces=_interfaces(),
        host=_host(),
        strategies=tuple(_strategy(info, devices) for info in registry.table()),
        frameworks=_frameworks(),
    )


def _software() -> Software:
    available = dist.is_available()
    return Software(
        python=platform.python_version(),
        executable=sys.executable,
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        unipar=metadata.version("unipar"),
        torch=torch.__version__,
        cuda_build=torch.version.cuda,
        communication={
            "nccl": available and dist.is_nccl_available(),
            "gloo": available and dist.is_gloo_available(),
            "mpi": available and dist.is_mpi_available(),
        },
    )


def _devices() -> tuple[Device, ...]:
    if not torch.cuda.is_available():
        return ()
    count = torch.cuda.device_count()
    found = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        peers = [
            other
            for other in range(count)
            if other != index and torch.cuda.can_device_access_peer(index, other)
        ]
        free, total = torch.cuda.mem_get_info(index)
        bf16 = properties.major >= 8
        found.append(Device(index, properties.name, total, free, bf16, tuple(peers)))
    return tuple(found)


def _interfaces() -> tuple[Interface, ...]:
    stats = psutil.net_if_stats()
    found = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        if name not in stats or not stats[name].isup:
            continue
        usable = tuple(
            one.address.partition("%")[0]
            for one in addresses
            if one.family in (socket.AF_INET, socket.AF_INET6)
        )
        # Linux gives 65535 Mbit/s for an interface without a speed of its own.
        speed = stats[name].speed if 0 < stats[name].speed < 65535 else None
        found.append(Interface(name, usable, speed))
    return tuple(found)


def _host() -> Host:
    memory = psutil.virtual_memory()
    shared = Path("/dev/shm")
    return Host(
        cores=os.cpu_count() or 1,
        cores_allowed=len(psutil.Process().cpu_affinity() or [])
        if sys.platform == "linux"
        else os.cpu_count() or 1,
        cores_limit=_cores_limit(),
        memory=memory.total,
        memory_available=memory.available,
        memory_limit=_memory_limit(),
        shared_memory=shutil.disk_usage(shared).total if shared.is_dir() else None,
    )


def _cores_limit() -> float | None:
    if (v2 := _read(_CGROUP / "cpu.max")) is not None:
        quota, _, period = v2.partition(" ")
        return None if quota == "max" else int(quota) / int(period or 100_000)
    quota = _read(_CGROUP / "cpu/cpu.cfs_quota_us")
    period = _read(_CGROUP / "cpu/cpu.cfs_period_us")
    if quota is None or period is None or int(quota) <= 0:
        return None
    return int(quota) / int(period)


def _memory_limit() -> int | None:
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        text = _read(_CGROUP / file)
        if text is not None:
            return None if text == "max" or int(text) > _UNLIMITED else int(text)
    return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _strategy(info: registry.StrategyInfo, devices: tuple[Device, ...]) -> StrategyReport:
    able = info.capabilities
    here = {"cpu", *(["cuda"] if devices else [])}
    ok, reason, remedy = info.availability
    if ok and able is not None and not here & able.device_types:
        wanted = " or ".join(sorted(able.device_types))
        ok, reason = False, f"runs on {wanted}, and there is none here."
        remedy = "use a machine with one, or another strategy"
        if "cuda" in able.device_types and torch.version.cuda is None and _has_nvidia_driver():
            reason = "runs on cuda, and this build of torch is for CPUs only."
            remedy = "pip install --force-reinstall torch"
    return StrategyReport(
        name=info.name,
        distribution=info.distribution,
        ok=ok,
        reason=reason,
        remedy=remedy,
        device_types=tuple(sorted(able.device_types)) if able else (),
        precisions=tuple(sorted(able.precisions, reverse=True)) if able else (),
        sharded=tuple(sorted(able.sharded)) if able else (),
    )


def _frameworks() -> tuple[FrameworkReport, ...]:
    recipes: dict[str, Recipe] = {}
    for name in registry.names():
        try:
            strategy = registry.strategy_class(name)
        except ConfigError:
            # Said among the strategies.
            continue
        if issubclass(strategy, Installable):
            recipe = strategy.recipe()
            recipes[recipe.name] = recipe
    return tuple(
        FrameworkReport(
            name,
            recipe.framework,
            tuple(other for other in recipes if other != name and recipe.can_share(recipes[other])),
            recipe.alone,
        )
        for name, recipe in sorted(recipes.items())
    )


def _has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
