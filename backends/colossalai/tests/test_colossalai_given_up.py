"""A step that an error has ended leaves nothing that the next one would add to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from colossalai_engines import FSDP, GEMINI, adamw, network, precision_of, square, with_engine
from colossalai_hybrid import TP
from colossalai_models import Sentences, entropy_of, inputs, language_model

from unipar import LossSum, Objective
from unipar.data.batch import Batch, MicroBatch
from unipar.testing.compare import assemble_weights, assert_equal_weights
from unipar.testing.harness import Exported
from unipar.testing.pool import WorldPools
from unipar.testing.reference import copy_weights
from unipar.world import Placement

MICROBATCHES = 3
WHERE = [("before", False), ("after", False), ("after", True), ("inside", False)]
BACKWARD = [("backward", False), ("backward", True)]


def rows(step: int, micro: int, rank: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 8).reshape(2, 4) * (1 + step + 2 * micro + rank)


def step(engine: Any, world: Any, number: int, loss: Any = square) -> None:
    mine = [MicroBatch(rows(number, micro, world.rank), 2) for micro in range(MICROBATCHES)]
    engine.train_step(Batch(tuple(mine), 2 * world.size * MICROBATCHES), loss)


class Bad(torch.autograd.Function):
    """Fails at the end of a backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("this batch is bad")


class Failing:
    """Fails in one micro-batch of a step.

    Args:
        where: ``"before"`` or ``"after"`` the model is called, ``"inside"`` of its forward pass, or
            in the ``"backward"`` pass.
        last: which micro-batch: the last, or the second.
    """

    def __init__(self, where: str, *, last: bool) -> None:
        self.where, self.calls_left = where, MICROBATCHES if last else 2

    def __call__(self, model: Any, x: torch.Tensor) -> torch.Tensor:
        self.calls_left -= 1
        if self.calls_left:
            return square(model, x)
        if self.where == "inside":
            return square(model, x[:, :3])
        if self.where == "backward":
            return square(model, Bad.apply(x.clone().requires_grad_()))
        if self.where == "after":
            square(model, x)
        raise RuntimeError("this batch is bad")


def disturbed(engine: Any, world: Any, where: Sequence[tuple[str, bool]]) -> Exported:
    """Each of its steps comes after one that fails."""
    for number, (place, last) in enumerate(where):
        with pytest.raises(RuntimeError, match=r"this batch is bad|shapes cannot be multiplied"):
            step(engine, world, 7 + number, Failing(place, last=last))
        step(engine, world, number)
    return Exported.of(engine)


def undisturbed(engine: Any, world: Any, steps: int) -> Exported:
    for number in range(steps):
        step(engine, world, number)
    return Exported.of(engine)


def plain_loop(size: int, steps: int) -> dict[str, torch.Tensor]:
    model = network()
    optimizer = adamw(model.named_parameters())
    for number in range(steps):
        every = [rows(number, m, rank) for rank in range(size) for m in range(MICROBATCHES)]
        optimizer.zero_grad()
        square(model, torch.cat(every)).backward()
        optimizer.step()
    return copy_weights(model)


@pytest.mark.parametrize(
    ("strategy", "where"),
    [
        *((f"colossalai:plugin={name}", WHERE + BACKWARD) for name in ("ddp", "zero1", "zero2")),
        (FSDP, WHERE),
        (GEMINI, WHERE + BACKWARD),
    ],
)
def test_what_a_given_up_step_has_added_is_not_in_the_next(
    strategy: str, where: list[tuple[str, bool]], world_pool: WorldPools
) -> None:
    def run(engine: Any, world: Any) -> Exported:
        return disturbed(engine, world, where)

    def whole(engine: Any, world: Any) -> Exported:
        return undisturbed(engine, world, len(where))

    pool = world_pool(2)
    found = assemble_weights(pool.run(with_engine, strategy, run, network()))
    if precision_of(strategy) == "fp32":
        assert_equal_weights(found, plain_loop(2, len(where)), 1e-5)
    else:
        expected = pool.run(with_engine, strategy, whole, network())
        assert_equal_weights(found, assemble_weights(expected), 0.0)


def test_fsdp_does_not_go_on_after_half_a_backward_pass(world_pool: WorldPools) -> None:
    def run(engine: Any, world: Any) -> Exported:
        return disturbed(engine, world, BACKWARD)

    said = world_pool(1).run(with_engine, FSDP, run, network())[0]
    assert "cannot begin another: FSDP is left in the middle of it" in said


def train_divided(engine: Any, failing: bool) -> Exported:
    """Three steps; each comes after one whose loss is refused in a later micro-batch, or never."""
    data, calls = Sentences(), [0]

    def loss(output: Any, batch: Any) -> LossSum:
        calls[0] -= 1
        if not calls[0]:
            raise RuntimeError("this batch is bad")
        return LossSum(*entropy_of(output, batch))

    def divided_step(number: int) -> None:
        mine = [MicroBatch(data[2 * m + number : 2 * m + number + 2], 2) for m in range(3)]
        engine.train_step(Batch(tuple(mine), 6), Objective(inputs, loss))

    for number in range(3):
        if failing:
            calls[0] = 2 + number % 2
            with pytest.raises(RuntimeError, match="this batch is bad"):
                divided_step(7 + number)
        divided_step(number)
    return Exported.of(engine)


def divided(placement: Placement, failing: bool) -> Any:
    def run(engine: Any, world: Any) -> Exported:
        return train_divided(engine, failing)

    return with_engine(placement, TP, run, language_model())


def test_nor_where_layers_are_divided(world_pool: WorldPools) -> None:
    found, expected = (assemble_weights(world_pool(2).run(divided, f)) for f in (True, False))
    assert_equal_weights(found, expected, 0.0)
