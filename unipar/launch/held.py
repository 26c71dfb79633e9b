"""A command that ends when standard input does: ``python …/unipar/launch/held.py COMMAND``.

An ssh that is killed, or whose host is gone, closes the standard input of what it has started; so
does a process that ends, whichever way. Nothing goes on then whose run nobody follows any more.

It is run as a file, for the same reason as ``worker.py``.
"""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

HELD = Path(__file__)


def main() -> None:
    # The directory of this file has modules with the names of others.
    del sys.path[0]
    threading.Thread(target=_end_with_input, daemon=True).start()
    code = subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL)
    sys.exit(code if code >= 0 else 128 - code)


def _end_with_input() -> None:
    while os.read(0, 1024):
        pass
    import psutil

    # By their parents, for launchers let the processes that they start lead sessions of their own.
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1.0)
    os._exit(1)


if __name__ == "__main__":
    main()
