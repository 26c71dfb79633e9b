"""What a user may set, and what is refused before it goes wrong."""

from __future__ import annotations

from importlib import metadata
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError
from torch import nn, optim

from unipar.engine.checks import check_capabilities
from unipar.errors import ConfigError
from unipar.strategy import EngineSpec, registry
from unipar.testing.optimizers import adafactor, layerwise
from unipar.world import Placement
from unipar_colossalai import installed
from unipar_colossalai.options import ColossalAIOptions
from unipar_colossalai.plugins import PLUGINS

ZERO2 = "colossalai:plugin=zero2"


def refusal(strategy: str, model: nn.Module | None = None) -> str:
    """What is said when a run is checked, before any process starts."""
    with pytest.raises(ConfigError) as info:
        check_capabilities(
            registry.resolve(strategy), EngineSpec(model or nn.Linear(2, 2)), Placement(size=2)
        )
    return str(info.value)


def adam(named: Any) -> optim.Optimizer:
    return optim.Adam([p for _, p in named], lr=1e-2)


def step_of(
    placement: Placement, strategy: str, make: Any, loss: Any, optimizer: Any = adam
) -> Any:
    """One step of a model on every rank; the weights after it, or what was refused."""
    from unipar.data.batch import Batch, MicroBatch

    used = registry.resolve(strategy)
    world = used.setup(placement)
    try:
        engine = used.prepare(EngineSpec(make(placement), optimizer), world)
        micro = MicroBatch(torch.ones(2, 2), 2)
        engine.train_step(Batch((micro,), 2 * placement.size), loss)
        weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        kinds = [type(part).__name__ for part in engine.module.modules()]
        engine.close()
        return weights, kinds
    except ConfigError as error:
        return str(error)
    finally:
        used.teardown()
        world.leave()


def plain_loss(model: Any, x: Any) -> torch.Tensor:
    return model(x).square().mean()


# -- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize("plugin", ["moe"])
def test_a_plugin_that_is_not_proved_is_refused_with_what_to_use(plugin: str) -> None:
    with pytest.raises(ConfigError, match=f"plugin='{plugin}' is not offered: .*Use "):
        registry.resolve(f"colossalai:plugin={plugin}")


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("colossalai:tp=2", r"tp=2 cannot be had: .*'colossalai:plugin=hybrid,tp_size=2'"),
        ("colossalai:plugin=hybrid,pp=2", r"pp=2 cannot be had: .*plugin=hybrid,pp_size=2'"),
        ("colossalai:plugin=hybrid,tp_size=2,sp_size=2", r"sp_size=2 .*causal mask.*'mesh:cp=2'"),
        ("colossalai:cp=2", r"cp=2 cannot be had: .*wrong gradients.*'mesh:tp=2,sequence_parallel"),
        ("colossalai:ep=2", r"ep=2 cannot be had: .*no fp32 with ZeRO.*'mesh:ep=2'"),
    ],
)
def test_a_way_to_divide_that_is_not_offered_is_refused_with_what_to_use(
    strategy: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        registry.resolve(strategy)


def test_an_unknown_plugin_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'ddp', 'zero1', 'zero2', .* or 'hybrid'"):
        registry.resolve("colossalai:plugin=zero3")


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("colossalai:plugin=zero2,bucket_cap_mb=5", "bucket_cap_mb has no meaning"),
        ("colossalai:plugin=ddp,reduce_bucket_size_m=1", "reduce_bucket_size_m has no meaning"),
        ("colossalai:plugin=ddp,wrap=none", "wrap has no meaning .*; fsdp only"),
    ],
)
def test_an_option_of_another_plugin_is_refused(strategy: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        registry.resolve(strategy)


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("colossalai:plugin=zero2,native={stage: 1}", "'stage', which follows from the option"),
        ("colossalai:plugin=zero1,native={max_norm: 1.0}", "the run's max_grad_norm"),
        ("colossalai:plugin=zero1,native={precision: bf16}", "the run's precision"),
        ("colossalai:plugin=ddp,native={bucket_cap_mb: 1}", "the option 'bucket_cap_mb'"),
        ("colossalai:plugin=zero2,native={use_fp8: true}", "does not take here"),
        ("colossalai:plugin=zero2,native={verbos: true}", "verbose"),
    ],
)
def test_a_native_argument_that_unipar_owns_or_nobody_proved_is_refused(
    strategy: str, said: str
) -> None:
    assert said in refusal(strategy)


