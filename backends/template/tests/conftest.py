"""The backend as if it were installed, for these tests and the processes that they start alone.

So it is not in the environment, where it would be one more of everybody's strategies. What is
copied from here needs none of this: its tests begin by ``pip install -e .``.
"""

from __future__ import annotations

import atexit
import sys
import tempfile
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

_HERE = Path(__file__).resolve().parent.parent
_SITE = tempfile.TemporaryDirectory(prefix="unipar-template-")
atexit.register(_SITE.cleanup)


def _install(site: Path) -> None:
    project = tomllib.loads((_HERE / "pyproject.toml").read_text())["project"]
    name, version = project["name"], project["version"]
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{point} = {value}" for point, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    # Worker processes are told the path of the tests.
    sys.path[:0] = [str(_HERE), str(site)]


_install(Path(_SITE.name))
