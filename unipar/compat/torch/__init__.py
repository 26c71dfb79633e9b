"""PyTorch's face: ``import unipar.compat.torch as torch``, and nothing else changes.

All names are PyTorch's own but those of ``unipar.compat.torch_names``, which hand training to the
run's strategy. What the script builds and calls otherwise, optimizers, modules and losses, is seen
where it is called (``unipar.compat.adopting``).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from unipar.compat.native import mirror as _mirror
from unipar.compat.native.calls import (  # noqa: F401
    load_state,
    load_whole_state_dict,
    save_state,
    whole_state_dict,
)

_mirror.fill(sys.modules[__name__], "torch")

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
