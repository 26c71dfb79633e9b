"""One process of a :class:`unipar.testing.pool.WorkerPool`: ``python -m unipar.testing``."""

from unipar.garbage import no_collection

with no_collection():
    from unipar.testing.worker import main

main()
