"""What scripts do with gradients between their calls, held against PyTorch on one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from plain_scripts import Heads, batches, check, plainly
from torch import nn
from torch.func import jacrev, vmap
from torch.nn import functional

from unipar.compat.native.calls import clip_grad_norm_
from unipar.compat.run import current
from unipar.world import World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SGD = torch.optim.SGD


def small() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def values(*modules: nn.Module) -> list[float]:
    return [p.detach().sum().item() for module in modules for p in module.parameters()]


def frozen_meanwhile() -> list[float]:
    """One layer learns of the first of two passes alone."""
    model, found = small(), []
    optimizer = SGD(model.parameters(), lr=0.1)
    for number, x in enumerate(batches(8, 8, 8, 8)):
        model[0].requires_grad_(number != 1)
        model(x).square().mean().backward()
        found += (
            [float(cast(torch.Tensor, p.grad).norm()) for p in model.parameters()]
            if number == 1
            else []
        )
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return found + values(model)


def zeros_for_none() -> list[float]:
    """Weights that a loss leaves out decay, and move on."""
    model, found = Heads(), []
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for number, x in enumerate(batches(8, 8, 8, 8)):
        (model if number > 1 else optimizer).zero_grad(set_to_none=False)
        model(x, number % 2).square().mean().backward()
        optimizer.step()
        found += [float(p.grad is None) for p in model.parameters()]
    return found + values(model)


def grown() -> list[float]:
    """An optimizer is given the parameters of another model, which no engine has."""
    model, head = small(), nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, x in enumerate(batches(8, 7, 8, 8)):
        output = model(x)
        (head(output) if number > 1 else output).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 1:
            optimizer.add_param_group({"params": head.parameters(), "lr": 0.2})
    return values(model, head)


def set_by_hand() -> list[float]:
    """Gradients of two losses that are put together, then clipped; and a step once more."""
    model, found = small(), []
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x in batches(8, 7, 8):
        optimizer.zero_grad()
        output = model(x)
        weights = list(model.parameters())
        first, second = (
            torch.autograd.grad(output[:, k].square().mean(), weights, retain_graph=True)
            for k in range(2)
        )
        for weight, one, other in zip(weights, first, second, strict=True):
            weight.grad = one + other.clamp(-0.1, 0.1)
        found.append(float(nn.utils.clip_grad_norm_(weights, 0.5)))
        optimizer.step()
    optimizer.step()
    return found + values(model)


def penalized() -> list[float]:
    """A penalty of weights with a backward pass of its own: after, before, and without another."""
    model = small()
    optimizer = SGD(model.parameters(), lr=0.1)

    def penalty() -> torch.Tensor:
        return 0.1 * torch.stack([p.square().sum() for p in model.parameters()]).sum()

    for number, x in enumerate(batches(8, 7, 8, 8)):
        optimizer.zero_grad()
        if number == 1:
            penalty().backward()
        if number != 2:
            model(x).square().mean().backward()
        if number != 1:
            penalty().backward()
        optimizer.step()
    return values(model)


def penalized_at_first() -> list[float]:
    model = small()
    optimizer = SGD(model.parameters(), lr=0.1)
    cast(nn.Linear, model[0]).weight.square().sum().backward()
    model(*batches(8)).square().mean().backward()
    optimizer.step()
    return values(model)


def looked_at_afterwards() -> list[float]:
    model = small()
    optimizer = SGD(model.parameters(), lr=0.1)
    model(*batches(8)).square().mean().backward()
    optimizer.step()
    return [p.grad.sum().item() for p in model.parameters() if p.grad is not None]


def together(*, clips: bool = True) -> list[float]:
    """An encoder and a decoder with an optimizer each, and one loss."""
    encoder, decoder = small(), nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 6))
    optimizers = [torch.optim.Adam(encoder.parameters(), 0.05), SGD(decoder.parameters(), lr=0.1)]
    found = []
    for number, x in enumerate(batches(8, 7, 8, 8, 6)):
        for one in optimizers:
            one.zero_grad()
        loss = functional.mse_loss(decoder(encoder(x)), x)
        loss.backward()
        if number == 2:
            (0.1 * decoder(encoder(x)).square().mean()).backward()
        models = (encoder, decoder) if clips else ()
        norms = [nn.utils.clip_grad_norm_(one.parameters(), 0.1) for one in models]
        for one in optimizers:
            one.step()
        found += [loss.item(), *map(float, norms)]
    return found + values(encoder, decoder)


def in_turn() -> list[float]:
    """A critic that keeps what the generator's loss leaves in it."""
    generator, critic = small(), nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    models = (generator, critic)
    first, second = (SGD(one.parameters(), lr=0.1, momentum=0.5) for one in models)
    for x in batches(8, 7, 8):
        functional.softplus(-critic(generator(x))).mean().backward()
        first.step()
        first.zero_grad()
        functional.softplus(-critic(x[:, :2])).mean().backward()
        second.step()
        second.zero_grad()
    return values(*models)


