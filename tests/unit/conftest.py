"""What a test leaves in torch is taken back, for the next one runs in the same process."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _torch_is_its_own() -> Iterator[None]:
    yield
    # Importing the face of PyTorch or Horovod is enough for optimizers, modules and losses to be
    # seen from then on, as a script wants it; whoever looks up a name in one imports it.
    if "unipar.compat.adopting" in sys.modules:
        from unipar.compat import adopting

        adopting.stop()
