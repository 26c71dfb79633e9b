"""A face has the version of the framework whose names and rules it keeps, as scripts ask for it."""

from __future__ import annotations

import importlib
import re
from importlib import metadata

import pytest

from unipar.migrate import migrate_source

FACES = {
    "accelerate": "accelerate", "deepspeed": "deepspeed", "horovod": "horovod",
    "fabric": "lightning-fabric", "lightning": "lightning-fabric",
}  # fmt: skip


@pytest.mark.parametrize("face", FACES)
def test_it_is_the_installed_frameworks(face: str) -> None:
    pytest.importorskip(FACES[face].replace("-", "_"))
    module = importlib.import_module(f"unipar.compat.{face}")
    assert module.__version__ == metadata.version(FACES[face]).partition("+")[0]


@pytest.mark.parametrize("face", [*FACES, "colossalai"])
def test_it_can_be_imported_and_compared(face: str) -> None:
    found: dict[str, str] = {}
    exec(f"from unipar.compat.{face} import __version__", found)
    assert re.fullmatch(r"\d+\.\d+\.\d+", found["__version__"])


@pytest.mark.parametrize(
    "lines",
    [
        "import accelerate\naccelerator = accelerate.Accelerator()\nv = accelerate.__version__\n",
        "from accelerate import Accelerator, __version__\naccelerator = Accelerator()\n",
        "import lightning as L\nfabric = L.Fabric()\nv = L.__version__\n",
        "from lightning.fabric import Fabric, __version__\nfabric = Fabric()\n",
        "import lightning_fabric as lf\nfabric = lf.Fabric()\nv = lf.__version__\n",
        "import colossalai\ncolossalai.launch_from_torch()\nv = colossalai.__version__\n",
    ],
)
def test_a_script_that_asks_for_it_migrates(lines: str) -> None:
    migration = migrate_source(lines)
    assert migration.changed
    assert not migration.notes
