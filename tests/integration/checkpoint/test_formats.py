"""Checkpoints of every format that there has been, from every strategy, are resumed for ever."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
from keep_format import KEPT, VERSION

from unipar.testing.pool import WorldPools
from unipar.testing.portability import HALF, bound, difference, resume_each

pytestmark = pytest.mark.slow

# What a plain loop has given when they were saved. They are numbers, and not the plain loop, so
# that an order of data or a model of the tests that is another today is seen.
LOSSES = [
    *(1.713487148, 1.035291195, 1.143912435, 1.493363142, 0.614828646),
    *(1.096832514, 0.648250282, 0.667081356, 0.771837473, 0.449275821),
]
# Python 3.11.4 is the first that has it, and 3.14 the first that needs no telling.
SAFELY: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
KINDS = sorted({path.name.removesuffix(".tar.xz").partition("!")[2] for path in KEPT.iterdir()})


def test_the_present_format_is_kept() -> None:
    assert list(KEPT.glob(f"{VERSION}-*"))


@pytest.mark.parametrize("precision", KINDS, ids=lambda kind: kind or "fp32")
def test_goes_on_where_it_was_saved(precision: str, tmp_path: Path, world_pool: WorldPools) -> None:
    paths = {}
    for number, archive in enumerate(sorted(KEPT.glob("*.tar.xz"))):
        if archive.name.removesuffix(".tar.xz").partition("!")[2] == precision:
            with tarfile.open(archive) as opened:
                opened.extractall(tmp_path / str(number), **SAFELY)
            paths[archive.name] = tmp_path / str(number) / "checkpoint"
    kind: Any = precision or "fp32"
    (runs,) = world_pool(1).run(resume_each, "single", list(paths.values()), True, kind)
    for name, (step, losses) in zip(paths, runs, strict=True):
        assert step == HALF, name
        assert difference(losses, LOSSES) <= bound(kind), name
