"""Names that a face has not are said by a migration, and by the face when they are imported."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from unipar.compat.tables import NOT_KEPT
from unipar.migrate import migrate_source
from unipar.migrate.dialects import DIALECTS
from unipar.migrate.dialects.face import FaceDialect

MODULES = [
    (one, module) for one in DIALECTS if isinstance(one, FaceDialect) for module in one.modules
]


def notes(dialect: FaceDialect, module: str, name: str) -> list[str]:
    package = f"{dialect.package}.{module}".rstrip(".")
    migration = migrate_source(f"from {package} import {name}\n", dialect=dialect.name)
    return [note.why + note.todo for note in migration.notes]


@pytest.mark.parametrize(
    ("dialect", "module"), MODULES, ids=[f"{one.face}.{module}" for one, module in MODULES]
)
@pytest.mark.parametrize("name", ["_what_is_internal", "WhatIsNotThere"])
def test_a_name_that_is_not_there_is_said_by_migration_and_face_alike(
    dialect: FaceDialect, module: str, name: str
) -> None:
    face = importlib.import_module(f"{dialect.face}.{module}".rstrip("."))
    with pytest.raises(ImportError) as raised:
        exec(f"from {face.__name__} import {name}", {})
    said = str(raised.value).removeprefix(f"{face.__name__} has no {name}. ")
    assert notes(dialect, module, name) == [f"the face has no {name}.{said}"]
    assert not hasattr(face, "_repr_html_")


@pytest.mark.parametrize(
    ("dialect", "module"), MODULES, ids=[f"{one.face}.{module}" for one, module in MODULES]
)
def test_an_attribute_that_is_not_there_is_an_attribute_error_with_the_same_words(
    dialect: FaceDialect, module: str
) -> None:
    face = importlib.import_module(f"{dialect.face}.{module}".rstrip("."))
    assert not hasattr(face, "WhatIsNotThere")
    assert getattr(face, "WhatIsNotThere", None) is None
    with pytest.raises(AttributeError, match=f"{face.__name__} has no WhatIsNotThere. "):
        _ = face.WhatIsNotThere


def test_a_module_that_nothing_has_imported_yet_is_imported_by_its_name() -> None:
    code = "from unipar.compat.accelerate import local_sgd; print(local_sgd.LocalSGD.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["LocalSGD"]


def test_an_import_is_told_from_an_attribute_in_a_long_script() -> None:
    """The number of a name takes more than a byte where there are many before it."""
    many = "\n".join(f"name_{number} = {number}" for number in range(300))
    with pytest.raises(ImportError, match="has no WhatIsNotThere"):
        exec(f"{many}\nfrom unipar.compat.accelerate.state import WhatIsNotThere", {})
    with pytest.raises(AttributeError, match="has no WhatIsNotThere"):
        exec(f"{many}\nimport unipar.compat.accelerate as a\na.state.WhatIsNotThere", {})


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("from lightning_fabric.wrappers import _unwrap_objects, is_wrapped", True),
        ("from lightning.fabric.wrappers import _unwrap_objects", True),
        ("from lightning.fabric.wrappers import _unwrap_compiled", False),
        ("from accelerate.logging import get_logger", True),
        ("from accelerate.launchers import notebook_launcher", True),
        ("from accelerate.state import is_initialized", True),
        ("from lightning.fabric.utilities.throughput import ThroughputMonitor", True),
        ("from accelerate.state import ThreadLocalSharedDict", False),
        ("from accelerate.utils.memory import find_executable_batch_size", True),
        ("from accelerate.utils.other import _get_named_modules", False),
        ("from deepspeed.runtime.activation_checkpointing import checkpointing", True),
        ("from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint", True),
    ],
)
def test_a_migrated_import_works_or_is_refused(line: str, kept: bool) -> None:
    migration = migrate_source(f"{line}\n")
    assert migration.changed is kept
    if kept:
        exec(migration.code, {})
    else:
        assert [note.todo for note in migration.notes] == [NOT_KEPT]
