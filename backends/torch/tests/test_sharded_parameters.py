"""Under fsdp a parameter used outside of the model's forward is refused, in words of our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.autograd import grad
from torch.distributed.tensor import DTensor

import unipar
from unipar.errors import ConfigError
from unipar.strategy import Engine
from unipar.world import Placement

DATA = torch.linspace(-1, 1, 32).reshape(8, 4)


def sgd(named: Any) -> optim.Optimizer:
    return optim.SGD([p for _, p in named], lr=0.1)


def mean_square(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def penalized(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return mean_square(model, batch) + 0.01 * sum(p.square().sum() for p in model.parameters())


def penalized_by_norms(model: Any, batch: torch.Tensor) -> unipar.LossSum:
    return unipar.LossSum(model.weight.norm(), len(batch))


def penalized_whole(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return mean_square(model, batch) + 0.01 * whole(model.weight.square().sum())


def projected(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(batch, model.weight).square().mean()


def by_train_step(loss: Any) -> Callable[[Engine, torch.Tensor], None]:
    return lambda engine, data: engine.train_step(
        unipar.Batch((unipar.MicroBatch(data, len(data)),), 2 * len(data)), loss
    )  # pyright: ignore[reportReturnType]


def by_hand(loss: Any) -> Callable[[Engine, torch.Tensor], None]:
    def step(engine: Engine, data: torch.Tensor) -> None:
        def model(x: torch.Tensor) -> torch.Tensor:
            return engine(x)

        model.parameters = engine.module.parameters  # pyright: ignore
        model.weight = engine.module.weight  # pyright: ignore
        engine.backward(loss(model, data), num_items=len(data))

    return step


def evaluated(engine: Engine, data: torch.Tensor) -> None:
    microbatch = unipar.MicroBatch(data, len(data))
    engine.eval_batch(unipar.Batch((microbatch,), len(data)), projected)


def averaged(engine: Engine, data: torch.Tensor) -> None:
    target = torch.zeros(3, 4)
    with torch.no_grad():
        target.mul_(0.9).add_(engine.module.weight, alpha=0.1)  # pyright: ignore


def measured(engine: Engine, data: torch.Tensor) -> None:
    if engine.module.weight.norm().item() > 1e6:  # pyright: ignore
        raise ValueError("the weights have exploded")


def summed(engine: Engine, data: torch.Tensor) -> None:
    torch.distributed.all_reduce(engine.module.weight.detach().abs().sum())  # pyright: ignore


def formatted(engine: Engine, data: torch.Tensor) -> None:
    print(f"{engine.module.weight.norm():.6f}")  # pyright: ignore


def counted(engine: Engine, data: torch.Tensor) -> None:
    torch.count_nonzero(engine.module.weight).item()  # pyright: ignore


def flattened(engine: Engine, data: torch.Tensor) -> None:
    nn.utils.parameters_to_vector(engine.module.parameters())


def differentiated(engine: Engine, data: torch.Tensor) -> None:
    # None where it is allowed that no graph leads there, and a shard's is never in one.
    loss = engine(data).square().mean()
    weights = [*engine.module.parameters()]
    torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)


class Part(nn.Linear):
    def forward(self, input: torch.Tensor, number: bool = False) -> torch.Tensor:
        return input * float(self.weight.norm()) if number else super().forward(input)


class Parted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.rest = Part(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.part(x))


class Around(nn.Module):
    """What computes with a model's parameters outside of it, in a forward of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.model.part.weight)  # pyright: ignore


def said_of_parts(placement: Placement) -> list[str]:
    said: list[str] = []
    with unipar.Session("fsdp", placement=placement) as session:
        engine: Any = session.prepare(Parted(), optimizer=sgd)
        model: Any = engine.module
        for act in (
            lambda: model.part(DATA),
            lambda: model.part(DATA, number=True),
            lambda: Around(model)(DATA),
        ):
            try:
                act()
            except Exception as error:
                said.append(str(session.explained(error) or error))
        # Called as a whole it is gathered, also by the module itself.
        said += [str(engine(DATA).shape), str(model(DATA).shape)]
    return said


def test_a_part_of_the_model_that_is_called_by_itself_is_told(world_pool: Any) -> None:
    part, number, around, *whole = world_pool(2).run(said_of_parts)[0]
    for one in (part, number):
        assert "a Part, which is a part of the model, was called by itself" in one
        assert "strategy='zero2' or 'ddp'" in one
        assert "L2 penalty" not in one
    assert around.startswith("a parameter of the model was used outside")
    assert whole == ["torch.Size([8, 1])"] * 2


def differentiated_by_name(engine: Engine, data: torch.Tensor) -> None:
    # Of this module's own name for it, which was there before any model was divided.
    grad(engine(data).square().mean(), [*engine.module.parameters()], allow_unused=True)


def differentiated_in_batch(engine: Engine, data: torch.Tensor) -> None:
    out = engine(data)
    every = torch.ones(2, *out.shape)
    grad(out, engine.module.weight, every, is_grads_batched=True)  # pyright: ignore


