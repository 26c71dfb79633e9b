"""One trial, in a process of its own: ``python -m unipar.benchmark JOB DIRECTORY``."""

from unipar.garbage import no_collection

with no_collection():
    from unipar.benchmark.trial import main

main()
