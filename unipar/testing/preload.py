"""What the workers of a pool have in common: imported once, by the process they are forked from."""

import gc
import importlib
import os
import warnings

from unipar.testing import PRELOAD
from unipar.utils.garbage_collection import no_collection

warnings.simplefilter("ignore")
with no_collection():
    # Whatever compiles imports it, as DeepSpeed's optimizers do: two seconds on each rank.
    import torch._inductor.compile_fx
    import torch.distributed.fsdp  # noqa: F401

    import unipar.testing.harness
    import unipar.testing.worker  # noqa: F401

    if PRELOAD in os.environ:
        module, _, function = os.environ[PRELOAD].partition(":")
        getattr(importlib.import_module(module), function)()
    # A collection in a worker would copy the pages that it shares with the others.
    gc.freeze()