def in_stages() -> list[float]:
    """Adam, then L-BFGS beside it, which computes the loss more than once in a step."""
    model, found = small(), []
    first = torch.optim.Adam(model.parameters(), lr=0.05)
    xs = batches(8, 7, 8, 8)

    def loss_of(optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for x in xs[:2]:
        found.append(loss_of(first, x).item())
        first.step()
    second = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    found += [second.step(partial(loss_of, second, x)).item() for x in xs[2:]]
    loss_of(first, xs[0])
    first.step()
    return [*found, first.state_dict()["state"][0]["step"].item(), *values(model)]


def one_after_another(*, clears: bool = True) -> list[float]:
    """A stage after another, each with an optimizer of its own, which goes before the next."""
    model, found = small(), []
    for _ in range(2):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for at, x in enumerate(batches(8, 7, 8)):
            loss = model(x).square().mean()
            if clears or at:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        del optimizer
    return found + values(model)


def with_heads() -> list[float]:
    """Other heads in turn, each with an optimizer of its own, beside the ones of before."""
    model, found, kept = small(), [], []
    for stage, x in enumerate(batches(8, 7, 8, 8)):
        if stage:
            model[2] = nn.Linear(5, 3)
            model[0].requires_grad_(stage != 1)
        updated = model[2] if stage == 1 else model
        kept.append(torch.optim.SGD(updated.parameters(), lr=0.05, momentum=0.9))
        for _ in range(2):
            kept[-1].zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            kept[-1].step()
            found.append(loss.item())
    return found + values(model)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.linear = nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


def layers_by_themselves() -> list[float]:
    """A batch norm that the script calls, too, with a batch that each rank has whole."""
    model = Normalized()
    optimizer = SGD(model.parameters(), lr=0.1)
    for x in batches(4, 5, 4):
        optimizer.zero_grad()
        (model(x).square().mean() + model.norm(2 * x).square().mean()).backward()
        optimizer.step()
    assert model.norm.running_var is not None
    return [*values(model), *model.norm.running_var.tolist()]


def clipped_before_more() -> list[float]:
    """Clipped, once or twice, and then what is left is added to: by a penalty, and by a batch."""
    model, found = small(), []
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, x in enumerate(batches(8, 7, 8, 8, 8)):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        norms = [clip_grad_norm_(model.parameters(), 0.1)]
        if number % 2:
            (0.1 * cast(nn.Linear, model[0]).weight.square().sum()).backward()
        else:
            model(2 * x).square().mean().backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.2 if number else 9.0))
        optimizer.step()
        found += map(float, norms)
    return found + values(model)


def looked_at() -> list[float]:
    """Gradients that are read between passes, after them and after the step, and those of none."""
    model, found = Heads(), []
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, x in enumerate(batches(8, 7, 8, 8)):
        optimizer.zero_grad(set_to_none=number != 1)
        model(x, 0).square().mean().backward()
        found.append(float(sum(p.grad is None for p in model.parameters())))
        model(x, number % 2).square().mean().backward()
        ahead = model(x, 0)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found += [grad.norm().item() for grad in grads]
        (0.1 * cast(nn.Linear, model.heads[0]).weight.abs().sum()).backward()
        for grad in grads:
            grad.clamp_(-0.2, 0.2)
        ahead.mean().backward()
        optimizer.step()
        found += [0.0 if p.grad is None else p.grad.sum().item() for p in model.parameters()]
    return found + values(model)


