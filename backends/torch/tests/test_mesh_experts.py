"""Experts divided over ranks: models of transformers, routers that starve ranks, router losses."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unipar import checkpoint
from unipar.data.batch import Batch, MicroBatch
from unipar.errors import ConfigError
from unipar.loss import LossSum
from unipar.strategy import EngineSpec, Strategy
from unipar.testing import models
from unipar.testing.cases.numbers import PLAIN
from unipar.testing.cases.shapes import DECODER
from unipar.testing.harness import Exported, RankRun, batches, learning_rates, record, trained_on
from unipar.testing.kit import Kit, Target, merge
from unipar.testing.pool import WorldPools
from unipar.testing.reference import Trace
from unipar.testing.scenarios import Scenario, predict_tokens, sgd
from unipar.world import Placement, World
from unipar_torch.expert_parallel import routed
from unipar_torch.expert_plan import make_expert_plan
from unipar_torch.mesh import MeshStrategy
from unipar_torch.mesh_options import MeshOptions

SIZES: dict[str, Any] = {
    "vocab_size": 12,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def made(**options: Any) -> Callable[[], Strategy]:
    return lambda: MeshStrategy(MeshOptions(**{"ep": 2, **options}))


def kit_of(world_pool: WorldPools, size: int = 2, **options: Any) -> Kit:
    return Kit(Target(f"mesh with {options}", made(**options)), size, world_pool)


# -- models ----------------------------------------------------------------------------------------


def mixtral() -> Any:
    import transformers

    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    )


def qwen3_moe() -> Any:
    import transformers

    make: Any = transformers.Qwen3MoeConfig
    config = make(
        **SIZES, head_dim=4, moe_intermediate_size=12, num_experts=4, num_experts_per_tok=2
    )
    return transformers.Qwen3MoeForCausalLM(config)


def qwen2_moe() -> Any:
    """With an expert that all tokens share, and that is not divided."""
    import transformers

    config = transformers.Qwen2MoeConfig(
        **SIZES,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=12,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return transformers.Qwen2MoeForCausalLM(config)


def gpt_oss() -> Any:
    """Its experts have biases, and are called with other names."""
    import transformers

    config = transformers.GptOssConfig(
        **SIZES, head_dim=4, num_local_experts=4, num_experts_per_tok=2
    )
    return transformers.GptOssForCausalLM(config)


def predict(model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    return predict_tokens(lambda tokens: model(input_ids=tokens).logits, batch)


OF_TRANSFORMERS = replace(
    DECODER,
    model=mixtral,
    terms=predict,
    optimizer=sgd,
    accumulation=2,
    max_grad_norm=0.5,
    num_steps=6,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        mixtral,
        *(pytest.param(m, marks=pytest.mark.thorough) for m in (qwen3_moe, qwen2_moe, gpt_oss)),
    ],
)
def test_models_of_transformers_train_the_same_run(
    model: Callable[[], nn.Module], world_pool: WorldPools
) -> None:
    scenario = replace(OF_TRANSFORMERS, model=model)
    kit = kit_of(world_pool)
    (run,) = kit.train(scenario)
    kit.check(run, scenario)


@pytest.mark.slow
def test_experts_are_recomputed_and_in_half_precision(world_pool: WorldPools) -> None:
    scenarios = [
        replace(OF_TRANSFORMERS, activation_checkpointing="full"),
        replace(OF_TRANSFORMERS, precision="bf16"),
    ]
    # Gathered in bf16, weights and their gradients are rounded once more than by autocast alone.
    kit = kit_of(world_pool, param_dtype="fp32")
    for run, scenario in zip(kit.train(*scenarios), scenarios, strict=True):
        kit.check(run, scenario)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"ep": 4}, marks=pytest.mark.thorough),
        pytest.param({"dp_replicate": 2}, marks=pytest.mark.thorough),
        pytest.param({"sharding": "grad_op", "wrap": "none"}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_experts_are_sharded_over_ranks_that_have_the_same(
    options: dict[str, Any], world_pool: WorldPools
) -> None:
    kit = kit_of(world_pool, 4, **options)
    (run,) = kit.train(OF_TRANSFORMERS)
    kit.check(run, OF_TRANSFORMERS)
    held = {p.name: p for p in run.ranks[3].state.weights}["model.layers.0.mlp.experts.down_proj"]
    copies = options.get("dp_replicate", 1)
    assert sum(t.numel() for t in held.tensors) == 4 * 16 * 24 * copies // 4


# -- routers ---------------------------------------------------------------------------------------


class Starved(models.Network):
    """All tokens go to the first rank's experts."""

    def __init__(self) -> None:
        super().__init__()
        models.with_experts(self)
        router = self.get_submodule("blocks.1.up.mixture.router")
        assert isinstance(router, nn.Linear)
        with torch.no_grad():
            router.bias.copy_(torch.tensor([9.0, 9.0, -9.0, -9.0]))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_a_rank_whose_experts_get_no_token_goes_along(size: int, world_pool: WorldPools) -> None:
    scenarios = [
        replace(PLAIN, model=Starved, num_steps=5),
        replace(
            PLAIN, model=Starved, optimizer=sgd, accumulation=2, max_grad_norm=0.3, num_steps=5
        ),
    ]
    kit = kit_of(world_pool, size)
    for run, scenario in zip(kit.train(*scenarios), scenarios, strict=True):
        kit.check(run, scenario)


