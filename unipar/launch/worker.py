"""The first lines that a worker process runs: ``python …/unipar/launch/worker.py RUN_DIRECTORY``.

It is run as a file, not as a module: ``python -m`` would import ``unipar`` and ``torch`` with the
working directory first on the search path, where a stray ``torch/`` would win over the real one.
Nothing outside the standard library may be imported before the caller's search path is in place.
"""

import gc
import json
import os
import signal
import sys


def main() -> None:
    # Until the worker's function runs, an interrupt ends it without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    directory = sys.argv[1]
    with open(os.path.join(directory, "start.json"), encoding="utf-8") as file:
        start = json.load(file)
    if start["save_signal"] and signal.getsignal(start["save_signal"]) is signal.SIG_DFL:
        # Nothing is there yet that could be saved, and it is no reason to end.
        signal.signal(start["save_signal"], lambda *_: None)
    if os.environ["RANK"] != "0":
        # The agent has opened the log as stderr; sharing its descriptor keeps the lines in order.
        os.dup2(2, 1)
    sys.path[:] = start["path"]
    sys.argv[:] = start["argv"]
    for name, value in start["environ"].items():
        os.environ.setdefault(name, value)

    from unipar.utils.garbage_collection import no_collection

    with no_collection():
        from unipar.launch.entry import serve

        # Nothing is here yet that could become garbage.
        gc.freeze()
    serve(directory, start)


if __name__ == "__main__":
    main()
