"""What forks the trials of a benchmark: see :mod:`unipar.benchmark.server`."""

import gc
import socket
import sys

from unipar.garbage import no_collection

with no_collection():
    import unipar.benchmark.trial  # noqa: F401
    from unipar.benchmark.server import serve

    # A collection in a trial would copy the pages that it shares with the others.
    gc.freeze()

serve(socket.socket(fileno=int(sys.argv[1])))
