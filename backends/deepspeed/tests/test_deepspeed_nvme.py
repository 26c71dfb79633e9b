"""State and parameters in files: the same run as in memory, checkpoints from there and to there.

What trains is skipped where DeepSpeed's async_io is not built, which takes some minutes:
``unipar install deepspeed --with nvme``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unipar import Session, fit
from unipar.errors import ConfigError
from unipar.testing.pool import WorldPools
from unipar.world import Placement
from unipar_deepspeed import ops

MEMORY = "zero3:persistence_threshold=0,offload_optimizer=true,sub_group_size=270000"
"""On two ranks: two sub-groups that go into files, and one too small for it."""

each_kind = pytest.mark.parametrize(
    "more",
    [
        pytest.param("", id="state", marks=pytest.mark.thorough),
        pytest.param(",offload_parameters=true", id="all"),
    ],
)


def is_built() -> bool:
    try:
        ops.check("async_io", "", "")
    except ConfigError:
        return False
    return True


built = pytest.mark.skipif(
    not is_built(),
    reason="needs DeepSpeed's async_io operator: unipar install deepspeed --with nvme",
)


class Wide(nn.Module):
    """Its matrices have more than 1 MiB on each of two ranks, below which nothing is swapped.

    Of odd sizes, so that the second one begins where direct I/O cannot read to.
    """

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first = nn.Linear(513, 1101)
            self.second = nn.Linear(1101, 513)
            self.last = nn.Linear(513, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x).tanh()).tanh())


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named if p.requires_grad], lr=1e-3, amsgrad=True)


def size_of_files(root: Path, folder: str) -> int:
    """The bytes in every ``folder`` below ``root``, where other ranks may be removing theirs.

    ``os.walk`` passes over a directory that is gone when it comes to it; ``Path.rglob`` raises.
    """
    return sum(
        (Path(parent) / name).stat().st_size
        for parent, _, names in os.walk(root)
        if Path(parent).name == folder
        for name in names
    )


def train(
    placement: Placement,
    strategy: str,
    steps: int,
    save_to: Path | None = None,
    resume: Path | None = None,
    watched: Path | None = None,
) -> tuple[list[float], int]:
    """The losses, and the bytes that this rank has in ``watched`` after the last step."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 513, generator=generator)
    with Session(strategy, device="cpu", placement=placement) as session:
        engine: Any = session.prepare(Wide(), optimizer=adamw, max_grad_norm=0.5)
        loader = session.loader((x, x[:, :1]), global_batch_size=8, micro_batch_size=2)
        if resume is not None:
            session.load(resume, loader=loader)
        batches = iter(loader)
        losses = [engine.train_step(next(batches), loss_fn).loss for _ in range(steps)]
        if save_to is not None:
            session.save(save_to, loader=loader)
            # The step after a checkpoint finds DeepSpeed's buffers as it left them.
            losses.append(engine.train_step(next(batches), loss_fn).loss)
        return losses, 0 if watched is None else size_of_files(watched, f"rank{placement.rank}")


@built
@each_kind
def test_what_is_in_files_trains_and_saves_as_what_is_in_memory_does(
    more: str, world_pool: WorldPools, tmp_path: Path
) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    memory = f"{MEMORY}{more}"
    files = f"{memory},nvme_path={drive}"
    pool = world_pool(2)
    ((whole, _), _) = pool.run(train, memory, 7)
    saved, from_memory = tmp_path / "files", tmp_path / "memory"
    for losses, size in pool.run(train, files, 3, saved, None, drive):
        assert losses == whole[:4]
        # Weights and three moments of half of two matrices; parameters are once more what computes.
        assert size > (5 if more else 4) * 4 * 513 * 1101
    assert not list(drive.iterdir())
    ((before, _), _) = pool.run(train, memory, 3, from_memory)
    assert before == whole[:4]
    for source in (saved, from_memory):
        for target in (files, memory):
            for losses, _ in pool.run(train, target, 4, None, source):
                assert losses == whole[3:]
    assert not list(drive.iterdir())


