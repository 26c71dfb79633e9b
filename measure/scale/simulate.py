"""Measure what rank 0 does as the number of ranks grows, with the other ranks simulated.

python measure/scale/simulate.py            8 to 4,096 ranks, and a table for the docs
python measure/scale/simulate.py --ranks 8 64

Each number of ranks is measured in a process of its own, for its peak of memory. Ranks that are
simulated are threads of other processes with a connection of their own (the meeting), or what they
would send.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import pickle
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

RANKS = (8, 64, 512, 4096)
THREADS = 128
"""Ranks of a process. In one of thousands of threads they would wait for the interpreter's lock."""

LAYERS, WIDTH = 32, 4096
"""Of a decoder of 7 billion parameters: nine tensors a layer, and AdamW's two moments of each."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        before = peak()
        print(json.dumps({**PARTS[args.part](args.ranks[0]), "memory": peak() - before}))
        return
    rows = {
        (part, ranks): json.loads(
            subprocess.run(
                [sys.executable, __file__, "--part", part, "--ranks", str(ranks)],
                stdout=subprocess.PIPE,
                check=True,
                text=True,
            ).stdout.splitlines()[-1]
        )
        for part in PARTS
        for ranks in args.ranks
    }
    print("| what | " + " | ".join(f"{ranks:,}" for ranks in args.ranks) + " |")
    print("|---" * (len(args.ranks) + 1) + "|")
    for part in PARTS:
        for what in rows[part, args.ranks[0]]:
            cells = [shown(what, rows[part, ranks][what]) for ranks in args.ranks]
            print(f"| {part}, {what} | " + " | ".join(cells) + " |")


def shown(what: str, value: float) -> str:
    if "memory" in what or "bytes" in what:
        return f"{value / 2**20:.1f} MiB"
    return f"{value:.3f} s"


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def timed(fn: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    value = fn()
    return time.perf_counter() - began, value


def meeting(ranks: int) -> dict[str, float]:
    """All ranks come to a store at once, each by a connection of its own."""
    return meet(range(ranks), ranks, 600.0)


def absence(ranks: int) -> dict[str, float]:
    """The last rank never comes, and all the others have waited for it equally long."""
    timeout = 20.0
    found = meet(range(ranks - 1), ranks, timeout)
    return {
        "time beyond the timeout": found["time to meet"] - timeout,
        "processor time of rank 0": found["processor time of rank 0"],
    }


def meet(coming: range, ranks: int, timeout: float) -> dict[str, float]:
    """Rank 0 is this process, which keeps the store; the others are threads of a few processes.

    Returns:
        Seconds from when all are connected until the meeting has ended for all, and the seconds of
        processor time that this process took in them, the store's thread included.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    from unipar.world.network import allow_connections

    # torch asks for the name of each address that it connects to; nobody may answer here.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    others = coming[1:]
    allow_connections(ranks)
    # Those that are forked have not imported torch again, and this process has no thread yet.
    context = multiprocessing.get_context("fork")
    pipes = []
    for start in range(0, len(others), THREADS):
        pipe, its = context.Pipe()
        arguments = (its, others[start : start + THREADS], ranks, timeout)
        context.Process(target=come_together, args=arguments, daemon=True).start()
        pipes.append(pipe)

    def told(word: Any) -> None:
        for pipe in pipes:
            pipe.send(word)

    def done() -> None:
        for pipe in pipes:
            pipe.recv()

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told(store.port)
    done()
    began, worked = time.perf_counter(), time.process_time()
    told("come")
    come(store, 0, ranks, timeout)
    done()
    return {
        "time to meet": time.perf_counter() - began,
        "processor time of rank 0": time.process_time() - worked,
    }


def come_together(pipe: Any, own: range, ranks: int, timeout: float) -> None:
    """Be these ranks, each in a thread of its own."""
    from datetime import timedelta

    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    def connect(rank: int) -> TCPStore:
        return TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=600))

    with ThreadPoolExecutor(len(own)) as threads:
        port = pipe.recv()
        stores = list(threads.map(connect, own))
        pipe.send("connected")
        pipe.recv()
        list(threads.map(lambda store, rank: come(store, rank, ranks, timeout), stores, own))
        pipe.send("came")


def come(store: Any, rank: int, ranks: int, timeout: float) -> None:
    """Come to the meeting as a rank does, and see it fail where one of them is missing."""
    import torch.distributed as dist

    from unipar.world import meeting
    from unipar.world.placement import Placement

    with contextlib.suppress(dist.DistStoreError):
        meeting.come(store, Placement(rank=rank, size=ranks, timeout=timeout), 1)


def stragglers(ranks: int) -> dict[str, float]:
    """The times of all ranks' last steps, which come to rank 0 every ten seconds."""
    import torch

    from unipar.train import stragglers
    from unipar.world import Placement, World

    world = World(Placement(size=ranks))
    found = stragglers.Stragglers(world, ["a"] * ranks, lambda *told: None)
    times = 0.1 + torch.rand(ranks, stragglers.STEPS, 2) / 100
    found.compare(times)
    seconds, _ = timed(lambda: found.compare(times))
    return {"time to compare": seconds, "bytes received": times.nbytes}


