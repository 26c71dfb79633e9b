"""Make an environment beside an existing torch, from a folder of wheels and without network.

python3 measure/gpu/environment.py .venv-gpu wheels-gpu

Run it with the Python that has torch. Nothing of it is changed: the environment is one of its own,
which sees that Python's packages behind its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import venv
from importlib.util import find_spec
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("environment", type=Path)
    parser.add_argument("wheels", type=Path)
    parser.add_argument("--no-gpu", action="store_true", help="to try it where there is none")
    args = parser.parse_args()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if find_spec("torch") is None:
        return _refuse(
            f"{sys.executable} has no torch. Name the Python that has: make test-gpu PYTHON=…"
        )
    import torch

    if not (torch.cuda.is_available() or args.no_gpu):
        return _refuse(
            f"torch {torch.__version__} sees no GPU here. This needs a machine with an NVIDIA GPU "
            "and a CUDA build of torch 2.8 to 2.15; docs/gpu.md says how to get there."
        )
    wheels = sorted(args.wheels.glob("*.whl"))
    if not wheels:
        return _refuse(
            f"there are no wheels in {args.wheels}. Where there is a network: "
            f"make wheels-gpu GPU_PYTHON={version}; then take the folder along."
        )
    venv.create(args.environment, clear=True, symlinks=True)
    base = {name: str(args.environment.resolve()) for name in ("base", "platbase")}
    site = Path(sysconfig.get_path("purelib", "posix_prefix", base))
    # Not --system-site-packages: this Python may itself be one of a virtual environment, whose
    # packages are not the system's.
    outer = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "beside.pth").write_text("".join(f"{path}\n" for path in outer))
    # Pip of the Python that has torch, into the environment: that one has none of its own.
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"),
            *("--no-index", "--no-deps", "--ignore-installed", "--target", str(site)),
            *map(str, wheels),
        ]
    )
    if done.returncode:
        return _refuse(f"the wheels of {args.wheels} are not all for Python {version}: see above.")
    return 0


def _refuse(why: str) -> int:
    print(why, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
