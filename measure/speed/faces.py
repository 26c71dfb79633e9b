"""Measure each face beside the framework that it stands for, in turns: ``make bench-faces``.

The same script runs under the framework, and as ``unipar migrate`` changes it under the face with
the strategy that the script asks for. The figures go to docs/migrate/faces.json.

python measure/speed/faces.py --quick    a few turns of each, to see that it runs
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

# Before torch is imported: threads of its own would compete with the other processes.
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from measure.frameworks import FRAMEWORKS  # noqa: E402

DOCS = ROOT / "docs" / "migrate" / "faces.json"