def agreement(ranks: int) -> dict[str, float]:
    """What each rank was started with is sent to all, and compared by each."""
    import torch

    from unipar.config import RunConfig
    from unipar.train import agreement

    job = SimpleNamespace(
        config=RunConfig.build({"global_batch_size": 8192, "strategy": "fsdp"}),
        data=(torch.zeros(16, 4),),
        eval_data=None,
        lr_scheduler=None,
        metrics={},
    )
    sent = pickle.dumps(agreement.started_with(job))  # pyright: ignore[reportArgumentType]
    seconds, found = timed(
        lambda: agreement.differences([pickle.loads(sent) for _ in range(ranks)])
    )
    assert found is None
    return {"time": seconds, "bytes received": len(sent) * ranks}


def save(ranks: int) -> dict[str, float]:
    """A save of a model that is sharded over all ranks, but for what is written."""
    import torch

    from unipar.checkpoint import commit, decode, manifest, plan
    from unipar.state import Box, LocalState

    def states(rank: int) -> list[LocalState]:
        """The shards of a rank: of each tensor a part of the rows, as FSDP2 divides it."""
        found = []
        for name, shape in tensors():
            rows = -(-shape[0] // ranks)
            start = min(rank * rows, shape[0])
            count = min(rows, shape[0] - start)
            box = Box((start, *(0 for _ in shape[1:])), (count, *shape[1:]))
            found.append(LocalState(name, shape, torch.float32, (box,), tensors=()))
        return found

    received = 0
    made_up = 0.0

    class Others:
        """A world whose other ranks have described their shards."""

        rank, size = 0, ranks

        def gather(self, value: Any) -> list[Any]:
            nonlocal received, made_up
            began = time.perf_counter()
            if isinstance(value, plan.Described):
                sent = [pickle.dumps(plan.describe(states(rank))) for rank in range(ranks)]
            else:
                # Whether they hold what they held before; the others are taken to say the same.
                sent = [pickle.dumps(value)] * ranks
            made_up += time.perf_counter() - began
            received += sum(map(len, sent))
            return [pickle.loads(one) for one in sent]

    others: Any = Others()
    own = states(0)
    seconds, part = timed(lambda: plan.plan_part("model/weights", own, others))
    seconds -= made_up
    told = received
    again, _ = timed(lambda: plan.plan_part("model/weights", own, others))
    empty = plan.PartPlan("model/optimizer", (), (), ())
    engines = {"model": commit.EnginePlan(part, empty, (), {}, {})}
    header = manifest.Manifest(
        path=Path("/nowhere"), step=1, strategy="fsdp", world_size=ranks, engines={}, files={},
        progress={}, metrics={}, unipar_version="", torch_version="",
    )  # fmt: skip
    whole = commit.Plan(Path("/nowhere"), header, engines, 0, None)
    outcomes = written(part)
    sealing, text = timed(lambda: manifest.encode(commit.assemble(whole, outcomes)))
    reading, found = timed(lambda: decode.decode(Path("/nowhere"), text))
    own_file, _ = timed(lambda: found.chunks_of(part.path(0, 0)))
    return {
        "time to plan the first": seconds,
        "time to plan the next": again,
        "bytes received": told,
        "time to make the manifest": sealing,
        "bytes of the manifest": len(text),
        "time to read the manifest": reading,
        "time to look one file up": own_file,
    }


def written(part: Any) -> list[Any]:
    """What each rank says of the files that it has written, with headers of 100 kB."""
    import numpy as np

    from unipar.checkpoint.commit import Outcome
    from unipar.checkpoint.manifest import FileInfo
    from unipar.checkpoint.runs import values

    sizes = np.full(len(part.files), 100_000)
    for signature, own in zip(part.tensors, part.written, strict=True):
        elements = np.prod([values(runs) for runs in own.sizes], axis=0)
        sizes[values(own.files)] += elements * signature.dtype.itemsize
    return [
        Outcome({path: FileInfo(size, 100_000, "0" * 16)})
        for path, size in zip(part.paths, sizes.tolist(), strict=True)
    ]


def tensors() -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a decoder's weights and of AdamW's moments."""
    return [
        (f"{kind}.{name}", shape)
        for kind in ("weight", "exp_avg", "exp_avg_sq")
        for name, shape in decoder(LAYERS, WIDTH, 11008)
    ]


def decoder(layers: int, width: int, hidden: int) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a decoder's weights."""
    layer = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (width, width),
        "self_attn.v_proj": (width, width),
        "self_attn.o_proj": (width, width),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (hidden, width),
        "mlp.up_proj": (hidden, width),
        "mlp.down_proj": (width, hidden),
    }
    weights = {"embed_tokens": (32000, width), "norm": (width,), "lm_head": (32000, width)}
    for number in range(layers):
        weights |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    return list(weights.items())


PARTS = {
    "meeting": meeting,
    "meeting that a rank misses": absence,
    "agreement": agreement,
    "stragglers": stragglers,
    "save": save,
}

if __name__ == "__main__":
    main()
