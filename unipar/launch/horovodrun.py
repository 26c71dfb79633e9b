"""Processes started by Horovod's ``horovodrun`` (with Gloo; with ``--mpi`` it calls mpirun)."""

from __future__ import annotations

import socket
import time
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from unipar.errors import ConfigError
from unipar.launch.environment import Environment
from unipar.world import Placement

_PATIENCE, _POLL = 60.0, 0.05


class Horovodrun(Environment):
    name = "horovodrun"
    prefixes = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_", "HOROVOD_CROSS_")

    def detect(self) -> bool:
        # One process has nobody to join, and may start workers of its own.
        return "HOROVOD_RANK" in self.variables and self.variables.get("HOROVOD_SIZE") != "1"

    def placement(self) -> Placement:
        if self.variables.get("HOROVOD_ELASTIC") == "1":
            raise ConfigError(
                "horovodrun was started elastic (--min-np, --max-np, --host-discovery-script), and "
                "only loops written for that can change their size. Start it with -np alone; or "
                "start the script by itself, and unipar.fit(devices=…, max_restarts=…) goes on "
                "from the last checkpoint when a rank is lost."
            )
        rank, size = self.number("HOROVOD_RANK"), self.number("HOROVOD_SIZE")
        self.below(rank, "HOROVOD_RANK", size, "HOROVOD_SIZE")
        local_rank = self.number("HOROVOD_LOCAL_RANK")
        local_size = self.number("HOROVOD_LOCAL_SIZE")
        self.below(local_rank, "HOROVOD_LOCAL_RANK", local_size, "HOROVOD_LOCAL_SIZE")
        return Placement(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            node_rank=self.number("HOROVOD_CROSS_RANK"),
            num_nodes=self.number("HOROVOD_CROSS_SIZE"),
            init_method=self.address() or f"tcp://{self._meet(rank)}",
        )

    def _meet(self, rank: int) -> str:
        """The host and port that rank 0 has chosen, told by way of horovodrun's own store."""
        host = self.text("HOROVOD_GLOO_RENDEZVOUS_ADDR")
        url = f"http://{host}:{self.number('HOROVOD_GLOO_RENDEZVOUS_PORT')}/unipar/meet"
        deadline = time.monotonic() + _PATIENCE
        try:
            while (chosen := _get(url)) is None:
                if rank == 0:
                    own = self.variables.get("HOROVOD_HOSTNAME") or "localhost"
                    _put(url, f"{own}:{_free_port()}")
                elif time.monotonic() > deadline:
                    raise ConfigError(
                        f"rank 0 has not said within {_PATIENCE:.0f} s where the {self.name} "
                        "processes meet: all of them have to run the same script."
                    )
                else:
                    time.sleep(_POLL)
        except URLError as error:
            raise ConfigError(
                f"the store of {self.name} at {url} does not answer ({error.reason}). "
                f"{self.remedy()}"
            ) from error
        return chosen


def _open(request: Request) -> bytes:
    # Past any proxy: the store is on one of the run's own machines.
    with build_opener(ProxyHandler({})).open(request, timeout=10) as response:
        return response.read()


def _get(url: str) -> str | None:
    try:
        return _open(Request(url)).decode()
    except HTTPError as error:
        if error.code != 404:
            raise
        return None


def _put(url: str, text: str) -> None:
    _open(Request(url, data=text.encode(), method="PUT"))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]
