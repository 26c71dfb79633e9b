"""Put the wheels into a folder that a machine without network needs beside its torch.

python measure/gpu/wheels.py wheels-gpu --python 3.12

They are unipar itself and its backends that need nothing compiled, and, in the versions of
constraints.txt, what those need but torch, pytest, and torchao for fp8. What torch brings itself is
left to it. Run it in the environment of `make test`, whose packages say what they need.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = ("accelerate", "deepspeed")
WANTED = ("unipar[fp8,migrate]", *BACKENDS, "pytest", "pytest-timeout")
# Published as sources alone.
SOURCES = {"deepspeed"}
# Beside torch already; another of these could break it.
TORCHS_OWN = {"torch", "numpy"}
LIMIT = 64 * 2**20
"""Bytes: what can be taken along to a lent machine is often no more."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of the machine with the GPU")
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    versions = needed(args.python)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    # glibc 2.28 and its predecessors, newest first; pip takes a tag as it is written.
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17)]
    subprocess.run(
        [
            *(*pip, "download", "--no-deps", "--only-binary=:all:", "--implementation=cp"),
            *(f"--python-version={args.python}", *platforms, f"--dest={args.folder}"),
            "--platform=manylinux2014_x86_64",
            *(f"{name}=={version}" for name, version in versions.items() if name not in SOURCES),
        ],
        check=True,
    )
    wheel = [*pip, "wheel", "--no-deps", f"--wheel-dir={args.folder}"]
    packages = (ROOT, *(ROOT / "backends" / name for name in BACKENDS))
    subprocess.run([*wheel, *map(str, packages)], check=True)
    subprocess.run(
        [*wheel, "--no-build-isolation", *(f"{name}=={versions[name]}" for name in SOURCES)],
        # Its kernels are compiled where they are used.
        env={**os.environ, "DS_BUILD_OPS": "0"},
        check=True,
    )
    size = sum(file.stat().st_size for file in args.folder.iterdir())
    if size > LIMIT:
        raise SystemExit(f"{args.folder} has {size / 2**20:.0f} MiB, and may have {LIMIT >> 20}")
    count = len(list(args.folder.iterdir()))
    print(f"{count} wheels for Python {args.python}, {size / 2**20:.1f} MiB, in {args.folder}")
    return 0


def needed(python: str) -> dict[str, str]:
    """The versions of all that has to be there for unipar beside torch, under this Python."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    pins = _pins(environment)
    names = sorted(set(_closure(WANTED, environment)) - {"unipar"})
    unpinned = [name for name in names if name not in pins]
    if unpinned:
        raise SystemExit(f"constraints.txt has no version of {', '.join(unpinned)} for this Python")
    return {name: pins[name] for name in names}


def _closure(wanted: tuple[str, ...], environment: dict[str, str]) -> Iterator[str]:
    """The names of distributions and of all that they need, but for torch's own."""
    waiting, seen = [Requirement(text) for text in wanted], set()
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        if name in TORCHS_OWN or (name, *sorted(one.extras)) in seen:
            continue
        seen.add((name, *sorted(one.extras)))
        yield name
        for text in metadata.requires(name) or []:
            needed = Requirement(text)
            extras = one.extras or {""}
            if needed.marker is None or any(
                needed.marker.evaluate({**environment, "extra": extra}) for extra in extras
            ):
                waiting.append(needed)


def _pins(environment: dict[str, str]) -> dict[str, str]:
    """The versions of constraints.txt for that Python."""
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not re.match(r"[A-Za-z]", line):
            continue
        pin = Requirement(line)
        if pin.marker is None or pin.marker.evaluate({**environment, "extra": ""}):
            pins[canonicalize_name(pin.name)] = str(pin.specifier).removeprefix("==")
    return pins


if __name__ == "__main__":
    sys.exit(main())