def by_closures() -> list[float]:
    """The first call of the model is in a closure; and outputs that have weights of their own."""
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def loss_of(x: torch.Tensor) -> float:
        optimizer.zero_grad()
        output = model(x)
        output.backward(gradient=output.detach() / output.numel())
        return output.sum().item()

    found = [optimizer.step(partial(loss_of, x)) for x in batches(8, 7, 8)]
    return [*map(float, cast(Any, found)), *values(model)]


def adversaries() -> list[float]:
    """A loss of the generator, which goes through a critic that has stepped already."""
    generator, critic = small(), nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    making, judging = SGD(generator.parameters(), lr=0.1), SGD(critic.parameters(), lr=0.1)
    found = []
    for x in batches(8, 7, 8):
        judging.zero_grad()
        critic(x[:, :2]).mean().backward()
        made = generator(x)
        (-critic(made.detach()).mean()).backward()
        judging.step()
        making.zero_grad()
        loss = critic(made).mean()
        loss.backward()
        making.step()
        found.append(loss.item())
    return found


def slopes() -> list[float]:
    """Penalties of a critic's gradients, each with a backward pass of its own."""
    generator, critic = small(), nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    making, judging = SGD(generator.parameters(), lr=0.1), SGD(critic.parameters(), lr=0.1)
    found = []
    for number, x in enumerate(batches(8, 7, 8, 8)):
        made = generator(x)
        critic.zero_grad()
        real = x[:, :2].clone().requires_grad_()
        score = critic(real)
        functional.softplus(-score).mean().backward(retain_graph=True)
        (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
        (5 * slope.square().sum(1).mean()).backward()
        if number % 2:
            critic(made.detach()).mean().backward()
            mixed = (0.3 * real + 0.7 * made).detach().requires_grad_()
            (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
            (slope.norm(dim=1) - 1).square().mean().backward()
        found += [p.grad.sum().item() for p in critic.parameters() if p.grad is not None]
        judging.step()
        generator.zero_grad()
        (-critic(made).mean()).backward()
        making.step()
    return found + values(generator, critic)


def in_pieces() -> list[float]:
    """Backward passes of several tensors, to some weights alone, and with a graph of their own."""
    model, found = small(), []
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x in batches(8, 7, 8):
        optimizer.zero_grad()
        output = model(x)
        torch.autograd.backward(
            [output, output.mean()], [0.1 * output.detach(), torch.tensor(2.0)], retain_graph=True
        )
        output.square().mean().backward(inputs=list(model[0].parameters()))
        model(2 * x).square().mean().backward(create_graph=True)
        found += [p.grad.sum().item() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return found + values(model)


def head_alone() -> list[float]:
    """An optimizer over the last layer, and gradients of all that are cleared by the model."""
    model, found = small(), []
    optimizer = SGD(model[2].parameters(), lr=0.1)
    for x in batches(8, 7, 8, 8):
        model.zero_grad()
        model(x).square().mean().backward()
        found.append(float(clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
    return found + values(model)


def transformed() -> list[float]:
    """A penalty of the derivatives that torch.func gives, before and after ordinary calls."""
    model, found = small(), []
    optimizer = SGD(model.parameters(), lr=0.1)
    for x in batches(8, 7, 8):
        optimizer.zero_grad()
        slope = cast(torch.Tensor, vmap(jacrev(model))(x))
        loss = model(x).square().mean() + 0.1 * slope.square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found + values(model)


SCRIPTS = [
    frozen_meanwhile, zeros_for_none, grown, set_by_hand, penalized, together, in_turn,
    layers_by_themselves, clipped_before_more, looked_at, by_closures, slopes, in_pieces,
    head_alone, partial(one_after_another, clears=False),
]  # fmt: skip


@pytest.mark.parametrize("act", SCRIPTS, ids=lambda one: getattr(one, "func", one).__name__)
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("horovod", marks=pytest.mark.thorough)])
def test_gradients_are_those_of_one_process(
    world_pool: Any, act: Callable[[], list[float]], strategy: str
) -> None:
    check(world_pool(2).run(plainly, strategy, act), act)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_adversaries_train_in_turn(world_pool: Any, strategy: str) -> None:
    check(world_pool(2).run(plainly, strategy, adversaries), adversaries)


def shaken(by_rank: bool) -> list[float]:
    """Gradients with noise that each rank draws for itself, or none, before they are clipped."""
    model = small()
    optimizer = SGD(model.parameters(), lr=0.1)
    asked: list[Any] = []
    gather = World.gather

    def gathering(world: World, one: Any) -> Any:
        asked.append(one)
        return gather(world, one)

    with pytest.MonkeyPatch.context() as monkeypatch:
        for number, x in enumerate(batches(*[8] * 24)):
            if number == 23:
                # Later than what is looked at in the first steps.
                monkeypatch.setattr(World, "gather", gathering)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if by_rank:
                for p in model.parameters():
                    assert p.grad is not None
                    p.grad.add_(0.1 * current.placement().rank)
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    return [float(len(asked)), *values(model)]


def test_ranks_ask_each_other_where_gradients_were_changed_before_they_are_clipped(
    world_pool: Any,
) -> None:
    (one, _), (other, _) = world_pool(2).run(plainly, "ddp", shaken, True)
    assert one == other
    assert one[0] == 1
    for found, _ in world_pool(2).run(plainly, "ddp", shaken, False):
        assert found[0] == 0


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("horovod", marks=pytest.mark.thorough)])
def test_a_second_optimizer_beside_the_first_has_each_rank_train_the_whole(
    world_pool: Any, strategy: str
) -> None:
    told = "this LBFGS shares its model with Adam, so each of 2 ranks trains by itself what"
    check(world_pool(2).run(plainly, strategy, in_stages), in_stages, told)
    told = "this SGD shares its model with SGD and SGD, so each of 2 ranks trains by itself"
    check(world_pool(2).run(plainly, strategy, with_heads), with_heads, told)


def test_within_transforms_each_rank_computes_the_whole(world_pool: Any) -> None:
    told = "computes all of what Sequential is called with within a transform of torch.func"
    check(world_pool(2).run(plainly, "ddp", transformed), transformed, told)


def test_a_second_stage_begins_by_no_gradients_that_an_engine_has_kept(world_pool: Any) -> None:
    check(world_pool(2).run(plainly, "zero2", one_after_another), one_after_another)
    for said in world_pool(2).run(plainly, "zero2", partial(one_after_another, clears=False)):
        assert "gradients were not cleared since" in said


@pytest.mark.parametrize(
    "act",
    [set_by_hand, penalized, together, in_stages, clipped_before_more, looked_at, by_closures],
    ids=lambda one: one.__name__,
)
def test_so_are_those_of_an_engine_alone(world_pool: Any, act: Callable[[], list[float]]) -> None:
    check(world_pool(1).run(plainly, "single", act), act)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (set_by_hand, "torch.autograd.grad was asked for the gradient of parameter '0.weight'"),
        (in_stages, "another optimizer was built for a model that one trains already"),
        (penalized, "this loss is made of weights of Sequential, and not of a call of it"),
        (partial(together, clips=False), "put them into one nn.Module with one optimizer"),
        (penalized_at_first, "Sequential has gradients from before its first call"),
        (clipped_before_more, "clip_grad_norm_ came before this loss.backward() in one step"),
        (head_alone, "clip_grad_norm_: the optimizer has some of the parameters"),
        (looked_at_afterwards, "parameter.grad was used after the step"),
    ],
)
def test_divided_gradients_are_no_scripts_to_set(
    world_pool: Any, act: Callable[[], list[float]], said: str
) -> None:
    for one in world_pool(2).run(plainly, "fsdp", act):
        assert said in one