class Balanced(models.Mixture):
    """Reads how many experts there are, as losses of routers do; calls them in another order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        scores = self.router(tokens).float().softmax(-1)
        weights, index = scores.topk(2, dim=-1)
        made = self.experts(tokens, top_k_weights=weights, top_k_index=index)
        return (made * self.experts.num_experts).view_as(x)


def balanced() -> nn.Module:
    model = models.with_experts(models.Network())
    mixture = model.get_submodule("blocks.1.up.mixture")
    mixture.__class__ = Balanced
    return model


def test_others_find_how_many_experts_there_are(world_pool: WorldPools) -> None:
    scenario = replace(PLAIN, model=balanced, num_steps=5)
    kit = kit_of(world_pool)
    (run,) = kit.train(scenario)
    kit.check(run, scenario)


class Factored(models.Experts):
    """A number for each expert, which is not learned."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.scale = nn.Parameter(torch.arange(1.0, number + 1), requires_grad=False)

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
        scaled = top_k_weights * self.scale[top_k_index]
        return super().forward(hidden_states, top_k_index, scaled)


def factored() -> nn.Module:
    return of_experts(Factored)()


def test_parameters_of_experts_may_be_frozen(world_pool: WorldPools) -> None:
    scenario = replace(PLAIN, model=factored, num_steps=5)
    kit = kit_of(world_pool)
    (run,) = kit.train(scenario)
    kit.check(run, scenario)


def train_strictly(strategy: Strategy, world: World) -> list[str]:
    """Train in two steps in which every warning is an error; what torch has logged of DTensors."""
    engine = strategy.prepare(OF_TRANSFORMERS.spec(world.data_size), world)
    logged: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("torch.distributed.tensor")
    handler.emit = lambda record: logged.append(record.getMessage())
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for batch in batches(replace(OF_TRANSFORMERS, num_steps=2), world):
                engine.train_step(batch, OF_TRANSFORMERS.loss)
    finally:
        logger.removeHandler(handler)
        engine.close()
    return logged


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_nothing_warns(size: int, world_pool: WorldPools) -> None:
    assert not any(kit_of(world_pool, size).run(train_strictly))


STEPS, BATCH, PARTS = 4, 8, 4


def with_router_loss() -> Any:
    torch.manual_seed(3)
    model = mixtral()
    model.config.output_router_logits = True
    model.router_aux_loss_coef = 0.5
    return model


