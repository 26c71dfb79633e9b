"""Whatever blocks are given, and write into it, a step is a plain loop's, or it is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_outputs import BATCH, batches, by_hand
from torch import nn

import unipar
from unipar.data.batch import Batch, MicroBatch
from unipar.errors import ConfigError
from unipar.world import Placement


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.up(x))


class IntoList(Part):
    def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        hidden = self.hidden(x)
        seen.append(hidden.square().mean())
        return x + self.down(hidden)


class IntoDict(Part):
    def forward(self, state: dict[str, Any]) -> None:
        hidden = self.hidden(state["x"])
        state["deeper"]["seen"][0].append(hidden.square().mean())
        state["before"] = state["x"]
        state["x"] = state["x"] + self.down(hidden)


class IntoObject(Part):
    def forward(self, state: Any) -> None:
        hidden = self.hidden(state.x)
        state.x, state.seen = state.x + self.down(hidden), state.seen + hidden.square().mean()


class IntoMemory(Part):
    """Without a gradient until then."""

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(x)
        memory[:, 0] = hidden.mean(-1)
        return x + self.down(hidden)


@dataclasses.dataclass
class State:
    x: torch.Tensor
    seen: Any = 0.0


class Attributes:
    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.seen = x, torch.zeros(())


class Model(nn.Module):
    """Runs its blocks one way; gives the output, and what they have written."""

    def __init__(self, kind: Callable[[], Part], run: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(kind() for _ in range(2))
        self.head = nn.Linear(8, 3)
        self._run = run

    def forward(self, x: torch.Tensor) -> Any:
        hidden, seen = self._run(self.blocks, self.first(x))
        return self.head(hidden), seen


def by_list(blocks: Any, x: torch.Tensor) -> Any:
    seen: list[torch.Tensor] = []
    for block in blocks:
        x = block(x, seen=seen)
    return x, sum(seen)


def by_dict(blocks: Any, x: torch.Tensor) -> Any:
    state: dict[str, Any] = {"x": x, "deeper": {"seen": ([],)}}
    given = state["x"], state["deeper"]["seen"][0]
    for block in blocks:
        before = state["x"]
        block(state)
        # They are what was given, not what a framework has put in their place.
        assert state["before"] is before
        assert state["deeper"]["seen"][0] is given[1]
    return state["x"] + 0.1 * given[0], sum(given[1])


def by_dataclass(blocks: Any, x: torch.Tensor) -> Any:
    state = State(x)
    for block in blocks:
        block(state)
    return state.x, state.seen


def by_attributes(blocks: Any, x: torch.Tensor) -> Any:
    state = Attributes(x)
    for block in blocks:
        block(state)
    return state.x, state.seen


def by_memory(blocks: Any, x: torch.Tensor) -> Any:
    seen = torch.zeros(())
    for block in blocks:
        memory = torch.zeros(len(x), 2)
        x = block(x, memory)
        seen = seen + memory.square().mean()
    return x, seen


def chained(blocks: Any, x: torch.Tensor) -> Any:
    for block in blocks:
        x = block(x)
    return x, torch.zeros(())


WAYS: dict[str, Any] = {
    "list": (IntoList, by_list),
    "dict": (IntoDict, by_dict),
    "dataclass": (IntoObject, by_dataclass),
    "attributes": (IntoObject, by_attributes),
    "memory": (IntoMemory, by_memory),
}


def loss_of(model: Callable[..., Any], inputs: torch.Tensor) -> torch.Tensor:
    output, seen = model(inputs)
    return output.square().mean() + 0.3 * seen


def train(
    placement: Placement, strategy: str, model: nn.Module, precision: Any = "fp32"
) -> list[float]:
    with unipar.Session(
        strategy, device="cpu", placement=placement, precision=precision
    ) as session:
        engine = session.prepare(model, optimizer={"name": "sgd", "lr": 0.1})
        share = BATCH // placement.size
        own = slice(placement.rank * share, (placement.rank + 1) * share)
        return [
            engine.train_step(Batch((MicroBatch(inputs[own], share),), BATCH), loss_of).loss
            for inputs in batches()
        ]


def train_way(placement: Placement, strategy: str, way: str, precision: str) -> list[float]:
    return train(placement, strategy, Model(*WAYS[way]), precision)


@pytest.mark.parametrize("way", WAYS)
def test_what_blocks_write_is_not_lost(world_pool: Any, way: str) -> None:
    for losses in world_pool(2).run(train_way, "fsdp", way, "fp32"):
        assert losses == pytest.approx(by_hand(Model(*WAYS[way]), loss_of), rel=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_nor_is_it_where_inputs_are_cast(world_pool: Any, way: str) -> None:
    for losses in world_pool(2).run(train_way, "fsdp", way, "bf16"):
        assert losses == pytest.approx(by_hand(Model(*WAYS[way]), loss_of), rel=0.03)


class Changing(Part):
    def __init__(self, change: Callable[..., Any]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(x, self.down(self.hidden(x.clone())))
        return x


@pytest.mark.parametrize(
    "change", [torch.Tensor.add_, lambda x, y: x[:, :2].copy_(y[:, :2])], ids=["whole", "part"]
)
def test_an_input_changed_in_place_is_refused(world_pool: Any, change: Any) -> None:
    def run(placement: Placement) -> Any:
        return train(placement, "fsdp", Model(lambda: Changing(change), chained))

    with pytest.raises(ConfigError, match=r"changed in place.*x = x \+ y in place of x \+= y"):
        world_pool(2).run(run)


class Aside(Part):
    """What the loss depends on is in an attribute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aside = self.down(self.hidden(x))
        return self.aside.detach()


