"""Importing Colossal-AI without two packages that it imports only for the names in them.

Colossal-AI 0.5.0 (colossalai/nn/optimizer/__init__.py, line 1) imports ``galore_torch`` for two
optimizers, and distributed_galore.py and galore.py beside it import a base class of
``bitsandbytes``, which is built for CUDA and large. No optimizer that unipar offers needs them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch.optim import Optimizer

_NAMES: dict[str, dict[str, Any]] = {
    "galore_torch": {"GaLoreAdafactor": Optimizer, "GaLoreAdamW": Optimizer},
    "bitsandbytes": {},
    "bitsandbytes.optim": {},
    "bitsandbytes.optim.optimizer": {"Optimizer2State": Optimizer},
}


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Let the missing ones of those packages be imported within the block, and only there.

    What has been imported in it keeps the names; ``find_spec`` afterwards says that the packages
    are missing, as other libraries want to know.
    """
    # It asks whether bitsandbytes is there when it is imported itself.
    import_module("peft")

    missing = [name for name in ("galore_torch", "bitsandbytes") if find_spec(name) is None]
    made: list[str] = []
    for name, members in _NAMES.items():
        if name.partition(".")[0] in missing:
            module = ModuleType(name)
            module.__spec__ = ModuleSpec(name, None, is_package=True)
            module.__path__ = []
            module.__dict__.update(members)
            sys.modules[name] = module
            made.append(name)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]
