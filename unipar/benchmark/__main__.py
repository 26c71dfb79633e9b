"""What forks the trials of a benchmark: see :mod:`unipar.benchmark.server`."""

import gc
import socket
import sys

from unipar.utils.garbage_collection import no_collection

with no_collection():
    import torch
    import torch._dynamo  # The first optimizer of a process imports it, in half of torch's time.

    import unipar.benchmark.trial
    import unipar.launch.preload  # noqa: F401
    from unipar.benchmark.server import serve

    # A collection in a trial would copy the pages that it shares with the others.
    gc.freeze()

# No process that is forked from here could use CUDA.
assert not torch.cuda.is_initialized()

serve(socket.socket(fileno=int(sys.argv[1])))
