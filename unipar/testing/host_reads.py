"""Where a step reads a tensor's value on the host, for which an accelerator has to be waited for.

On a CPU nothing waits, but the reads are the same, and can be counted.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from unipar.data.batch import Batch, MicroBatch
from unipar.loss import LossSum
from unipar.session import Session
from unipar.testing.pool import WorkerPool
from unipar.utils import host_copy
from unipar.world import Placement

EARLY = {"processes.wait", "last_step.check"}
"""The loss of a step, on its way since before the last backward pass, and the norm of the last."""
CLIPS: Mapping[str, Any] = {"max_grad_norm": 1.0}

_READS = ("item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__")
_PASSED_OVER = (str(Path(torch.__file__).parent), host_copy.__file__, contextlib.__file__)


@contextlib.contextmanager
def counting_host_reads() -> Iterator[Counter[str]]:
    """Count what reads tensors on the host: ``.item()``, ``.tolist()``, ``float``, ``bool``, ….

    Yields:
        How often each function does, as ``module.function``; torch's own count as those who called
        them.
    """
    found: Counter[str] = Counter()
    before = {name: getattr(torch.Tensor, name) for name in _READS}
    within = False

    def counted(read: Callable[..., Any]) -> Callable[..., Any]:
        def reading(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal within
            if within or tensor.device.type == "meta":
                return read(tensor, *args, **kwargs)
            found[_reader()] += 1
            within = True
            try:
                return read(tensor, *args, **kwargs)
            finally:
                within = False

        return reading

    for name, read in before.items():
        setattr(torch.Tensor, name, counted(read))
    try:
        yield found
    finally:
        for name, read in before.items():
            setattr(torch.Tensor, name, read)


def _reader() -> str:
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_filename != __file__ and not code.co_filename.startswith(_PASSED_OVER):
            return f"{frame.f_globals['__name__'].rpartition('.')[2]}.{code.co_name}"
        frame = frame.f_back
    return "torch"


def row_of(pool: WorkerPool, strategy: str) -> str:
    """Describe what a strategy's steps read, as a row of the table in ``docs/gpu.md``.

    Args:
        pool: the ranks.
        strategy: as a user writes it.
    """
    asked = [(fused, {}), (fused, CLIPS), (plain, CLIPS), (plain, {**CLIPS, "precision": "fp16"})]
    cells = [f"`{strategy}`"]
    for optimizer, settings in asked:
        first, *others = pool.run(_reads, strategy, optimizer, settings)
        assert all(other == first for other in others)
        early = sum(number for reader, number in first.items() if reader in EARLY)
        cells.append(f"{early} + {sum(first.values()) - early}")
    return f"| {' | '.join(cells)} |"


def _reads(placement: Placement, strategy: str, optimizer: Any, settings: Any) -> dict[str, int]:
    return reads_of_a_step(placement, strategy, optimizer, **settings)


def fused(named: Any) -> torch.optim.Optimizer:
    """An optimizer that takes a flag on the device."""
    return torch.optim.AdamW([p for _, p in named], lr=1e-3, fused=True)


def plain(named: Any) -> torch.optim.Optimizer:
    """One that takes none."""
    return torch.optim.SGD([p for _, p in named], lr=1e-3)


def reads_of_a_step(
    placement: Placement, strategy: str, optimizer: Any, **settings: Any
) -> dict[str, int]:
    """Count what reads tensors in a step of two micro-batches, when a few steps have been taken.

    Args:
        placement: of this rank.
        strategy: as a user writes it.
        optimizer: as :meth:`unipar.Session.prepare` takes it.
        **settings: ``precision`` and ``on_nan`` of the session, or those of ``prepare``.
    """
    of_session = {key: settings.pop(key) for key in ("precision", "on_nan") if key in settings}
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    parts = tuple(MicroBatch(torch.randn(2, 8), 2) for _ in range(2))
    batch = Batch(parts, 4 * placement.size)
    with Session(strategy, device="cpu", placement=placement, **of_session) as session:
        engine = session.prepare(
            model,
            optimizer=optimizer,
            global_batch_size=4 * placement.size,
            micro_batch_size=2,
            accumulation=2,
            **settings,
        )
        # Passes 1, 2, 4, 8 and 16 are those in which changed weights are looked for.
        for _ in range(8):
            engine.train_step(batch, _squares)
        with counting_host_reads() as found:
            engine.train_step(batch, _squares)
        return dict(found)


def _squares(model: Any, data: torch.Tensor) -> LossSum:
    out = model(data)
    return LossSum(out.square().sum(), (out == out).sum())
