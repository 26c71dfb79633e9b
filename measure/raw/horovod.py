"""Horovod by hand."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from measure.raw import common


@contextlib.contextmanager
def meeting_point() -> Iterator[None]:
    """What ``horovodrun`` does for its processes, for those that ``torchrun`` has started."""
    from horovod.runner.http.http_server import (  # pyright: ignore[reportMissingImports]
        RendezvousHandler,
        RendezvousHTTPServer,
    )

    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, int(size), rank == "0", multi_tenant=True)
    server = RendezvousHTTPServer((host, 0), RendezvousHandler, 0) if rank == "0" else None
    if server is not None:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        store.set("horovod", str(server.server_port))
    os.environ.update(
        HOROVOD_RANK=rank,
        HOROVOD_SIZE=size,
        HOROVOD_LOCAL_RANK=rank,
        HOROVOD_LOCAL_SIZE=size,
        HOROVOD_CROSS_RANK="0",
        HOROVOD_CROSS_SIZE="1",
        HOROVOD_HOSTNAME="localhost",
        HOROVOD_CONTROLLER="gloo",
        HOROVOD_CPU_OPERATIONS="gloo",
        HOROVOD_GLOO_IFACE="lo",
        HOROVOD_GLOO_RENDEZVOUS_ADDR=host,
        HOROVOD_GLOO_RENDEZVOUS_PORT=store.get("horovod").decode(),
    )
    yield
    if server is not None:
        server.shutdown()


def train(job: Mapping[str, Any]) -> None:
    """Train the job on all ranks."""
    import horovod.torch as hvd  # pyright: ignore[reportMissingImports]

    with meeting_point():
        hvd.init()
        loop(job, hvd)
        hvd.shutdown()


def loop(job: Mapping[str, Any], hvd: Any) -> None:
    """The loop as Horovod's documentation has it, with clipping."""
    model = job["model"].to(job["device"])
    optimizer = hvd.DistributedOptimizer(
        job["optimizer"](model.named_parameters()),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=len(job["batches"][0]),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    scheduler = job["lr_scheduler"](optimizer) if job["lr_scheduler"] else None
    for batches in common.steps(job):
        optimizer.zero_grad()
        total = torch.zeros((), device=job["device"])
        for batch in batches:
            with common.autocast(job):
                loss = job["loss"](model, batch) / len(batches)
            loss.backward()
            total += loss.detach()
        optimizer.synchronize()
        if job["max_grad_norm"] is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job["max_grad_norm"])
        with optimizer.skip_synchronize():
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
        job["record"](hvd.allreduce(total, name="loss").item())