def test_a_pass_that_is_not_seen_is_explained(world_pool: Any) -> None:
    def run(placement: Placement) -> Any:
        blocks = nn.Sequential(*(Aside() for _ in range(2)))
        with unipar.Session("fsdp", device="cpu", placement=placement) as session:
            engine = session.prepare(blocks, optimizer={"name": "sgd", "lr": 0.1})

            def loss(model: Callable[..., Any], inputs: torch.Tensor) -> torch.Tensor:
                model(inputs)
                parts: list[Any] = list(blocks)
                return torch.stack([block.aside.square().mean() for block in parts]).sum()

            engine.train_step(Batch((MicroBatch(batches()[0], BATCH),), BATCH), loss)

    with pytest.raises(ConfigError, match=r"freed after the forward pass.*Return all"):
        world_pool(2).run(run)


class Twice(Part):
    def forward(self, x: torch.Tensor, one: list[Any], other: list[Any]) -> torch.Tensor:
        one.append(x)
        return x + self.down(self.hidden(x))


def test_one_list_given_twice_and_written_to_is_refused(world_pool: Any) -> None:
    def twice(blocks: Any, x: torch.Tensor) -> Any:
        held = [x]
        for block in blocks:
            x = block(x, held, held)
        return x, torch.zeros(())

    def run(placement: Placement) -> Any:
        return train(placement, "fsdp", Model(Twice, twice))

    with pytest.raises(ConfigError, match=r"module 'blocks\.0' is given one list twice"):
        world_pool(2).run(run)


class Scaled(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(Part() for _ in range(2)))
        self.temperature = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize("strategy", ["fsdp", "mesh:dp_shard=2"])
def test_a_parameter_without_dimensions_is_refused_before_anything_starts(strategy: str) -> None:
    with pytest.raises(ConfigError, match=r"'temperature' has no dimension.*torch\.ones\(1\)"):
        unipar.fit(
            Scaled(), batches()[0], loss=loss_of, strategy=strategy, devices=2, global_batch_size=8
        )


def shared(*, module: bool) -> nn.Module:
    blocks: Any = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3))
    )
    if module:
        blocks[2][1] = blocks[0][1]
    else:
        blocks[2][1].weight = blocks[0][1].weight
    return blocks


@pytest.mark.parametrize("module", [True, False])
@pytest.mark.parametrize("strategy", ["fsdp", "mesh:dp_shard=2"])
def test_what_two_units_share_is_refused(world_pool: Any, strategy: str, module: bool) -> None:
    def run(placement: Placement) -> Any:
        return train(placement, strategy, shared(module=module))

    with pytest.raises(ConfigError, match=r"'0\.1\.weight' and '2\.1\.weight' are one parameter"):
        world_pool(2).run(run)
