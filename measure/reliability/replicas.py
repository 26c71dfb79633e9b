"""A small job that loses and regains a replica, under one system: python replicas.py HERE.

``HERE/question.json`` names the system. unipar aside, the loops are by hand, as that system's own
examples have them. Rank 0 writes down each step and when it ended. The processes are started by
``measure/reliability/beside.py``, which takes replicas and gives them.
"""

# Neither Ray nor torchft is in the environment in which types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import unipar
from measure.reliability import elastic

BATCH, SAMPLES = 32, 512
LR = 1e-4


def make() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The model, and the samples, which every system takes in this order."""
    torch.manual_seed(0)
    return elastic.model(), torch.randn(SAMPLES, 32), torch.randint(0, 4, (SAMPLES,))


class Diary:
    """Each step, when it ended, what this process has taken of a core, and on how many ranks."""

    def __init__(self, here: Path) -> None:
        self._file = (here / "diary.jsonl").open("a")

    def step(self, step: int, ranks: int, loss: float | None) -> None:
        row = {"step": step, "ranks": ranks, "loss": loss, "cpu": time.process_time()}
        self._file.write(json.dumps({"time": time.time(), **row}) + "\n")
        self._file.flush()


class Watched(unipar.Callback):
    """The same under unipar; every rank says which process it is."""

    every_rank = True

    def __init__(self, here: Path) -> None:
        self.here, self.diary = here, None

    def on_run_start(self, run: Any) -> None:
        (self.here / f"pid-{run.rank}").write_text(str(os.getpid()))
        self.diary = Diary(self.here) if run.rank == 0 else None

    def on_step_end(self, run: Any, record: Any) -> None:
        if self.diary is not None:
            self.diary.step(record.step, run.world_size, record.loss)


def with_unipar(question: dict[str, Any], here: Path) -> None:
    model, x, y = make()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(question["pace"])
        return cross_entropy(model(batch[0]), batch[1])

    unipar.fit(
        model,
        (x, y),
        loss=loss,
        optimizer={"name": "adamw", "lr": LR},
        strategy="ddp",
        device="cpu",
        devices=question["devices"],
        global_batch_size=BATCH,
        shuffle=False,
        steps=question["steps"],
        output_dir=here / "run",
        checkpoint={"every_steps": question["every"]} if question["every"] else False,
        callbacks=[Watched(here)],
        log_level="warning",
        progress=False,
    )


def by_hand(question: dict[str, Any], here: Path) -> None:
    """PyTorch's DDP; begins where its newest checkpoint ends. Joins the group that there is."""
    model, x, y = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    saved, step = here / "checkpoint.pt", 0
    if question["every"] and saved.exists():
        state = torch.load(saved)
        step = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    rank, size = dist.get_rank(), dist.get_world_size()
    wrapped = DistributedDataParallel(model)
    diary = Diary(here) if rank == 0 else None
    while step < question["steps"]:
        time.sleep(question["pace"])
        loss = cross_entropy(*_own(wrapped, x, y, step, rank, size))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        value = loss.detach() / size
        if question["losses"]:
            dist.all_reduce(value)
        if diary is not None:
            diary.step(step, size, value.item() if question["losses"] else None)
        if question["every"] and step % question["every"] == 0 and rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({"step": step, **state}, saved.with_suffix(".partial"))
            saved.with_suffix(".partial").rename(saved)


def with_torchft(question: dict[str, Any], here: Path) -> None:
    """Replicas of one rank each; the global batch is divided by those that a step's quorum has."""
    import torchft

    model, x, y = make()
    inner = torch.optim.AdamW(model.parameters(), lr=LR)

    def load(state: Any) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        # The share of a rank is known only with the quorum, so it cannot be waited for later.
        use_async_quorum=question["asynchronous"],
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=question["replica"],
        hostname="localhost",
    )
    wrapped = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, inner)
    diary = Diary(here)
    (here / f"ready-{question['replica']}").touch()
    while manager.current_step() < question["steps"]:
        time.sleep(question["pace"])
        # Agrees on the quorum; one that has just come is given the state of another.
        optimizer.zero_grad()
        step = manager.current_step()
        rank, size = int(question["replica"]), 2
        if not question["asynchronous"]:
            rank, size = manager.participating_rank(), manager.num_participants()
        loss = cross_entropy(*_own(wrapped, x, y, step, rank or 0, size))
        loss.backward()
        value = loss.detach().clone()
        if question["losses"]:
            manager.allreduce(value).wait()
        optimizer.step()
        if manager.current_step() > step and rank == 0:
            diary.step(step + 1, size, value.item() if question["losses"] else None)
    time.sleep(1.0)
    manager.shutdown(wait=False)
    # Threads of torchft's keep the interpreter.
    sys.stdout.flush()
    os._exit(0)


def with_ray(question: dict[str, Any], here: Path) -> None:
    """Ray Train on two raylets, of which one is killed and another comes."""
    import ray
    from ray.cluster_utils import Cluster
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    node = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    second = cluster.add_node(**node)

    def train(config: dict[str, Any]) -> None:
        by_hand(config, here)

    ray.init(address=cluster.address, log_to_driver=False)
    trainer = TorchTrainer(
        train,
        train_loop_config=question,
        scaling_config=ScalingConfig(
            num_workers=(1, 2), elastic_resize_monitor_interval_s=question["ray_looks_every"]
        ),
        run_config=RunConfig(
            storage_path=str(here / "ray"), failure_config=FailureConfig(max_failures=-1)
        ),
    )
    # A node is started by the main thread or not at all.
    training = threading.Thread(target=trainer.fit, daemon=True)
    training.start()
    _await(here / "lose")
    cluster.remove_node(second, allow_graceful=False)
    _await(here / "gain")
    cluster.add_node(**node)
    training.join()


def with_torchrun(question: dict[str, Any], here: Path) -> None:
    dist.init_process_group("gloo")
    by_hand(question, here)
    dist.destroy_process_group()


def _own(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, step: int, rank: int, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model makes of a rank's part of a step's batch, and what it should."""
    first = step * BATCH % SAMPLES
    part = slice(first + rank * BATCH // size, first + (rank + 1) * BATCH // size)
    return model(x[part]), y[part]


def _await(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)


KINDS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "unipar": with_unipar,
    "torchrun": with_torchrun,
    "torchft": with_torchft,
    "ray": with_ray,
}

if __name__ == "__main__":
    directory = Path(sys.argv[1])
    asked = json.loads((directory / os.environ.get("QUESTION", "question.json")).read_text())
    KINDS[asked["kind"]](asked, directory)
