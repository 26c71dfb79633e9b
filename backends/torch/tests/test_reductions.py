"""DDP averages every gradient once before the optimizer steps, or says which one it has not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import unipar
from unipar.data.batch import Batch, MicroBatch
from unipar.errors import ConfigError, WorkerError
from unipar.strategy import Engine
from unipar.world import Placement

SAMPLES = 4


class Model(nn.Module):
    """A sparse table, a layer that is thawed late, and one that a call may leave out."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 6, sparse=sparse)
        self.late = nn.Linear(6, 6).requires_grad_(False)
        self.part = nn.Linear(6, 6)
        self.head = nn.Linear(6, 1)

    def forward(self, tokens: torch.Tensor, part: bool = True) -> torch.Tensor:
        hidden = self.late(self.table(tokens))
        return self.head(hidden + self.part(hidden) if part else hidden)


def tokens(step: int, rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + number)
    return torch.randint(9, (SAMPLES,), generator=generator)


def uses_part(step: int, rank: int, number: int) -> bool:
    """In step 1 one micro-batch of rank 1 uses it, in step 2 none at all."""
    return step == 0 or (step == 1 and (rank, number) == (1, 0))


def thaw(model: Model, step: int) -> None:
    if step == 2:
        model.late.requires_grad_(True)


def by_hand() -> dict[str, torch.Tensor]:
    """The plain loop; nothing of unipar in it."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        thaw(model, step)
        optimizer.zero_grad()
        parts = [(step, rank, number) for rank in range(2) for number in range(2)]
        losses = [model(tokens(*at), uses_part(*at)).square().mean() for at in parts]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def one_after_the_other(engine: Engine, step: int, rank: int) -> None:
    for number in range(2):
        loss = engine(tokens(step, rank, number), uses_part(step, rank, number)).square().mean()
        engine.backward(loss, num_items=SAMPLES)


def held(engine: Engine, step: int, rank: int) -> None:
    parts = [(step, rank, number) for number in range(2)]
    losses = [engine(tokens(*at), uses_part(*at)).square().mean() for at in parts]
    for loss in losses:
        engine.backward(loss, num_items=SAMPLES)


def told(engine: Engine, step: int, rank: int) -> None:
    for number in range(2):
        with engine.microbatch(last=number == 1):
            loss = engine(tokens(step, rank, number), uses_part(step, rank, number)).square().mean()
            engine.backward(loss, num_items=SAMPLES)


def train(placement: Placement, strategy: str, loop: Callable[..., None]) -> dict[str, Any]:
    with unipar.Session(strategy=strategy, placement=placement) as session:
        engine = session.prepare(
            Model(), optimizer=lambda named: torch.optim.SGD([p for _, p in named], 0.1, 0.9)
        )
        for step in range(4):
            thaw(engine.module, step)  # pyright: ignore[reportArgumentType]
            loop(engine, step, placement.rank)
            engine.step()
        return {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}


@pytest.mark.parametrize(
    ("strategy", "loop"),
    [
        ("ddp", one_after_the_other),
        ("ddp", held),
        ("ddp:find_unused_parameters=true", held),
        ("ddp:find_unused_parameters=true", told),
        ("ddp:static_graph=true", held),
    ],
)
def test_every_gradient_counts_once(
    world_pool: Any, strategy: str, loop: Callable[..., None]
) -> None:
    expected = by_hand()
    for weights in world_pool(2).run(train, strategy, loop):
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


class Tables(nn.Module):
    """Two sparse tables, of which a call may leave one out, or use no row of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 6, sparse=True)
        self.part = nn.Embedding(9, 6, sparse=True)
        self.head = nn.Linear(6, 1)

    def forward(self, tokens: torch.Tensor, used: str) -> torch.Tensor:
        hidden = self.table(tokens)
        if used == "rows":
            hidden = hidden + self.part(tokens)
        elif used == "none of its rows":
            hidden = hidden + self.part(tokens[:0]).sum()
        return self.head(hidden)


STEPS: list[Callable[[int, int], bool]] = [
    lambda rank, number: True,
    lambda rank, number: (rank, number) == (1, 0),
    lambda rank, number: (rank, number) == (1, 1),
    lambda rank, number: False,
    lambda rank, number: rank == 0,
]
"""For each step: which rank uses the table in which of its micro-batches."""
ALWAYS_ON_ONE_RANK = [lambda rank, number: rank == 0] * 4


