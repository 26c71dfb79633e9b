"""The meeting point of the workers of one machine."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

LOOPBACK = "127.0.0.1"


class LoopbackRendezvous(RendezvousHandler):
    """A meeting point for the workers of one machine, on a free port of the loopback interface.

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
        listener.bind((LOOPBACK, 0))
        listener.listen(socket.SOMAXCONN)
        port = listener.getsockname()[1]
        store = TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listener.detach(),
        )
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """There is no other machine to tell."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True
