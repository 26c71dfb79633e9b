"""What a worker of Ray Train does on its node: start the node's ranks, and end with them.

Ray's workers get it by value, so that they need neither unipar nor torch: the ranks are processes
of the interpreter that the run names, and say themselves what differs there. Hence nothing is
imported here but the standard library and, in functions, Ray.
"""

# Ray is not in the environment in which types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

_POLL, _ROUND = 0.1, 1.0
# How long the other ranks have to leave word of what they failed by, once one has failed.
_SETTLE = 6.0
# The ranks have agreed to end, by SIGHUP, SIGINT or SIGTERM.
_ASKED = (128 + signal.SIGHUP, 128 + signal.SIGINT, 128 + signal.SIGTERM)
_LAST_LINES = 15


def run_node(config: dict[str, Any]) -> None:
    """Run one start of the group's ranks that stand on this node.

    Args:
        config: ``directory`` of the run, ``command`` of a process, ``devices`` of a node,
            ``cpus`` of a process, and ``sizes``: the numbers of ranks that a run can be on whose
            number may change, one on each worker; those that are left over are spares.

    Raises:
        RuntimeError: a rank has failed; Ray starts the group again, or gives up.
    """
    from ray import train

    context = train.get_context()
    node, nodes = context.get_world_rank(), context.get_world_size()
    directory = Path(config["directory"])
    meeting = _from_first(_begin(directory, nodes) if node == 0 else None, nodes)
    if meeting is None:
        return
    address, port, restart = meeting
    training = max((one for one in config["sizes"] if one <= nodes), default=nodes)
    first, size = node * config["devices"], training * config["devices"]
    here = config["devices"] if node < training else 0
    log = directory / f"output-{restart}-{node}.log"
    ending = directory / f"ending-{restart}-{node}.txt"
    attempt = directory / f"attempt-{restart}"
    _tell_place(directory / f"place-{restart}-{node}.json", range(first, first + here))
    ranks: dict[int, subprocess.Popen[bytes]] = {}
    over = threading.Event()
    try:
        with log.open("wb") as output:
            for local in range(here):
                variables = {
                    "RANK": first + local,
                    "WORLD_SIZE": size,
                    "LOCAL_RANK": local,
                    "LOCAL_WORLD_SIZE": config["devices"],
                    "GROUP_RANK": node,
                    "GROUP_WORLD_SIZE": training,
                    "MASTER_ADDR": address,
                    "MASTER_PORT": port,
                    "TORCHELASTIC_RESTART_COUNT": restart,
                    # Ray counts those of all ranks of the node.
                    "OMP_NUM_THREADS": config["cpus"],
                    "UNIPAR_PARENT": os.getpid(),
                }
                ranks[first + local] = subprocess.Popen(
                    config["command"],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, **{name: str(value) for name, value in variables.items()}},
                )
        noting = (ranks, attempt, ending, over)
        threading.Thread(target=_note_failure, args=noting, daemon=True).start()
        _watch(ranks, attempt, node, nodes, train.report)
    except Exception as error:
        if ranks:
            _settle(attempt, size, ranks)
        text = f"on {socket.gethostname()}, {error}{_last_lines(log)}"
        ending.write_text(text)
        raise RuntimeError(text) from error
    finally:
        over.set()
        for process in ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _begin(directory: Path, nodes: int) -> tuple[str, int, int] | None:
    """Where the ranks of this start meet, and its number; ``None`` if there is not to be one.

    What has started the run decides, for it knows whether the start before failed by something that
    another one would meet again, or was asked to end.
    """
    import ray

    if not directory.is_dir():
        raise RuntimeError(
            f"{directory} is not there on {socket.gethostname()}. The run's directory has to be on "
            "a file system that all nodes share: set output_dir to such a place."
        )
    number = 0
    while (asked := directory / f"begin-{number}").exists():
        number += 1
    partial = asked.with_suffix(".partial")
    partial.write_text(str(nodes))
    partial.replace(asked)
    while not (directory / "stop").exists():
        # It may be only half written.
        with contextlib.suppress(ValueError):
            if json.loads((directory / "start.json").read_text())["restart"] >= number:
                with socket.socket() as probe:
                    probe.bind(("", 0))
                    return ray.util.get_node_ip_address(), probe.getsockname()[1], number
        time.sleep(_POLL)
    return None