@pytest.mark.parametrize(
    "strategy",
    [
        "colossalai:plugin=ddp,native={check_reduction: true}",
        "colossalai:plugin=ddp,static_graph=true,bucket_cap_mb=1",
        "colossalai:plugin=ddp,gradient_as_bucket_view=false,broadcast_buffers=false",
        "colossalai:plugin=zero1,native={verbose: true},reduce_bucket_size_m=1",
        "colossalai:plugin=zero2,reduce_bucket_size_m=1",
    ],
)
def test_options_reach_the_plugin_and_change_no_number(strategy: str, world_pool: Any) -> None:
    results = world_pool(2).run(step_of, strategy, same_everywhere, plain_loss)
    expected = same_everywhere(Placement())
    optimizer = adam(expected.named_parameters())
    plain_loss(expected, torch.ones(4, 2)).backward()
    optimizer.step()
    for weights, _ in results:
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-6, atol=0)


def test_each_option_is_some_plugins_and_each_plugin_can_be_asked_for() -> None:
    fields = ColossalAIOptions.model_fields
    tuned = {name for plugin in PLUGINS.values() for name in plugin.tunes}
    assert tuned == fields.keys() - {"plugin", "native"}
    assert tuple(PLUGINS) == get_args(fields["plugin"].annotation)


def test_options_are_a_public_type() -> None:
    assert ColossalAIOptions(plugin="zero1").stage == 1
    with pytest.raises(ValidationError):
        ColossalAIOptions(stage=1)  # pyright: ignore[reportCallIssue]


# -- what ZeRO would get wrong -------------------------------------------------------------------


def same_everywhere(placement: Placement) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def other_on_each_rank(placement: Placement) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3 + placement.rank)
        return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


@pytest.mark.parametrize("plugin", ["ddp", "zero1", "zero2"])
def test_ranks_that_begin_apart_train_rank_0s_model(plugin: str, world_pool: Any) -> None:
    name = f"colossalai:plugin={plugin}"
    apart = world_pool(2).run(step_of, name, other_on_each_rank, plain_loss)
    alike = world_pool(2).run(step_of, name, same_everywhere, plain_loss)
    for (own, _), (expected, _) in zip(apart, alike, strict=True):
        for key, tensor in expected.items():
            assert torch.equal(own[key], tensor)


class HalfUsed(nn.Module):
    """On rank 1 the loss does not depend on one of its layers."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.used, self.spare = rank, nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) if self.rank else self.used(x) + self.spare(x)


@pytest.mark.parametrize("plugin", ["zero1", "zero2"])
def test_a_weight_without_gradient_is_named_before_ranks_exchange_others(
    plugin: str, world_pool: Any
) -> None:
    said = world_pool(1).run(
        step_of, f"colossalai:plugin={plugin}", lambda placement: HalfUsed(1), plain_loss
    )[0]
    assert "does not depend on 2 of the parameters" in said
    assert "spare.weight" in said
    assert "plugin='ddp' with find_unused_parameters=true" in said


def test_a_weight_without_gradient_on_one_rank_ends_all(world_pool: Any) -> None:
    with pytest.raises(ConfigError, match=r"does not depend on .* spare\.weight"):
        world_pool(2).run(train_half_used)


def train_half_used(placement: Placement) -> None:
    said = step_of(placement, ZERO2, lambda placement: HalfUsed(placement.rank), plain_loss)
    if isinstance(said, str):
        raise ConfigError(said)


def test_ddp_finds_unused_weights_where_it_is_told_to(world_pool: Any) -> None:
    results = world_pool(2).run(
        step_of,
        "colossalai:plugin=ddp,find_unused_parameters=true",
        lambda placement: HalfUsed(placement.rank),
        plain_loss,
    )
    assert not isinstance(results[0], str)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Linear(2, 2).double(), "'weight' is torch.float64"),
        (nn.Linear(2, 2).bfloat16(), "'weight' is torch.bfloat16"),
    ],
)
def test_parameters_that_zero_cannot_take_are_refused(model: nn.Module, said: str) -> None:
    assert said in refusal(ZERO2, model)


class Stochastic(optim.Optimizer):
    """An optimizer of a user's own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])