def tables_alone(steps: list[Callable[[int, int], bool]], used: str) -> dict[str, torch.Tensor]:
    """The plain loop; nothing of unipar in it."""
    model = Tables()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, uses in enumerate(steps):
        optimizer.zero_grad()
        losses = [
            model(tokens(step, rank, number), used if uses(rank, number) else "").square().mean()
            for rank in range(2)
            for number in range(2)
        ]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def tables_on(
    placement: Placement,
    strategy: str,
    whole: bool,
    steps: list[Callable[[int, int], bool]],
    used: str,
) -> dict[str, torch.Tensor]:
    def loss(model: Any, data: Any) -> torch.Tensor:
        return model(*data).square().mean()

    rank = placement.rank
    with unipar.Session(strategy=strategy, placement=placement) as session:
        engine = session.prepare(
            Tables(), optimizer=lambda named: torch.optim.SGD([p for _, p in named], 0.1, 0.9)
        )
        for step, uses in enumerate(steps):
            data = [(tokens(step, rank, n), used if uses(rank, n) else "") for n in range(2)]
            if whole:
                parts = tuple(MicroBatch(one, SAMPLES) for one in data)
                engine.train_step(Batch(parts, 4 * SAMPLES), loss)
                continue
            for number, one in enumerate(data):
                with engine.microbatch(last=number == 1):
                    engine.backward(loss(engine, one), num_items=SAMPLES)
            engine.step()
        return {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}


@pytest.mark.parametrize("used", ["rows", "none of its rows"])
@pytest.mark.parametrize("whole", [True, False], ids=["train_step", "by hand"])
@pytest.mark.parametrize(
    ("strategy", "steps"),
    [
        ("ddp:find_unused_parameters=true", STEPS),
        ("ddp:static_graph=true", ALWAYS_ON_ONE_RANK),
    ],
)
def test_a_sparse_table_that_a_rank_leaves_out_is_trained_as_the_plain_loop_does(
    world_pool: Any,
    strategy: str,
    steps: list[Callable[[int, int], bool]],
    whole: bool,
    used: str,
) -> None:
    expected = tables_alone(steps, used)
    for weights in world_pool(2).run(tables_on, strategy, whole, steps, used):
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def test_compression_that_takes_no_sparse_gradient_is_refused(world_pool: Any) -> None:
    def refused(placement: Placement) -> str:
        with (
            unipar.Session("ddp:compression=powersgd", placement=placement) as session,
            pytest.raises(ConfigError) as error,
        ):
            session.prepare(Tables(), optimizer=sgd)
        return str(error.value)

    for message in world_pool(2).run(refused):
        assert "compression=powersgd was given, and parameter 'table.weight'" in message
        assert "sparse=False, or use compression=fp16" in message


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compression_holds_where_no_last_backward_pass_is_named(
    world_pool: Any, compression: str
) -> None:
    def run(placement: Placement) -> tuple[torch.Tensor, torch.Tensor]:
        with unipar.Session(f"ddp:compression={compression}", placement=placement) as session:
            sgd = lambda named: torch.optim.SGD([p for _, p in named], 1.0)  # noqa: E731
            engine = session.prepare(nn.Linear(6, 6), optimizer=sgd)
            before = engine.module.get_parameter("weight").detach().clone()
            engine.backward(engine(torch.eye(6) * 0.1).square().mean(), num_items=6)
            engine.step()
            return before, engine.module.get_parameter("weight").detach()

    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[compression]
    for before, after in world_pool(2).run(run):
        # What travels is divided by a power of two, and by the number of items when it is there.
        gradient = (before - after) * 12
        rounded = gradient.to(dtype).float()
        # Half of what travels is each rank's, which is rounded; their sum is rounded once more.
        assert (gradient - rounded).abs().max() < 1e-6 < gradient.abs().max()


def give_up_and_go_on(placement: Placement, strategy: str) -> dict[str, Any]:
    """The second step is tried twice: the first time its last loss raises, which says nothing."""
    failing = [False]

    def loss_fn(model: Any, at: tuple[int, int, int]) -> torch.Tensor:
        loss = model(tokens(*at)).square().mean()
        if failing[0] and at[2] == 1:
            raise RuntimeError("this batch is bad")
        return loss

    with unipar.Session(strategy=strategy, placement=placement) as session:
        engine = session.prepare(
            Model(), optimizer=lambda named: torch.optim.SGD([p for _, p in named], 0.1, 0.9)
        )
        for step in (0, 9, 1):
            failing[0] = step == 9
            parts = [(step, placement.rank, number) for number in range(2)]
            batch = Batch(tuple(MicroBatch(at, SAMPLES) for at in parts), 4 * SAMPLES)
            if failing[0]:
                with pytest.raises(RuntimeError, match="this batch is bad"):
                    engine.train_step(batch, loss_fn)
            else:
                engine.train_step(batch, loss_fn)
        return {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}


