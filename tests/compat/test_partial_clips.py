"""Parameters that are not those of one whole model are clipped where ranks have gradients whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from faces import under
from torch import nn

from unipar.compat.accelerate import Accelerator
from unipar.compat.fabric import Fabric
from unipar.compat.run import current
from unipar.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DATA = torch.randn(4, 2, 3, 4, generator=torch.Generator().manual_seed(0))
"""Of each step and rank three samples."""
Clip = Callable[[Any, list[list[nn.Parameter]]], Any]
"""Takes what clips, and the parameters of two models; gives a norm back, or nothing."""


def head(clips: Any, models: list[list[nn.Parameter]]) -> Any:
    return clips.clip_grad_norm_(models[0][:1], 0.1)


def single(clips: Any, models: list[list[nn.Parameter]]) -> Any:
    return clips.clip_grad_norm_(models[0][1], 0.01)


def jointly(clips: Any, models: list[list[nn.Parameter]]) -> Any:
    return clips.clip_grad_norm_((one for model in models for one in model), 0.1)


def by_the_largest(clips: Any, models: list[list[nn.Parameter]]) -> Any:
    return clips.clip_grad_norm_(models[1], 0.05, norm_type=float("inf"))


def values(clips: Any, models: list[list[nn.Parameter]]) -> Any:
    return clips.clip_grad_value_(models[0], 0.02)


def one_after_the_other(clips: Any, models: list[list[nn.Parameter]]) -> Any:
    values(clips, models)
    return jointly(clips, models)


CLIPS = [head, single, jointly, by_the_largest, values, one_after_the_other]


def nets() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Linear(4, 2), nn.Linear(4, 2)


def norms_of(*models: nn.Module) -> list[float]:
    return [float(p.detach().double().norm()) for one in models for p in one.parameters()]


def by_hand(clip: Clip) -> list[float]:
    """Two replicas' mean; nothing of unipar in it."""
    models = nets()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in models]
    found: list[float] = []
    for shares in DATA:
        for share in shares:
            sum((one(share) ** 2).mean() for one in models).backward()  # pyright: ignore
        for one in models:
            for parameter in one.parameters():
                parameter.grad /= len(shares)  # pyright: ignore[reportOperatorIssue]
        norm = clip(nn.utils, [list(one.parameters()) for one in models])
        found += [] if norm is None else [float(norm)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found += norms_of(*models)
    return found


def by_accelerate(clip: Clip) -> list[float]:
    accelerator = Accelerator()
    models = nets()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in models]
    prepared: Any = [accelerator.prepare(*pair) for pair in zip(models, optimizers, strict=True)]
    found: list[float] = []
    for shares in DATA:
        share = shares[accelerator.process_index]
        accelerator.backward(sum((one(share) ** 2).mean() for one, _ in prepared))  # pyright: ignore
        norm = clip(accelerator, [list(one.parameters()) for one, _ in prepared])
        found += [] if norm is None else [float(norm)]
        for _, optimizer in prepared:
            optimizer.step()
            optimizer.zero_grad()
        found += [
            float(p.detach().double().norm()) for one, _ in prepared for p in one.parameters()
        ]
    return found


@pytest.mark.parametrize("clip", CLIPS)
def test_what_is_clipped_is_what_torch_would_clip(world_pool: Any, clip: Clip) -> None:
    wanted = by_hand(clip)
    for found in world_pool(2).run(under, "ddp", by_accelerate, clip):
        assert found == pytest.approx(wanted, rel=1e-5)


def alone(act: Callable[[Any, Any, torch.Tensor], Any]) -> str:
    accelerator = Accelerator()
    net = nets()[0]
    model, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
    x = DATA[0, current.placement().rank]
    with pytest.raises(ConfigError) as refusal:
        act(accelerator, model, x)
    return str(refusal.value)


def after_a_pass(clip: Clip, accelerator: Any, model: Any, x: torch.Tensor) -> None:
    accelerator.backward(model(x).square().mean())
    clip(accelerator, [list(model.parameters())] * 2)


def with_what_no_optimizer_has(accelerator: Any, other: Any, x: torch.Tensor) -> None:
    net = Net()
    model, _ = accelerator.prepare(net, torch.optim.SGD(net.outward.parameters(), lr=0.5))
    accelerator.backward(model(x).square().mean())
    accelerator.clip_grad_norm_(model.parameters(), 0.1)


def before_one(accelerator: Any, model: Any, x: torch.Tensor) -> None:
    head(accelerator, [list(model.parameters())])


def of_no_model(accelerator: Any, model: Any, x: torch.Tensor) -> None:
    head(accelerator, [list(nn.Linear(2, 2).parameters())])


@pytest.mark.parametrize(
    ("strategy", "act", "said"),
    [
        ("fsdp", partial(after_a_pass, head),
         "clip_grad_norm_(max_norm=0.1, norm_type=2) of 1 parameters: this strategy divides "
         "gradients among ranks"),
        ("fsdp", partial(after_a_pass, values),
         "clip_grad_value_: this strategy divides gradients among ranks"),
        ("fsdp", with_what_no_optimizer_has,
         "accelerator.clip_grad_norm_: the optimizer has some of the parameters that are clipped, "
         "and not inward.weight, inward.bias. Strategy 'fsdp'"),
        ("ddp", before_one, "of 1 parameters came before accelerator.backward(loss)"),
        ("ddp", of_no_model, "none is of a model that accelerator.prepare has"),
    ],
)  # fmt: skip
def test_what_cannot_be_clipped_is_refused(
    world_pool: Any, strategy: str, act: Callable[..., Any], said: str
) -> None:
    for found in world_pool(2).run(under, strategy, alone, act):
        assert said in found


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nets()[0], nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outward(self.inward(x))


def head_by_hand() -> list[float]:
    model, found = Net(), []
    optimizer = torch.optim.SGD(model.outward.parameters(), lr=0.5)
    for shares in DATA:
        for share in shares:
            (model(share).square().mean() / len(shares)).backward()
        found.append(float(nn.utils.clip_grad_norm_(model.outward.parameters(), 0.1)))
        optimizer.step()
        model.zero_grad()
        found += norms_of(model)
    return found


def head_by_fabric(strategy: str) -> list[float]:
    fabric, net, found = Fabric(strategy=strategy), Net(), []
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.outward.parameters(), lr=0.5))
    for shares in DATA:
        fabric.backward(model(shares[fabric.global_rank]).square().mean())
        found.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.1)))  # pyright: ignore
        optimizer.step()
        optimizer.zero_grad()
        found += norms_of(model)
    return found


def test_fabric_clips_what_the_optimizer_steps(world_pool: Any) -> None:
    for found in world_pool(2).run(under, "ddp", head_by_fabric, "auto"):
        assert found == pytest.approx(head_by_hand(), rel=1e-5)
    with pytest.raises(ConfigError, match="the optimizer has some of the model's parameters"):
        world_pool(2).run(under, "fsdp", head_by_fabric, "auto")
