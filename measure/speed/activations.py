"""Measure the bytes that a forward pass keeps for the backward pass, by what is done with them.

python measure/speed/activations.py                  the table goes to docs/how-to/memory.md
python measure/speed/activations.py --device cuda    the same on a GPU, and nothing is written

A small GPT in one process. Each operation's outputs are counted while they are alive, parameters
and their gradients left out: when the loss is known, and at most until the backward pass is done.
What waits in host memory is counted apart; on a CPU that is the same memory, and the count is of
what a GPU would hold.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import unipar  # noqa: E402
from examples.gpt import GPT, loss  # noqa: E402
from measure.report import circumstances, mebibytes, write_markdown  # noqa: E402
from unipar.engine.offload import Copies  # noqa: E402

LAYERS, WIDTH, HEADS, LENGTH, ROWS = 4, 256, 4, 256, 4
SETTINGS: dict[str, dict[str, Any]] = {
    "neither": {},
    '`activation_checkpointing="selective"`': {"activation_checkpointing": "selective"},
    '`activation_checkpointing="full"`': {"activation_checkpointing": "full"},
    "`activation_offload=True`": {"activation_offload": True},
    '`activation_checkpointing="full"`, `activation_offload=True`': {
        "activation_checkpointing": "full",
        "activation_offload": True,
    },
}


class Kept(NamedTuple):
    """Bytes of one step, and its work.

    Attributes:
        after_forward: on the device, when the loss is known.
        most: on the device, at any time of the step.
        on_host: in host memory, when the loss is known.
        operations: floating-point operations of products with weights.
    """

    after_forward: int
    most: int
    on_host: int
    operations: int


class Alive(TorchDispatchMode):
    """The bytes of what operations have given and is alive, on the device and on the host."""

    def __init__(self, known: Iterator[torch.Tensor]) -> None:
        super().__init__()
        self.device = self.most = self.host = 0
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._on_host: set[int] = set()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._refs or storage.data_ptr() in self._known:
            return
        size = storage.nbytes()

        def gone(_: Any) -> None:
            del self._refs[key]
            if key in self._on_host:
                self._on_host.remove(key)
                self.host -= size
            else:
                self.device -= size

        self._refs[key] = weakref.ref(storage, gone)
        self.device += size
        self.most = max(self.most, self.device)

    def move(self, storage: torch.UntypedStorage) -> None:
        """Count a storage as one of the host's."""
        self._on_host.add(id(storage))
        self.device -= storage.nbytes()
        self.host += storage.nbytes()

    @contextlib.contextmanager
    def telling_host(self) -> Iterator[None]:
        """While entered, copies to the host are known as such."""
        out = Copies.out
        before = 0

        def known(copies: Copies, flat: torch.Tensor) -> Any:
            nonlocal before
            before = self.most
            copy, left = out(copies, flat)
            self.move(copy.untyped_storage())
            self.most = max(before, self.device)
            return copy, left

        with mock.patch.object(Copies, "out", known):
            yield


def step(device: Literal["cpu", "cuda"] = "cpu", **settings: Any) -> Kept:
    """Forward and backward pass of one batch."""
    text = torch.zeros(ROWS, LENGTH, dtype=torch.long)

    def prepared(session: unipar.Session) -> Any:
        torch.manual_seed(0)
        model = GPT(layers=LAYERS, width=WIDTH, heads=HEADS, length=LENGTH)
        return session.prepare(model, optimizer="adamw", **settings)

    with unipar.Session(strategy="single", device=device) as session:
        engine, where = prepared(session), session.world.device
        batch = text.to(where), text.to(where)
        with FlopCounterMode(display=False) as counter:
            engine.backward(loss(engine, batch), num_items=ROWS)
        engine.zero_grad()
        parameters = list(engine.module.parameters())
        for parameter in parameters:
            parameter.grad = None
        if device != "cpu":
            return _by_allocator(engine, batch, counter.get_total_flops())
        with Alive(iter([*parameters, *batch])) as alive, alive.telling_host():
            found = loss(engine, batch)
            kept, host = alive.device, alive.host
            _backward_without_gradients(found, parameters)
        return Kept(kept, alive.most, host, counter.get_total_flops())


def _backward_without_gradients(found: torch.Tensor, parameters: list[torch.nn.Parameter]) -> None:
    """The backward pass, which lets go of each parameter's gradient when it is there."""

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(drop) for p in parameters]
    found.backward()
    for handle in handles:
        handle.remove()


def _by_allocator(engine: Any, batch: Any, operations: int) -> Kept:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = loss(engine, batch)
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    _backward_without_gradients(found, list(engine.module.parameters()))
    torch.cuda.synchronize()
    return Kept(kept, torch.cuda.max_memory_allocated() - before, 0, operations)


def table(found: dict[str, Kept]) -> str:
    """A row for each setting."""
    plain = found["neither"]
    lines = [
        "| | kept on the device for the backward pass | most at once | in host memory "
        "| products with weights |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, kept in found.items():
        cells = [mebibytes(size) for size in (kept.after_forward, kept.most, kept.on_host)]
        lines.append(f"| {name} | {' | '.join(cells)} | {kept.operations / plain.operations:.0%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    began = time.perf_counter()
    found = {name: step(args.device, **settings) for name, settings in SETTINGS.items()}
    about = circumstances("python measure/speed/activations.py", time.perf_counter() - began, ())
    shape = (
        f"{LAYERS} blocks of width {WIDTH}, {ROWS} rows of {LENGTH} bytes, fp32, without "
        "parameters and their gradients."
    )
    text = f"{about} {shape}\n\n{table(found)}"
    print(text)
    if args.device == "cpu":
        write_markdown(ROOT / "docs" / "how-to" / "memory.md", text)


if __name__ == "__main__":
    main()
