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
from importlib import metadata
from pathlib import Path

WORKER = Path(__file__)


def own_versions() -> dict[str, str]:
    """The versions by which a function and what it uses are understood elsewhere."""
    python = ".".join(map(str, sys.version_info[:2]))
    return {"Python": python, **{name: metadata.version(name) for name in ("torch", "unipar")}}


def main() -> None:
    # Until the worker's function runs, an interrupt ends it without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Ray starts all its processes with it blocked, and what they start inherits that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    directory = sys.argv[1]
    start = _read(os.path.join(directory, "start.json"))
    if start["save_signal"] and signal.getsignal(start["save_signal"]) is signal.SIG_DFL:
        # Nothing is there yet that could be saved, and it is no reason to end.
        signal.signal(start["save_signal"], lambda *_: None)
    if start["parent"] is None:
        os.chdir(start["cwd"])
    elif os.environ["RANK"] != "0":
        # The agent has opened the log as stderr; sharing its descriptor keeps the lines in order.
        os.dup2(2, 1)
    # An interpreter elsewhere has packages of its own; the first place is that of this file.
    sys.path[:] = start["path"] + (sys.path[1:] if start["parent"] is None else [])
    sys.argv[:] = start["argv"]
    for name, value in start["environ"].items():
        os.environ.setdefault(name, value)
    if start["parent"] is None:
        _compare(start["versions"])

    from unipar.utils.garbage_collection import no_collection

    with no_collection():
        from unipar.launch.entry import serve

        # Nothing is here yet that could become garbage.
        gc.freeze()
    serve(directory, start)


def _read(file: str) -> dict:
    try:
        with open(file, encoding="utf-8") as opened:
            return json.load(opened)
    except FileNotFoundError:
        sys.exit(
            f"{file} is not there on {os.uname().nodename}. The run's directory has to be on a "
            "file system that all its machines share: set output_dir to such a place."
        )


def _compare(versions: dict[str, str]) -> None:
    here = own_versions()
    differing = [f"{n} {here[n]}, not {v}" for n, v in versions.items() if here[n] != v]
    if differing:
        sys.exit(
            f"{os.uname().nodename} has {', '.join(differing)}, as where the run was started: "
            "functions and checkpoints travel between equal versions. Install the same ones, or "
            "name the interpreter of an environment that has them in the launcher's options."
        )


if __name__ == "__main__":
    main()
