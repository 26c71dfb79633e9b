"""DeepSpeed's compiled operators: built once, ahead of any run, and loaded without a compiler.

DeepSpeed compiles an operator when it is first used, in every process, under a lock file that a
killed build leaves behind and that later ones wait for without end. Here ``unipar install`` builds
them in a directory that nobody else knows, moves them into the cache when they are whole, and a run
only loads them::

    python -m unipar_deepspeed.ops async_io
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from unipar.errors import ConfigError
from unipar.install.cache import cache_directory, torch_version
from unipar.utils.scratch import scratch

NEEDED = {"async_io": ("pin_memory", "async_io")}
"""What has to be loaded for an operator, in this order."""

_BUILDERS = {"async_io": "AsyncIOBuilder"}


def directory() -> Path:
    """Where operators of this DeepSpeed, torch, Python and processor are kept."""
    python = f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
    version = metadata.version("deepspeed")
    return (
        cache_directory()
        / "deepspeed-ops"
        / f"deepspeed-{version}-torch{torch_version()}-{python}-{_processor()}"
    )


def check(operator: str, option: str, extra: str) -> None:
    """Refuse an option whose operator could not be loaded.

    Args:
        operator: as DeepSpeed calls it.
        option: of the strategy, which needs it.
        extra: what ``unipar install deepspeed --with`` calls it.

    Raises:
        ConfigError: it is not built, or a library that it needs is not there.
    """
    missing = [name for name in NEEDED[operator] if not _library(name).is_file()]
    if missing:
        raise ConfigError(
            f"{option} needs DeepSpeed's operator '{operator}', which is not built for this "
            f"DeepSpeed, torch and processor ({missing[0]}.so is not in {directory()}). Build it "
            f"once: unipar install deepspeed --with {extra}"
        )
    if operator == "async_io":
        try:
            ctypes.CDLL("libaio.so.1")
        except OSError as error:
            raise ConfigError(
                f"{option} needs libaio, which cannot be loaded here ({error}). "
                "On Debian and Ubuntu: apt-get install libaio-dev"
            ) from error


def load(operator: str) -> None:
    """Let DeepSpeed find the operator as one that it has loaded already."""
    from deepspeed.ops.op_builder.builder import OpBuilder  # pyright: ignore

    for name in NEEDED[operator]:
        # DeepSpeed 0.19.8, ops/op_builder/builder.py.
        if name in OpBuilder._loaded_ops:
            continue
        path = _library(name)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if name == "pin_memory":
            # async_io takes its symbols from there.
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        OpBuilder._loaded_ops[name] = module


def build(operator: str) -> None:
    """Compile an operator, and what it needs, into the cache.

    Raises:
        ConfigError: the compiler finds no libaio.
    """
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    # ninja comes with DeepSpeed, into the directory of this interpreter.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    # A compiler of these sources takes more than 1 GB.
    os.environ.setdefault("MAX_JOBS", str(min(2, os.cpu_count() or 1)))
    kept = directory()
    if all(_library(name).is_file() for name in NEEDED[operator]):
        print(f"{operator} is in {kept} already; remove that to build it anew.")
        return
    kept.mkdir(parents=True, exist_ok=True)
    with scratch(kept, prefix=".building-") as work:
        os.environ["TORCH_EXTENSIONS_DIR"] = str(work)
        from deepspeed.accelerator import get_accelerator  # pyright: ignore

        accelerator: Any = get_accelerator()
        builder = accelerator.create_op_builder(_BUILDERS[operator])
        if operator == "async_io" and not builder.is_compatible():
            raise ConfigError(
                "the compiler finds no libaio.h or libaio.so. On Debian and Ubuntu: "
                "apt-get install libaio-dev"
            )
        builder.load(verbose=True)
        for name in NEEDED[operator]:
            # Within one file system, so that the cache has the whole operator or none.
            os.replace(Path(work, name, f"{name}.so"), _library(name))


def _library(name: str) -> Path:
    return directory() / f"{name}.so"


def _processor() -> str:
    """A short name of what the compiler may use of this processor, for it is told to use all."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(f"{platform.machine()} {flags}".encode()).hexdigest()[:12]


if __name__ == "__main__":
    try:
        for wanted in sys.argv[1:]:
            build(wanted)
    except ConfigError as error:
        sys.exit(str(error))