def test_an_optimizer_that_needs_whole_tensors_is_refused(world_pool: Any) -> None:
    for factory in (adafactor, layerwise):
        said = world_pool(2).run(step_of, ZERO2, same_everywhere, plain_loss, factory)[0]
        assert "cannot be used where ranks divide what it updates" in said


def test_an_elementwise_optimizer_of_a_users_own_is_taken(world_pool: Any) -> None:
    results = world_pool(2).run(
        step_of,
        ZERO2,
        same_everywhere,
        plain_loss,
        lambda named: Stochastic([p for _, p in named]),
    )
    expected = same_everywhere(Placement())
    plain_loss(expected, torch.ones(4, 2)).backward()
    for name, parameter in expected.named_parameters():
        assert parameter.grad is not None
        after = parameter.detach() - 0.1 * parameter.grad
        torch.testing.assert_close(results[1][0][name], after, rtol=1e-6, atol=1e-8)


def test_a_trained_weight_that_the_optimizer_lacks_is_named(world_pool: Any) -> None:
    said = world_pool(1).run(
        step_of, ZERO2, same_everywhere, plain_loss, lambda named: optim.SGD([next(iter(named))[1]])
    )[0]
    assert "parameter '0.bias' requires a gradient, and the optimizer does not hold it" in said


def test_ddp_leaves_batchnorm_what_it_is(world_pool: Any) -> None:
    (_, kinds), *_ = world_pool(1).run(
        step_of,
        "colossalai:plugin=ddp",
        lambda placement: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)),
        plain_loss,
    )
    assert "BatchNorm1d" in kinds


def test_loss_functions_may_read_the_model_and_not_go_around_it(world_pool: Any) -> None:
    def reads(model: Any, x: Any) -> torch.Tensor:
        assert model.training
        assert model.width == 3
        return model(x).square().mean()

    def goes_around(model: Any, x: Any) -> torch.Tensor:
        return model.embed(x).square().mean()

    assert not isinstance(world_pool(1).run(step_of, ZERO2, WithParts, reads)[0], str)
    said = world_pool(1).run(step_of, ZERO2, WithParts, goes_around)[0]
    assert "the loss function uses model.embed, which goes around" in said


class WithParts(nn.Module):
    """A model with an attribute, and a method beside its forward."""

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.width, self.inward = 3, nn.Linear(2, 3)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return self.inward(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(x)


# -- what is installed ---------------------------------------------------------------------------


def test_what_is_installed_here_can_be_used() -> None:
    assert installed.availability().ok


@pytest.mark.parametrize(
    ("distribution", "found", "said"),
    [
        ("colossalai", None, "Colossal-AI is not installed."),
        ("colossalai", "0.4.9", "Colossal-AI 0.4.9 is installed, and this backend works with"),
        ("transformers", "5.23.0", "transformers 5.23.0 is installed"),
    ],
)
def test_what_is_missing_or_of_another_version_is_said_with_the_command_that_mends_it(
    monkeypatch: pytest.MonkeyPatch, distribution: str, found: str | None, said: str
) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name != distribution:
            return real(name)
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
    available = installed.availability()
    assert not available.ok
    assert available.reason.startswith(said)
    assert "unipar install colossalai" in available.remedy
    assert said in refusal(ZERO2)


def test_an_installation_that_fails_to_import_says_why(world_pool: Any) -> None:
    said = world_pool(1).run(import_broken)[0]
    assert "fails to import: ImportError: cannot import name 'Dropped'" in said
    assert "unipar install colossalai --force" in said


def import_broken(placement: Placement) -> str:
    import sys

    class Broken:
        """Finds Colossal-AI's boosters, and fails like a package that was upgraded beneath it."""

        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == "colossalai.booster":
                raise ImportError("cannot import name 'Dropped' from 'transformers'\nand more")

    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if "colossalai.b" in name}
    finder: Any = Broken()
    sys.meta_path.insert(0, finder)
    try:
        from unipar_colossalai.framework import load

        load()
    except ConfigError as error:
        return str(error)
    finally:
        sys.meta_path.remove(finder)
        sys.modules.update(kept)
    return "it was imported"
