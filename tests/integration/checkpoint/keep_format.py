"""Keep a checkpoint of the present format from each strategy, to be read for ever.

python tests/integration/checkpoint/keep_format.py ddp@2 fsdp@2 ddp@2!fp16 …

Run it once for a format, with every strategy that there is. What is kept is never written again:
``test_formats.py`` resumes each of them.
"""

from __future__ import annotations

import os
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from unipar.checkpoint.manifest import VERSION
from unipar.testing.pool import WorldPools
from unipar.testing.portability import Where, save_all

KEPT = Path(__file__).parent / "formats"


def keep(text: str, pools: WorldPools) -> Path:
    where, _, precision = text.partition("!")
    strategy, _, ranks = where.rpartition("@")
    place = Where(strategy, int(ranks))
    target = KEPT / f"{VERSION}-{text.replace(':', ',')}.tar.xz"
    with tempfile.TemporaryDirectory() as directory:
        how: Any = precision or "fp32"
        (path,) = save_all([place], pools, Path(directory), how).values()
        with tarfile.open(target, "x:xz") as archive:
            archive.add(path, "checkpoint")
    return target


if __name__ == "__main__":
    with_ranks = WorldPools()
    for asked in sys.argv[1:]:
        kept = keep(asked, with_ranks)
        print(f"{kept.name}: {kept.stat().st_size:,} bytes", flush=True)
    with_ranks.close()
