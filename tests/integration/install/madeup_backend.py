"""A backend whose framework has to be built: in an environment of its own, off a local index."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import tarfile
from dataclasses import dataclass
from pathlib import Path

_SETUP = """
import os, sys
from setuptools import setup
if os.environ.get("MADEUP_SLEEP"):
    print("compiling for a long time", flush=True)
    import time; time.sleep(float(os.environ["MADEUP_SLEEP"]))
if os.environ.get("MADEUP_FAIL"):
    sys.exit("madeup.cpp:7: error: no torch was found")
setup(name="madeup", version="1.0", py_modules=["madeup"])
"""

_STRATEGY = """
import hashlib, os
from importlib import metadata
from importlib.util import find_spec
from unipar.install import Build, Edit, Pip, Program, Recipe
from unipar.strategy import Availability
from unipar_torch.ddp import DDPOptions, DDPStrategy


class MadeupOptions(DDPOptions):
    strategy = "madeup"


class MadeupStrategy(DDPStrategy):
    name = "madeup"
    options_type = MadeupOptions

    @classmethod
    def availability(cls):
        if find_spec("madeup") is None:
            return Availability(False, "madeup is not installed.", "unipar install madeup")
        return Availability(True)

    @classmethod
    def recipe(cls):
        return Recipe(
            name="madeup",
            framework="Madeup 1.0",
            steps=(
                Build(
                    distribution="madeup",
                    version="1.0",
                    sha256=os.environ.get("MADEUP_SHA256", {sha256!r}),
                    edits=(Edit("madeup.py", os.environ.get("MADEUP_OLD", "WORKS = False"),
                                "WORKS = True", "it does not work"),),
                    environment={{"MADEUP_FLAG": os.environ.get("MADEUP_FLAG", "0")}},
                ),
            ),
            programs=(Program((os.environ.get("MADEUP_PROGRAM", "sh"),), "dash"),),
            needs={{"numpy": os.environ["MADEUP_NUMPY"]}} if "MADEUP_NUMPY" in os.environ else {{}},
        )

    def prepare(self, spec, world):
        import madeup
        if not madeup.WORKS or os.environ.get("MADEUP_BROKEN"):
            raise RuntimeError("madeup was built wrongly")
        return super().prepare(spec, world)
"""


@dataclass(frozen=True)
class Home:
    """A virtual environment on top of this one, its cache, and its package index.

    Attributes:
        root: everything is in here.
    """

    root: Path

    @property
    def site(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.root / "env" / "lib" / version / "site-packages"

    @property
    def wheels(self) -> list[Path]:
        return list((self.root / "cache" / "unipar" / "wheels").glob("*/*.whl"))

    def environment(self, **variables: str) -> dict[str, str]:
        return {
            **os.environ,
            "XDG_CACHE_HOME": str(self.root / "cache"),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.root / "index"),
            **variables,
        }

    def command(self, *args: str) -> list[str]:
        return [str(self.root / "env/bin/python"), "-m", "unipar", *args]

    def unipar(self, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*args),
            env=self.environment(**variables),
            cwd=self.root,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=150,
        )


def make_home(root: Path) -> Home:
    home = Home(root)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / "env"], check=True)
    # Sees what this environment has, torch and pip among it; what is installed goes into its own.
    (home.site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    _outer_editables(home)
    sha256 = _sdist(root)
    (home.site / "unipar_madeup.py").write_text(_STRATEGY.format(sha256=sha256))
    info = home.site / "unipar_madeup-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: unipar-madeup\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(
        "[unipar.strategies]\nmadeup = unipar_madeup:MadeupStrategy\n"
    )
    return home


def _outer_editables(home: Home) -> None:
    """A .pth file is read in the environment's own directory only, so repeat what it says."""
    for file in Path(sysconfig.get_path("purelib")).glob("*.pth"):
        if not file.name.startswith("distutils"):
            (home.site / file.name).write_text(file.read_text())


def _sdist(root: Path) -> str:
    source = root / "madeup-1.0"
    source.mkdir()
    (source / "setup.py").write_text(_SETUP)
    (source / "madeup.py").write_text("WORKS = False\n")
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: madeup\nVersion: 1.0\n")
    archive = root / "index" / "madeup-1.0.tar.gz"
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(source, arcname="madeup-1.0")
    return hashlib.sha256(archive.read_bytes()).hexdigest()