def left_to_some(engine: Engine, data: torch.Tensor) -> None:
    engine(data).square().mean().backward(inputs=[*engine.module.parameters()])


def outcome(placement: Placement, act: Callable[[Engine, torch.Tensor], None]) -> str:
    try:
        with unipar.Session("fsdp", placement=placement) as session:
            act(session.prepare(nn.Linear(4, 3), optimizer=sgd), DATA[placement.rank :: 2])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (by_train_step(penalized), ["the loss is a DTensor", "weight_decay"]),
        (by_hand(penalized), ["the loss is a DTensor"]),
        (by_train_step(penalized_by_norms), ["the loss is a DTensor"]),
        (by_train_step(penalized_whole), ["loss depends on parameter 'weight'", "weight_decay=2c"]),
        (by_hand(penalized_whole), ["the loss depends on parameter 'weight'"]),
        (by_train_step(projected), ["outside of the model's forward pass", "weight_decay=2c"]),
        (evaluated, ["outside of the model's forward pass"]),
        (averaged, ["outside of the model's forward pass", "[p.detach().clone() for p in"]),
        (measured, ["a number was read", "part. For a number that is logged", "full_tensor()"]),
        (summed, ["a tensor that is divided among ranks", "full_tensor()"]),
        (formatted, ["a number was read", "full_tensor()"]),
        pytest.param(
            counted,
            ["a number was read"],
            marks=pytest.mark.skipif(
                torch.__version__ < "2.11", reason="torch 2.8 counts no DTensor, and says so"
            ),
        ),
        (
            flattened,
            ["a tensor that is divided among ranks", "zero2", "Sharding propagation failed"],
        ),
        (differentiated, ["autograd.grad was asked for the gradient of parameter 'weight'"]),
        (differentiated_by_name, ["autograd.grad was asked for the gradient of parameter"]),
        (differentiated_in_batch, ["autograd.grad was asked for the gradient of parameter"]),
        (left_to_some, ["backward(inputs=…) was asked for the gradient of parameter 'weight'"]),
    ],
)
def test_a_shard_used_as_if_it_were_the_parameter_is_refused(
    world_pool: Any, act: Callable[[Engine, torch.Tensor], None], says: list[str]
) -> None:
    for said in world_pool(2).run(outcome, act):
        for part in says:
            assert part in said


def test_fit_says_so_too(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"outside of the model's forward pass.*'fsdp'") as caught:
        unipar.fit(
            nn.Linear(4, 3),
            DATA,
            strategy="fsdp",
            device="cpu",
            devices=1,
            global_batch_size=8,
            loss=projected,
            output_dir=tmp_path,
            checkpoint=False,
            progress=False,
        )
    assert "mixed torch.Tensor and DTensor" in str(caught.value.__cause__)


def remedies(placement: Placement, strategy: str) -> dict[str, Any]:
    """What the messages advise, each beside what a plain loop would do."""

    class Penalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.inner(x), self.inner.weight.norm()

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        out, penalty = model(batch)
        return out.square().mean() + 0.1 * penalty

    def decayed(named: Any) -> optim.Optimizer:
        return optim.SGD([p for _, p in named], lr=0.1, weight_decay=0.02)

    with unipar.Session(strategy, placement=placement) as session:
        engine = session.prepare(Penalized(), optimizer=decayed)
        target = [p.detach().clone() for p in engine.module.parameters()]
        # Ranks of unequal share: five samples over two.
        for batch in session.loader(DATA, global_batch_size=5, shuffle=False):
            engine.train_step(batch, loss)
            for own, p in zip(target, engine.module.parameters(), strict=True):
                with torch.no_grad():
                    own.mul_(0.9).add_(p, alpha=0.1)
        weights = [whole(p.detach()) for p in engine.module.parameters()]
        norms = [whole(p.detach().norm()).item() for p in engine.module.parameters()]
        return {"weights": weights, "average": [whole(own) for own in target], "norms": norms}


def test_what_is_advised_makes_the_run_of_a_plain_loop(world_pool: Any) -> None:
    plain = world_pool(1).run(remedies, "single")[0]
    for found in world_pool(2).run(remedies, "fsdp"):
        torch.testing.assert_close(found, plain)


def prepared_twice(placement: Placement, make: Callable[[nn.Linear], Any]) -> str:
    encoder = nn.Linear(4, 4)
    second = make(encoder)
    with unipar.Session("fsdp", placement=placement) as session:
        session.prepare(encoder, optimizer=sgd, name="first")
        with pytest.raises(ConfigError) as refused:
            session.prepare(second, optimizer=sgd, name="second")
        session.prepare(nn.Linear(4, 4), optimizer=sgd, name="third")
    return str(refused.value)


def tied(encoder: nn.Linear) -> nn.Module:
    decoder = nn.Linear(4, 4)
    decoder.weight = encoder.weight
    return decoder