def counted(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss that transformers computes, router loss included, and how many tokens it is of."""
    labels = torch.where(tokens % 3 > 0, tokens, -100)
    loss = model(input_ids=tokens, labels=labels, output_router_logits=True).loss
    return loss, (labels[:, 1:] != -100).sum()


def sentences() -> torch.Tensor:
    return torch.randint(0, 12, (STEPS * BATCH, 8), generator=torch.Generator().manual_seed(5))


def by_hand() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Micro-batches as the ranks have them, each weighted by its tokens."""
    model, losses = with_router_loss(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for batch in sentences().split(BATCH):
        parts = [counted(model, part) for part in batch.chunk(PARTS)]
        total = torch.stack([one * count for one, count in parts]).sum()
        loss = total / sum(int(count) for _, count in parts)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def train_with_router_loss(strategy: Strategy, world: World) -> Any:
    def optimizer(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named], lr=0.2, momentum=0.9)

    def loss(model: Any, tokens: torch.Tensor) -> LossSum:
        mean, count = counted(model, tokens)
        return LossSum(mean * count, count)

    engine = strategy.prepare(EngineSpec(with_router_loss(), optimizer), world)
    losses: list[float] = []
    for batch in sentences().split(BATCH):
        own = batch.chunk(world.data_size)[world.data_rank].chunk(PARTS // world.data_size)
        parts = tuple(MicroBatch(part, len(part)) for part in own)
        losses.append(engine.train_step(Batch(parts, BATCH), loss).loss)
    weights: Any = engine.module.named_parameters()
    return losses, {name: p.full_tensor().detach() for name, p in weights}


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_a_router_loss_is_that_of_the_same_micro_batches(size: int, world_pool: WorldPools) -> None:
    losses, weights = by_hand()
    for found, own in kit_of(world_pool, size).run(train_with_router_loss):
        assert found == pytest.approx(losses, rel=1e-5)
        for name, expected in weights.items():
            torch.testing.assert_close(own[name], expected, rtol=1e-5, atol=1e-5, msg=name)


# -- checkpoints -----------------------------------------------------------------------------------


def go_on(
    strategy: Strategy, world: World, scenario: Scenario, directory: Path, first: int, last: int
) -> RankRun:
    """Steps ``first`` to ``last`` of a scenario, from a checkpoint and to another."""
    engine = strategy.prepare(replace(scenario, seed=first).spec(world.data_size), world)
    if first:
        checkpoint.load(directory, {"model": engine}, world)
    trace, samples = Trace(), []
    for batch in batches(replace(scenario, num_steps=last), world, start=first):
        trace.lrs.append(learning_rates(engine))
        samples.append(trained_on(batch))
        record(trace, engine.train_step(batch, scenario.loss))
    checkpoint.save(directory, {"model": engine}, world, step=last, strategy=strategy.name)
    run = RankRun(trace, Exported.of(engine), samples, data_rank=world.data_rank)
    engine.close()
    return run


def test_a_run_goes_on_whole_and_divided_again(world_pool: WorldPools, tmp_path: Path) -> None:
    scenario = replace(PLAIN, num_steps=9, experts=True, scheduler=None)
    divided, whole = kit_of(world_pool), Kit(Target.named("single"), 1, world_pool)
    merged = Trace()
    for kit, first, last in ((divided, 0, 3), (whole, 3, 6), (divided, 6, 9)):
        run = merge(kit.run(go_on, scenario, tmp_path, first, last))
        for key in ("losses", "grad_norms", "num_items", "lrs", "skipped"):
            getattr(merged, key).extend(getattr(run.trace, key))
        merged.weights = run.trace.weights
        run.samples = []
    run.trace = merged
    run.samples = scenario.order()
    divided.check(run, scenario)


# -- what is refused -------------------------------------------------------------------------------


class Listed(nn.Module):
    """Experts in a list of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((expert(x) for expert in self.experts), torch.zeros(()))


class Replaced(models.Experts):
    """Its forward is put on the module itself."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.forward = lambda hidden_states, top_k_index, top_k_weights: hidden_states


class Buffered(models.Experts):
    """A number for each expert that is no parameter."""

    scale: torch.Tensor

    def __init__(self, width: int = 4, number: int = 4) -> None:
        super().__init__(width, number)
        self.register_buffer("scale", torch.arange(1.0, number + 1))


class Scaled(models.Experts):
    """A parameter that is no expert's."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.ones(1))


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], int, str]] = {
    "none": (models.Network, {}, 2, r"Network has none that are known.*Leave ep out"),
    "in a list": (Listed, {}, 2, r"lists of modules \(experts\) are not divided"),
    "a list that is named": (
        Listed,
        {"experts": ("experts",)},
        2,
        r"Stack the experts' parameters",
    ),
    "no such module": (mixtral, {"experts": ("model.layers.*.experts",)}, 2, r"names no module"),
    "too many ranks": (mixtral, {"ep": 3}, 3, r"ep=3 does not divide the 4 experts of .* 2 or 4"),
    "ranks left over": (mixtral, {"ep": 2}, 3, r"ep=2, which does not divide dp_shard=3"),
    "no row for each": (Scaled, {"experts": ("",)}, 2, r"names no module"),
    "sizes that do not shard": (
        lambda: nn.Sequential(models.Experts(5, 4)),
        {"ep": 4},
        28,
        r"has the shape \[1, 6, 5\], and no dimension of it divides by 7",
    ),
    "a forward on the module": (
        lambda: nn.Sequential(Replaced()),
        {},
        2,
        r"'0' \(Replaced\) have a forward of their own.*subclass",
    ),
    "buffers of experts": (
        lambda: nn.Sequential(Buffered()),
        {},
        2,
        r"'0' \(Buffered\) have buffers with a row for each of them \(scale\).*requires_grad=False",
    ),
    "other parameters": (
        lambda: nn.Sequential(Scaled()),
        {},
        2,
        r"do not agree on how many there are: .*scale \[1\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_is_refused_before_anything_starts(name: str) -> None:
    model, options, size, said = REFUSED[name]
    placement = Placement(size=size, local_size=size)
    with pytest.raises(ConfigError, match=said):
        made(**options)().check(EngineSpec(model()), placement)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ep": 2, "tp": 2}, "tp=2 with ep=2 is not built"),
        ({"ep": 1, "experts": ("a",)}, r"ep is 1\. Set ep=2 or more"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MeshOptions(**options)


def test_fp16_is_refused() -> None:
    assert "fp16" not in made()().capabilities().precisions


class Averaged(models.Experts):
    """Reads all experts' parameters for each token."""

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
        made = super().forward(hidden_states, top_k_index, top_k_weights)
        return made + hidden_states * self.up.mean()


class Counting(models.Experts):
    """Keeps the number of experts where nobody finds it."""

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
        self.num_experts = 4
        return super().forward(hidden_states, top_k_index, top_k_weights)


class Capped(models.Experts):
    """Lets each expert have so many tokens, and drops the others."""

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
        capacity = int(1.25 * top_k_index.numel() / self.num_experts)
        chosen = nn.functional.one_hot(top_k_index.flatten(), self.num_experts)
        place = (chosen.cumsum(0) * chosen).sum(-1).view_as(top_k_index)
        kept = top_k_weights * (place <= capacity)
        return super().forward(hidden_states, top_k_index, kept)


class Centered(models.Experts):
    """In training it looks at all tokens at once."""

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
        made = super().forward(hidden_states, top_k_index, top_k_weights)
        return made - made.mean(0) if self.training else made


def of_experts(kind: type[models.Experts]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = models.with_experts(models.Network())
        mixture = model.get_submodule("blocks.1.up.mixture")
        mixture.add_module("experts", kind(18, 4))
        return model

    return build


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Averaged, r"experts of 'blocks\.1\.up\.mixture\.experts' \(Averaged.*the output is \d"),
        (Capped, r"\(Capped.*the output is \d"),
        (Centered, r"\(Centered.*the output is \d"),
        (Counting, r"\(Counting.*divided, it raises RuntimeError"),
    ],
)
def test_experts_that_are_others_when_divided_are_refused_in_the_first_pass(
    kind: type[models.Experts], said: str, world_pool: WorldPools
) -> None:
    with pytest.raises(ConfigError, match=said):
        kit_of(world_pool).train(replace(PLAIN, model=of_experts(kind), num_steps=1))