def _tell_place(path: Path, ranks: range) -> None:
    """Write where ranks are, so that they can be named when their node is lost."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps([node, socket.gethostname(), [*ranks]]))
    partial.replace(path)


def _watch(
    ranks: dict[int, subprocess.Popen[bytes]],
    attempt: Path,
    node: int,
    nodes: int,
    report: Any,
) -> None:
    """Wait until all ranks of the run have ended, and tell Ray what the run reports meanwhile.

    Ray takes a report when all its workers make it, so the first one says when that is.
    """
    told, over = "", False
    while not over:
        ended = _ended(ranks, attempt, time.monotonic() + _ROUND)
        text = _reported(attempt.parent) if node == 0 else ""
        reports, over = _from_first((text != told, ended), nodes)
        told = text
        if reports:
            report(json.loads(text) if text else {})
    while not _ended(ranks, attempt, time.monotonic() + _ROUND):
        pass


def _ended(ranks: dict[int, subprocess.Popen[bytes]], attempt: Path, deadline: float) -> bool:
    """Whether all of the node's ranks have ended until then.

    Raises:
        RuntimeError: one of them has failed, or the run was canceled.
    """
    while True:
        codes = {rank: process.poll() for rank, process in ranks.items()}
        if (attempt.parent / "stop").exists():
            raise RuntimeError("the run was canceled")
        for rank, code in codes.items():
            if code is not None and _has_failed(rank, code, attempt):
                raise RuntimeError(f"rank {rank} {_described(code)}")
        if None not in codes.values():
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)


def _note_failure(
    ranks: dict[int, subprocess.Popen[bytes]],
    attempt: Path,
    ending: Path,
    over: threading.Event,
) -> None:
    """Note the first rank of the node that fails, unless that is noted already.

    The worker may be waiting for the other nodes' then, where Ray ends it.
    """
    while not over.wait(_POLL):
        for rank, process in ranks.items():
            code = process.poll()
            if code is not None and _has_failed(rank, code, attempt) and not over.is_set():
                with contextlib.suppress(FileExistsError), ending.open("x") as file:
                    file.write(f"on {socket.gethostname()}, rank {rank} {_described(code)}")
                return


def _has_failed(rank: int, code: int, attempt: Path) -> bool:
    """Whether a rank that has ended should not have; whoever leaves in good order leaves word."""
    if code == 0:
        return not any((attempt / f"rank-{rank}{end}").exists() for end in (".returned", ".json"))
    return code not in _ASKED


def _described(code: int) -> str:
    if code == 0:
        return "exited with status 0 before its function had returned"
    if code > 0:
        return f"exited with status {code}"
    return f"was killed by {signal.Signals(-code).name}"


def _settle(attempt: Path, size: int, ranks: dict[int, subprocess.Popen[bytes]]) -> None:
    """Wait until every rank has left word or ended here, for what Ray ends cannot say why."""
    deadline = time.monotonic() + _SETTLE
    while time.monotonic() < deadline and not (attempt.parent / "stop").exists():
        silent = [
            rank
            for rank in range(size)
            if not (attempt / f"rank-{rank}.json").exists()
            and not (attempt / f"rank-{rank}.returned").exists()
            and not (rank in ranks and ranks[rank].poll() is not None)
        ]
        if not silent:
            return
        time.sleep(_POLL)


def _reported(directory: Path) -> str:
    try:
        return (directory / "report.json").read_text()
    except FileNotFoundError:
        return ""


def _last_lines(log: Path) -> str:
    if not log.exists():
        return ""
    lines = log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
    return "".join(f"\n  {line}" for line in lines)


def _from_first(value: Any, nodes: int) -> Any:
    from ray.train import collective

    return collective.broadcast_from_rank_zero(value) if nodes > 1 else value
