"""Torch's elastic launcher on one node: ``python …/unipar/launch/node.py DIRECTORY OPTIONS``.

It is run as a file, for the same reason as ``worker.py``.
"""

import contextlib
import json
import os
import socket
import sys
import time
from pathlib import Path

NODE = Path(__file__)
_POLL = 0.2


def main() -> None:
    directory, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    # The directory of this file has modules with the names of others.
    del sys.path[0]
    if not directory.is_dir():
        sys.exit(
            f"{directory} is not there on {os.uname().nodename}. The run's directory has to be on "
            "a file system that all its machines share: set output_dir to such a place."
        )
    devices, node, restart = options["devices"], options["node"], options["restart"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // devices)))
    port = options["port"] or _agreed_port(directory / f"port-{restart}", node, options["timeout"])

    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        # Of its ways to meet, the one by which ranks are in the order of the hosts. It restarts
        # nothing by itself: all nodes are started again, by what follows them.
        torchrun(
            [
                *(f"--nnodes={options['nodes']}", f"--node-rank={node}"),
                *(f"--nproc-per-node={devices}", "--max-restarts=0", "--monitor-interval=0.1"),
                *(f"--master-addr={options['address']}", f"--master-port={port}"),
                f"--rdzv-conf=timeout={options['timeout']}",
                f"--log-dir={directory / f'torchrun-{restart}-{node}'}",
                # The interpreter's own options and the script are given as a command.
                "--no-python",
                *(sys.executable, "-u", str(NODE.with_name("worker.py")), str(directory)),
            ]
        )
    except ChildFailedError:
        # It has said which process failed; what failed in it stands in the run's directory.
        sys.exit(1)
    except DistError as error:
        meeting = f"{options['address']} at port {port}"
        if node == 0:
            sys.exit(
                f"Not all of {options['nodes']} hosts have come to {meeting} within "
                f"{options['timeout']} s: one has not started, or does not reach it."
            )
        sys.exit(f"This host does not reach the first one, {meeting}: {error}")


def _agreed_port(file: Path, node: int, patience: float) -> int:
    """A port that is free on the first node, which tells the others by a file."""
    if node == 0:
        with socket.socket() as listener:
            listener.bind(("", 0))
            port = listener.getsockname()[1]
        partial = file.with_suffix(".partial")
        partial.write_text(str(port))
        partial.replace(file)
        return port
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            return int(file.read_text())
        time.sleep(_POLL)
    sys.exit(f"The first host has not said within {patience} s at which port the processes meet.")


if __name__ == "__main__":
    main()
