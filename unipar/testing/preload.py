"""What the workers of a pool have in common: imported once, by the process they are forked from."""

import gc
import importlib
import os
import warnings

from unipar.utils.garbage_collection import no_collection

VARIABLE = "_UNIPAR_TESTING_PRELOAD"
"""Names a function, as ``module:function``, that imports what more a suite of tests shares.
No setting of a run, as a name without the underscore would be."""

warnings.simplefilter("ignore")
with no_collection():
    import torch._dynamo
    import torch.distributed.fsdp  # noqa: F401

    import unipar.testing.harness
    import unipar.testing.worker  # noqa: F401

    if VARIABLE in os.environ:
        module, _, function = os.environ[VARIABLE].partition(":")
        getattr(importlib.import_module(module), function)()
    # A collection in a worker would copy the pages that it shares with the others.
    gc.freeze()