@built
@each_kind
def test_what_is_in_files_goes_on_elsewhere(
    more: str, world_pool: WorldPools, tmp_path: Path
) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    files = f"{MEMORY}{more},nvme_path={drive}"
    ((whole, _),) = world_pool(1).run(train, "single", 7)
    world_pool(1).run(train, "single", 3, tmp_path / "single")
    world_pool(2).run(train, files, 3, tmp_path / "files")
    places = [
        ("ddp", 2, "files"),
        ("single", 1, "files"),
        (files, 1, "single"),
        (files, 2, "single"),
    ]
    for strategy, ranks, source in places:
        for losses, _ in world_pool(ranks).run(train, strategy, 4, None, tmp_path / source):
            assert losses == pytest.approx(whole[3:], rel=1e-5), (strategy, ranks)


class Recurrent(nn.Module):
    """Twelve weights of one module, which are in memory together, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.gru = nn.GRU(513, 700, num_layers=3, batch_first=True)
            self.fixed = nn.Linear(700, 1600).requires_grad_(False)
            self.out = nn.Linear(1600, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.fixed(self.gru(x)[0][:, -1]).relu())


def train_and_evaluate(placement: Placement, strategy: str) -> list[float]:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch), batch[:, 0, :1])

    x = torch.randn(24, 3, 513, generator=torch.Generator().manual_seed(1))
    with Session(strategy, device="cpu", placement=placement) as session:
        engine: Any = session.prepare(Recurrent(), optimizer=adamw)
        found = []
        for batch in session.loader(x, global_batch_size=8):
            found.append(engine.train_step(batch, loss).loss)
            unshuffled = session.loader(x, global_batch_size=8, shuffle=False)
            found.append(session.evaluate(engine, unshuffled, loss)["loss"])
        return found


@built
def test_weights_that_are_in_memory_together_come_from_files(
    world_pool: WorldPools, tmp_path: Path
) -> None:
    memory = "zero3:offload_optimizer=true,offload_parameters=true,sub_group_size=2000000"
    in_memory = world_pool(2).run(train_and_evaluate, memory)
    assert world_pool(2).run(train_and_evaluate, f"{memory},nvme_path={tmp_path}") == in_memory


# -- what is refused before any process starts -----------------------------------------------------


def start(directory: Path, strategy: str) -> None:
    data = (torch.randn(8, 513), torch.randn(8, 1))
    fit(Wide(), data, strategy=strategy, loss=loss_fn, devices=2, device="cpu", steps=1,
        global_batch_size=8, output_dir=directory, progress=False)  # fmt: skip
    raise AssertionError("it was not refused")


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("zero3:nvme_path=/tmp", r"nothing is offloaded. Set offload_optimizer=true"),
        ("zero2:offload_optimizer=true,nvme_path=/tmp", r"nvme_path .* stage 2.*stage 3"),
        (
            f"{MEMORY},offload_parameters=true,nvme_path=/tmp".replace("=0,", "=300000,"),
            r"persistence_threshold=300000 keeps .* Set persistence_threshold=262144, or less",
        ),
    ],
)
def test_a_path_that_means_nothing_is_refused(tmp_path: Path, strategy: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(tmp_path, strategy)


def test_an_operator_that_is_not_built_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=r"not built.*unipar install deepspeed --with nvme"):
        start(tmp_path, f"{MEMORY},nvme_path={tmp_path}")
    # What a killed build leaves behind is never looked at, its lock file least of all.
    lock = ops.directory() / ".building-killed/async_io/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    with pytest.raises(ConfigError, match="not built"):
        start(tmp_path, f"{MEMORY},nvme_path={tmp_path}")


def test_a_directory_that_cannot_hold_state_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "check", lambda *args: None)
    with pytest.raises(ConfigError, match=r"nvme_path=.*drive is no directory\. Make it"):
        start(tmp_path, f"{MEMORY},nvme_path={tmp_path}/drive")
    with pytest.raises(ConfigError, match=r"nvme_path=/proc: .*directory on a drive"):
        start(tmp_path, f"{MEMORY},nvme_path=/proc")
    monkeypatch.setattr(os, "open", _without_direct_io(os.open))
    with pytest.raises(ConfigError, match=r"takes no direct I/O"):
        start(tmp_path, f"{MEMORY},nvme_path={tmp_path}")


def _without_direct_io(real: Any) -> Any:
    def refusing(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    return refusing