@pytest.mark.parametrize(
    ("args", "names", "said"),
    [
        (1, (), r"Experts, whose .* missing a required argument: 'top_k_index'"),
        (1, ("weights", "index"), "called otherwise than its forward says"),
        (3, ("top_k_index",), "multiple values"),
        (4, (), "too many positional"),
    ],
)
def test_calls_that_experts_do_not_take_are_refused(
    args: int, names: tuple[str, ...], said: str
) -> None:
    one = torch.ones(2, 2)
    with pytest.raises(ConfigError, match=said):
        routed(models.Experts(4, 4), (one,) * args, dict.fromkeys(names, one))


def test_numbers_of_experts_are_known_by_their_dtype() -> None:
    tokens, index, weights = torch.ones(2, 4), torch.ones(2, 1).long(), torch.ones(2, 1)
    experts = models.Experts(4, 4)
    found = routed(experts, (tokens,), {"top_k_weights": weights, "top_k_index": index})
    assert found == (tokens, index, weights)
    with pytest.raises(ConfigError, match=r"numbers of experts of torch\.float32.*in this order"):
        routed(experts, (tokens, weights, index), {})


# -- what is told ----------------------------------------------------------------------------------


def test_a_dry_run_shows_where_experts_go() -> None:
    strategy = made()()
    assert isinstance(strategy, MeshStrategy)
    told = dict(strategy.placements(EngineSpec(mixtral()), Placement(size=4, local_size=4)))
    assert told["experts divided over ep"] == "the model's own plan (_ep_plan)"
    assert told["model.layers.0.mlp.experts"] == "4 experts, 2 on each rank of ep=2"
    assert told["model.layers.0.mlp.experts.down_proj"] == (
        "[4, 16, 24], dim 0 over ep=2, dim 0 over the 2 others of dp_shard=4: [1, 16, 24] of a rank"
    )
    assert told["model.norm.weight"] == "[16], dim 0 over dp_shard=4: [4] of a rank"


def test_experts_of_ones_own_are_found_by_what_their_forward_takes() -> None:
    plan = make_expert_plan(models.with_experts(models.Network()), 2)
    assert plan.experts == {"blocks.1.up.mixture.experts": 4}
    assert plan.counts == {"blocks.1.up.mixture.experts": ("num_experts",)}
