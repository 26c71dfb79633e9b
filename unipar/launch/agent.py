"""Torch's elastic agent, told how this library's workers start, fail and stop."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from unipar.launch.rundir import RunDir

_LOOPBACK = "127.0.0.1"


class LoopbackRendezvous(RendezvousHandler):
    """A meeting point for the workers of one node, on a free port of the loopback interface.

    Torch's own dynamic rendezvous listens on every interface and resolves the host's name, which
    takes seconds where name service is slow.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def get_backend(self) -> str:
        return "loopback"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        # A store per attempt: a restarted group must not meet the keys of the one that failed.
        listener = socket.socket()
        listener.bind((_LOOPBACK, 0))
        listener.listen(socket.SOMAXCONN)
        port = listener.getsockname()[1]
        store = TCPStore(
            _LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listener.detach(),
        )
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_LOOPBACK, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """There is no other node to tell."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


class WorkerLogs(LogsSpecs):
    """Rank 0 writes to the terminal itself; the others to a file each."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(log_dir=str(run.root))
        self._run = run

    @property
    def root_log_dir(self) -> str:
        return str(self._run.root)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        attempt = self._run.attempt(int(envs[0]["TORCHELASTIC_RESTART_COUNT"]))
        attempt.directory.mkdir()
        ranks = range(len(envs))
        # Stdout joins stderr in the worker: two descriptors of one file would overwrite each other.
        return LogsDest(
            stdouts={rank: os.devnull if rank else "" for rank in ranks},
            stderrs={rank: str(attempt.log(rank)) if rank else "" for rank in ranks},
            error_files={rank: str(attempt.directory / "unused") for rank in ranks},
        )


class Agent(LocalElasticAgent):
    pass


WORKER = Path(__file__).with_name("worker.py")