def two_steps() -> dict[str, torch.Tensor]:
    """The plain loop; nothing of unipar in it."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        parts = [(step, rank, number) for rank in range(2) for number in range(2)]
        optimizer.zero_grad()
        torch.stack([model(tokens(*at)).square().mean() for at in parts]).mean().backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("strategy", ["ddp", "ddp:find_unused_parameters=true"])
def test_a_step_that_is_given_up_leaves_no_reduction_to_the_next(
    world_pool: Any, strategy: str
) -> None:
    """The last forward pass has armed the reducer, and no backward pass came."""
    expected = two_steps()
    for weights in world_pool(2).run(give_up_and_go_on, strategy):
        for name, found in weights.items():
            torch.testing.assert_close(found, expected[name], rtol=1e-5, atol=1e-6)


def go_on_alone(placement: Placement, strategy: str, by_hand: bool) -> tuple[str, bool]:
    """Rank 1 meets an error in its second batch, says nothing of it, and takes the next one."""

    def loss_fn(model: Any, at: tuple[int, int, int]) -> torch.Tensor:
        loss = model(tokens(*at)).square().mean()
        if at[:2] == (1, 1):
            raise RuntimeError("this batch is bad")
        return loss

    def take(engine: Engine, step: int) -> None:
        at = (step, placement.rank, 0)
        if not by_hand:
            engine.train_step(Batch((MicroBatch(at, SAMPLES),), 2 * SAMPLES), loss_fn)
            return
        engine.backward(loss_fn(engine, at), num_items=SAMPLES)
        engine.step()

    with unipar.Session(strategy=strategy, placement=placement) as session:
        engine = session.prepare(nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 1)), optimizer=sgd)
        refused, last = "", []
        for step in range(4):
            last = [p.detach().clone() for p in engine.module.parameters()]
            try:
                take(engine, step)
            except RuntimeError:
                engine.zero_grad()
            except ConfigError as error:
                refused = str(error)
                break
        same = all(map(torch.equal, last, engine.module.parameters()))
        return refused, same


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], 0.1)


@pytest.mark.parametrize("by_hand", [False, True], ids=["train_step", "by hand"])
def test_ranks_in_different_steps_are_found_before_the_optimizer_steps(
    world_pool: Any, by_hand: bool
) -> None:
    for message, unchanged in world_pool(2).run(go_on_alone, "ddp", by_hand):
        assert "rank 0 in its step 2, rank 1 in its step 3 (1 of them given up)" in message
        assert "world.gather(failed)" in message
        assert unchanged


def refusal_of(placement: Placement, strategy: str, loop: Callable[[Engine, int], Any]) -> str:
    with unipar.Session(strategy=strategy, placement=placement) as session:
        model = Model(sparse="powersgd" not in strategy)
        engine = session.prepare(
            model, optimizer=lambda named: torch.optim.SGD([p for _, p in named], 0.1)
        )
        before = [p.detach().clone() for p in engine.module.parameters()]
        with pytest.raises(ConfigError) as refused:
            loop(engine, placement.rank)
        for parameter, value in zip(engine.module.parameters(), before, strict=True):
            assert torch.equal(parameter, value), "a refused step has changed the weights"
        return str(refused.value)


def leave_a_part_out(engine: Engine, rank: int) -> None:
    batch = Batch((MicroBatch(tokens(0, rank, 0), SAMPLES),), 2 * SAMPLES)
    engine.train_step(batch, lambda model, data: model(data, part=False).square().mean())


def leave_a_part_out_of_the_last(engine: Engine, rank: int) -> None:
    for number in range(2):
        with engine.microbatch(last=number == 1):
            loss = engine(tokens(0, rank, number), part=number == 0).square().mean()
            engine.backward(loss, num_items=SAMPLES)
    engine.step()


def go_around_the_model(engine: Engine, rank: int) -> None:
    batch = Batch((MicroBatch(tokens(0, rank, 0), SAMPLES),), 2 * SAMPLES)
    engine.train_step(batch, lambda model, data: engine.module(data).square().mean())


def go_on_after_the_last(engine: Engine, rank: int) -> None:
    for _ in range(2):
        with engine.microbatch(last=True):
            engine.backward(engine(tokens(0, rank, 0)).square().mean(), num_items=SAMPLES)


def never_come_to_the_last(engine: Engine, rank: int) -> None:
    with engine.microbatch(last=False):
        engine.backward(engine(tokens(0, rank, 0)).square().mean(), num_items=SAMPLES)
    engine.step()


def do_not_tell_the_last(engine: Engine, rank: int) -> None:
    engine.backward(engine(tokens(0, rank, 0)).square().mean(), num_items=SAMPLES)
    engine.step()


@pytest.mark.parametrize(
    ("strategy", "loop", "said"),
    [
        (
            "ddp",
            leave_a_part_out,
            ["'part.weight', 'part.bias'", "strategy='ddp:find_unused_parameters=true'"],
        ),
        ("ddp", leave_a_part_out_of_the_last, ["'part.weight', 'part.bias'"]),
        ("ddp", go_around_the_model, ["Call model(…) in loss(model, batch)"]),
        ("ddp", go_on_after_the_last, ["engine.microbatch(last=True)", "reduced already"]),
        ("ddp", never_come_to_the_last, ["came before", "Pass last=True"]),
        (
            "ddp:compression=powersgd",
            do_not_tell_the_last,
            ["ddp:compression=powersgd", "engine.microbatch(last=…)"],
        ),
    ],
)
def test_what_is_not_averaged_is_refused_before_the_optimizer_steps(
    world_pool: Any, strategy: str, loop: Callable[[Engine, int], Any], said: list[str]
) -> None:
    for message in world_pool(2).run(refusal_of, strategy, loop):
        for part in said:
            assert part in message
        assert "DistributedDataParallel" not in message


@pytest.mark.parametrize(
    ("strategy", "error", "said"),
    [
        ("ddp", ConfigError, r"'part\.weight'.*find_unused_parameters=true"),
        ("fsdp", WorkerError, r"every rank has to use the same parameters of the model in a step"),
    ],
)
def test_what_ranks_use_differently_ends_the_run_with_the_reason(
    tmp_path: Any, strategy: str, error: type[Exception], said: str
) -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        import torch.distributed as dist

        # Rank 0 prints to the terminal, and the others are told by what they printed last.
        return model(batch[0], part=dist.get_rank() == 0).square().mean()

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all, self.part = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, part: bool) -> torch.Tensor:
            return self.all(x) + self.part(x) if part else self.all(x)

    with pytest.raises(error, match=said):
        unipar.fit(
            Small(),
            (torch.ones(8, 4),),
            strategy=strategy,
            devices=2,
            device="cpu",
            global_batch_size=8,
            steps=1,
            loss=loss,
            optimizer={"name": "sgd", "lr": 0.1},
            output_dir=tmp_path,
            checkpoint=False,
            progress=False,
            timeout=30,
        )


class Often(nn.Module):
    """A sparse table of which one row is used again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)
        nn.init.zeros_(self.table.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens).sum(-1)


def often(placement: Placement, strategy: str, named: bool) -> tuple[list[float], int]:
    """The row after a step with a gradient of one, and the most rows that were sent at once."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather, sent = getattr(dist, name), [0]

    def counting(received: torch.Tensor, own: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(len(own))
        return gather(received, own, *args, **kwargs)

    with unipar.Session(strategy=strategy, placement=placement) as session:
        engine = session.prepare(
            Often(), optimizer=lambda named: torch.optim.SGD([p for _, p in named], 1.0)
        )
        setattr(dist, name, counting)
        try:
            with engine.microbatch(last=True) if named else contextlib.nullcontext():
                loss = engine(torch.zeros(2000, dtype=torch.int64)).mean()
                engine.backward(loss, num_items=2000)
            engine.step()
        finally:
            setattr(dist, name, gather)
        return engine.module.table.weight[0].tolist(), max(sent)  # pyright: ignore


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_a_row_that_is_used_often_is_summed_before_it_is_sent(
    world_pool: Any, compression: str, named: bool
) -> None:
    for row, sent in world_pool(2).run(often, f"ddp:compression={compression}", named):
        assert row == pytest.approx([-1.0, -1.0], rel=2e-3)
        assert sent == 1
