"""Whatever object a model's tensors are in, and is done to them in place, a step is a plain loop's,
or it is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import unipar
from unipar.data.batch import Batch, MicroBatch
from unipar.engine.outputs import tensors_of
from unipar.errors import ConfigError
from unipar.world import Placement

BATCH = 8


@dataclasses.dataclass
class Fields:
    hidden: torch.Tensor
    extra: torch.Tensor


class Attributes:
    """No container that a framework knows."""

    def __init__(self, hidden: torch.Tensor, extra: torch.Tensor) -> None:
        self.hidden, self.extra = hidden, extra


class View(Attributes):
    """Its tensor is a view, and changed in place by who gets it."""

    def __init__(self, hidden: torch.Tensor, extra: torch.Tensor) -> None:
        super().__init__(hidden.view(-1, hidden.shape[-1]), extra)


class Block(nn.Module):
    def __init__(self, gives: Callable[..., Any]) -> None:
        super().__init__()
        self.gives = gives
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.relu(self.up(x))
        return self.gives(self.down(hidden), hidden.mean())


class Model(nn.Module):
    def __init__(self, gives: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gives = gives
        self.blocks = nn.ModuleList(Block(gives) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        extra = torch.zeros(())
        for block in self.blocks:
            given = block(x)
            given.hidden += x
            x, extra = given.hidden, extra + given.extra
        return self.gives(self.head(x), extra)


class ModelWithHooks(Model):
    """Hooks of its own put into an object what its blocks give."""

    def __init__(self, gives: Callable[..., Any]) -> None:
        super().__init__(gives)
        self.blocks = nn.ModuleList(Block(lambda hidden, extra: hidden) for _ in range(2))
        for block in self.blocks:
            block.register_forward_hook(lambda block, args, output: gives(output, output.mean()))


def loss_of(model: Callable[..., Any], inputs: torch.Tensor) -> torch.Tensor:
    given = model(inputs)
    given.hidden *= 2
    return given.hidden.square().mean() + 0.1 * given.extra


def batches() -> list[torch.Tensor]:
    return list(torch.randn(3, BATCH, 8, generator=torch.Generator().manual_seed(1)))


def by_hand(model: nn.Module, loss_of: Callable[..., torch.Tensor]) -> list[float]:
    """The plain loop; nothing of unipar in it."""
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs in batches():
        optimizer.zero_grad()
        loss = loss_of(model, inputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(
    placement: Placement, strategy: str, gives: Callable[..., Any], kind: type[Model] = Model
) -> list[float]:
    with unipar.Session(strategy, device="cpu", placement=placement) as session:
        engine = session.prepare(kind(gives), optimizer={"name": "sgd", "lr": 0.1})
        share = BATCH // placement.size
        own = slice(placement.rank * share, (placement.rank + 1) * share)
        return [
            engine.train_step(Batch((MicroBatch(inputs[own], share),), BATCH), loss_of).loss
            for inputs in batches()
        ]


@pytest.mark.parametrize("gives", [Fields, Attributes, View])
@pytest.mark.parametrize(
    "strategy", ["ddp", "ddp:find_unused_parameters=true", "fsdp", "fsdp:sharding=grad_op"]
)
def test_a_step_is_a_plain_loops(world_pool: Any, strategy: str, gives: Any) -> None:
    for losses in world_pool(2).run(train, strategy, gives):
        assert losses == pytest.approx(by_hand(Model(gives), loss_of), rel=1e-5)


def test_a_hook_may_put_an_output_into_an_object(world_pool: Any) -> None:
    for losses in world_pool(2).run(train, "fsdp", Attributes, ModelWithHooks):
        assert losses == pytest.approx(by_hand(ModelWithHooks(Attributes), loss_of), rel=1e-5)


@pytest.mark.parametrize("gives", [Fields, Attributes])
def test_a_first_backward_pass_that_ddp_does_not_see_is_refused(
    world_pool: Any, gives: Any
) -> None:
    with pytest.raises(ConfigError, match=r"DDP did not see the first backward pass.*leave static"):
        world_pool(2).run(train, "ddp:static_graph=true", gives)


def test_gradients_that_fsdp_has_not_reduced_are_refused(world_pool: Any) -> None:
    def train_on_a_secret(placement: Placement) -> list[float]:
        secrets: list[torch.Tensor] = []

        def gives(hidden: torch.Tensor, extra: torch.Tensor) -> Any:
            # Nobody finds it in a list that is not returned.
            secrets[:] = [hidden]
            return extra

        def secret_loss(model: Callable[..., Any], inputs: torch.Tensor) -> torch.Tensor:
            model(inputs)
            return secrets[0].square().mean()

        with unipar.Session(
            "fsdp:sharding=grad_op,wrap=none", device="cpu", placement=placement
        ) as session:
            block = Block(gives)
            engine = session.prepare(block, optimizer={"name": "sgd", "lr": 0.1})
            batch = Batch((MicroBatch(batches()[0], BATCH),), BATCH)
            return [engine.train_step(batch, secret_loss).loss]

    with pytest.raises(ConfigError, match=r"'?up.weight'?.* not summed over ranks"):
        world_pool(2).run(train_on_a_secret)


def test_tensors_are_found_in_any_object() -> None:
    one, two, three = (torch.tensor(float(number)) for number in range(3))

    class Slotted:
        __slots__ = ("also", "held")

        def __init__(self) -> None:
            self.held, self.also = two, self

    mixed = torch.distributions.Normal(one, two)
    found = list(tensors_of({"a": [mixed, Slotted()], "b": (three, nn.Linear(2, 2), "text", 1)}))
    assert [id(tensor) for tensor in found] == [id(one), id(two), id(two), id(three)]
