"""The machine that a benchmark runs on."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

import psutil
import torch

from unipar.benchmark.result import Machine


def describe(versions: Mapping[str, str]) -> Machine:
    """This machine, now."""
    accelerators = []
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        accelerators = [torch.cuda.get_device_name(index) for index in range(count)]
    return Machine(
        processor=processor(),
        cores=cores(),
        memory=psutil.virtual_memory().total,
        accelerators=accelerators,
        system=f"{platform.system()} {platform.release()}",
        versions=dict(versions),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def cores() -> int:
    """Cores that this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return allowed or os.cpu_count() or 1


def processor() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """The commit that the working directory is at; empty where it is in no git repository."""
    if shutil.which("git") is None:
        return ""

    def ask(*command: str) -> str:
        done = subprocess.run(
            ["git", *command], capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        return "" if done.returncode else done.stdout.strip()

    head = ask("rev-parse", "HEAD")
    changed = head and ask("status", "--porcelain", "--untracked-files=no")
    return f"{head} with uncommitted changes" if changed else head