@pytest.mark.parametrize(
    "make",
    [
        lambda encoder: encoder,
        lambda encoder: nn.Sequential(encoder, nn.Linear(4, 2)),
        tied,
        lambda encoder: lambda: encoder,
    ],
    ids=["itself", "a part of another", "one tensor", "by a function"],
)
def test_a_parameter_of_two_engines_is_refused(world_pool: Any, make: Any) -> None:
    for said in world_pool(2).run(prepared_twice, make):
        assert "for engine 'second' is engine 'first's already" in said


class Outside(nn.Module):
    """Has a unit, and a layer outside of it; may ask itself something without gradients."""

    def __init__(self, *, asks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.asks = asks
        self.block, self.head = nn.Sequential(nn.Linear(4, 3)), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, *, ask: bool = True) -> torch.Tensor:
        out = self.head(self.block(x).tanh())
        if ask and self.asks:
            with torch.no_grad():
                out = out + self(x, ask=False)
        return self.head(out)


def kept_gathered(placement: Placement, strategy: Any, asks: bool) -> list[torch.Tensor]:
    """Losses and outputs of a run that changes weights wherever a gathered copy might be left."""
    data = DATA[placement.rank :: placement.size]
    with unipar.Session(strategy, placement=placement) as session:
        net: Any = Outside(asks=asks)
        engine = session.prepare(net, optimizer=sgd, name="student")
        frozen: Any = Outside(asks=False).requires_grad_(requires_grad=False)
        teacher = session.prepare(frozen, name="teacher")
        found = []
        for _ in range(3):
            target = teacher(data)
            engine.backward((engine(data) - target).square().mean(), num_items=len(data))
            engine(data)
            engine.step()
            with torch.no_grad():
                found.append(engine(data).square().mean() + target.square().mean())
                # What is changed after a pass stays changed, and the next pass computes with it.
                for weight in (net.head.weight, net.block[0].weight, frozen.head.weight):
                    weight.mul_(0.9)
        whole_batch = [torch.stack(session.world.gather(one)).mean(0) for one in found]
        return [*whole_batch, *(whole(p.detach()) for p in net.parameters())]


# One that calls itself, FSDP takes where what is gathered is kept.
@pytest.mark.parametrize(
    ("options", "asks"),
    [
        ({"sharding": "full"}, False),
        ({"sharding": "grad_op"}, False),
        ({"sharding": "grad_op"}, True),
        ({"keep_root": True}, False),
        ({"keep_root": True, "sharding": "hybrid"}, False),
    ],
)
def test_no_gathered_copy_is_left_where_weights_are_changed(
    world_pool: Any, options: dict[str, Any], asks: bool
) -> None:
    plain = world_pool(1).run(kept_gathered, "single", asks)[0]
    strategy = {"name": "fsdp", "wrap": ["Sequential"], **options}
    for found in world_pool(2).run(kept_gathered, strategy, asks):
        torch.testing.assert_close(found, plain)


def reset(p: torch.Tensor) -> None:
    nn.init.normal_(p, std=0.1)


def restarted(p: torch.Tensor) -> None:
    p.data.uniform_(-1, 1)
    p.data[:, 1].exponential_()


def scattered(p: torch.Tensor) -> None:
    with torch.no_grad():
        p.add_(torch.randn_like(p) * p.detach().bernoulli(0.5))


def pruned(p: torch.Tensor) -> None:
    with torch.no_grad():
        p.copy_(nn.functional.dropout(p, 0.5) + torch.bernoulli(p.sigmoid()))
        p.add_(torch.bernoulli(p, 0.5)).add_(torch.normal(p, 0.1))


def jittered(p: torch.Tensor) -> None:
    p.data.mul_(torch.empty_like(p.data).bernoulli_(0.5)).add_(torch.rand_like(p.data))


DRAWS = (reset, restarted, scattered, pruned, jittered)


def drawn(module: nn.Module, seed: int) -> list[Any]:
    torch.manual_seed(seed)
    found = []
    for draw in DRAWS:
        draw(module.weight)  # pyright: ignore[reportArgumentType]
        found.append(whole(module.weight.detach()).tolist())  # pyright: ignore
    # The generator has moved on as with a replica.
    return [*found, torch.rand(()).item()]


def drawn_under(placement: Placement, strategy: str, seeds: tuple[int, int]) -> list[Any]:
    torch.manual_seed(0)
    with unipar.Session(strategy, placement=placement) as session:
        engine = session.prepare(nn.Linear(4, 3), optimizer=sgd)
        return drawn(engine.module, seeds[placement.rank])


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp:sharding=hybrid"])
@pytest.mark.parametrize("seeds", [(9, 9), (9, 10)])
def test_random_numbers_for_weights_are_those_of_the_whole(
    world_pool: Any, strategy: str, seeds: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    expected = drawn(nn.Linear(4, 3), 9)
    found = world_pool(2).run(drawn_under, strategy, seeds)
    for rank, values in enumerate(found):
        torch.testing.assert_close(values[:-1], expected[:-1])
        assert (values[-1] == expected[-1]) == (seeds[rank] == 9)
