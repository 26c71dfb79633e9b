"""Sequences divided over ranks: attention, models of several kinds, and what is refused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import unipar
from unipar import checkpoint
from unipar.data.batch import Batch, MicroBatch
from unipar.errors import ConfigError
from unipar.layout import Layout
from unipar.loss import LossSum
from unipar.objective import Objective
from unipar.strategy import Strategy
from unipar.testing import models
from unipar.testing.cases import ALL
from unipar.testing.cases.shapes import DECODER, LONG, OWN_LOSS
from unipar.testing.compare import assert_equal_weights
from unipar.testing.harness import Exported, RankRun, batches, learning_rates, record, trained_on
from unipar.testing.kit import Kit, Target, merge
from unipar.testing.pool import WorldPools
from unipar.testing.reference import Trace
from unipar.testing.scenarios import NUM_SAMPLES, Scenario, reference_trace, sgd
from unipar.world import Placement, World, joined
from unipar_torch import context_parallel, divided_attention
from unipar_torch.divided_attention import ring_attention, to_heads, to_positions
from unipar_torch.mesh import MeshStrategy
from unipar_torch.mesh_options import MeshOptions
from unipar_torch.sequence_parts import BatchParts, Parts

CASES = {case.name: case for case in ALL}
KINDS = ("ring", "all_gather", "ulysses")


def made(**options: Any) -> Callable[[], Strategy]:
    return lambda: MeshStrategy(MeshOptions(**{"cp": 2, **options}))


def kit_of(world_pool: WorldPools, size: int = 2, **options: Any) -> Kit:
    return Kit(Target(f"mesh with cp=2 and {options}", made(**options)), size, world_pool)


# -- parts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_position_has_one_rank(size: int, zigzag: bool) -> None:
    for length in range(2 * size, 5 * size):
        every = [Parts(length, size, rank, zigzag) for rank in range(size)]
        held = torch.cat([parts.positions(torch.device("cpu")) for parts in every])
        assert held.sort().values.tolist() == list(range(length))
        lengths = [parts.own_length for parts in every]
        assert max(lengths) - min(lengths) <= 1 + zigzag
        assert max(lengths) == every[0].longest


def test_tensors_that_have_the_sequence_are_found_or_named() -> None:
    batch = {
        "ids": torch.zeros(3, 8, dtype=torch.long),
        "mask": torch.ones(3, 8, dtype=torch.bool),
        "features": torch.zeros(3, 8, 5),
        "weights": torch.zeros(3),
        "wide": torch.zeros(3, 4),
    }
    found = BatchParts(2, 0, zigzag=True)
    assert found.dims_of(batch) == (8, {"ids": 1, "mask": 1, "features": 1})
    part = found.divided(batch, *found.dims_of(batch))
    assert {name: tuple(t.shape) for name, t in part.items()} == {
        "ids": (3, 4),
        "mask": (3, 4),
        "features": (3, 4, 5),
        "weights": (3,),
        "wide": (3, 4),
    }
    with pytest.raises(
        ConfigError, match=r"different lengths.*'a' \[3, 8\]; 'b' \[3, 4\].*sequence_dims"
    ):
        found.dims_of({"a": torch.zeros(3, 8).long(), "b": torch.zeros(3, 4).long()})
    with pytest.raises(ConfigError, match=r"sequences of 3 positions.*set cp to 1"):
        found.dims_of(torch.zeros(2, 3).long())
    named = BatchParts(2, 1, zigzag=True, dims={"0": 0})
    pair = (torch.arange(8.0)[:, None].expand(8, 3), torch.zeros(3, 2).long())
    assert named.divided(pair, *named.dims_of(pair))[0][:, 0].tolist() == [2, 3, 4, 5]
    with pytest.raises(ConfigError, match="no such tensor: ids"):
        named.dims_of({"ids": torch.zeros(3, 8).long()})
    with pytest.raises(ConfigError, match="is dimension 5 of '0'"):
        BatchParts(2, 1, zigzag=True, dims={"0": 5}).dims_of(pair)


# -- attention -------------------------------------------------------------------------------------


def attends(placement: Placement, kind: str, plain: bool) -> dict[str, float]:
    """How far attention and its gradients are from torch's, over the whole."""
    kernel, rows = divided_attention._kernel, divided_attention._ROWS
    if plain:
        # As where no kernel of torch's applies.
        divided_attention._kernel, divided_attention._ROWS = lambda *_: "", 5
    try:
        with joined(placement, Layout(cp=placement.size)) as world:
            group = world.mesh("cp").get_group()
            return {
                f"{causal}, {length}": _apart(group, kind, causal, length)
                for causal in (True, False)
                for length in (37, 2 * placement.size)
            }
    finally:
        divided_attention._kernel, divided_attention._ROWS = kernel, rows


def _apart(group: dist.ProcessGroup, kind: str, causal: bool, length: int) -> float:
    torch.manual_seed(0)
    whole = [torch.randn(2, heads, length, 16) for heads in (8, 4, 4)]
    attend: Any = functional.scaled_dot_product_attention
    expected = [t.clone().requires_grad_() for t in whole]
    out = attend(*expected, is_causal=causal, enable_gqa=True)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    parts = Parts(length, group.size(), group.rank(), kind != "ulysses")
    own = [parts.own(t, 2).clone().requires_grad_() for t in whole]
    if kind == "ulysses":
        heads = [to_heads(t, parts, group) for t in own]
        mixed = attend(*heads, is_causal=causal, enable_gqa=True)
        found = to_positions(mixed, parts, group)
    else:
        q, k, v = own
        gathers = kind == "all_gather"
        found = ring_attention(q, k, v, parts, group, causal=causal, scale=0.25, gathers=gathers)
    (found * parts.own(weights, 2)).sum().backward()
    pairs = [(found, out), *((a.grad, b.grad) for a, b in zip(own, expected, strict=True))]
    return max((a - parts.own(b, 2)).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_attention_over_ranks_is_that_over_the_whole(
    size: int, kind: str, plain: bool, world_pool: WorldPools
) -> None:
    for found in world_pool(size).run(attends, kind, plain):
        assert max(found.values()) < 1e-5, found


# -- whole runs ------------------------------------------------------------------------------------


PLAN = {
    "blocks.*.attention.q": "colwise",
    "blocks.*.attention.k": "colwise",
    "blocks.*.attention.v": "colwise",
    "blocks.*.attention.out": "rowwise",
}
"""Its blocks take angles, which no rule knows of."""


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"cp_kind": "all_gather"}),
        (2, {"cp_kind": "ulysses"}),
        pytest.param(4, {"dp_shard": 2}, marks=pytest.mark.thorough),
        pytest.param(4, {"dp_replicate": 2, "sharding": "grad_op"}, marks=pytest.mark.thorough),
        pytest.param(4, {"cp": 4}, marks=pytest.mark.thorough),
        pytest.param(4, {"tp": 2, "plan": PLAN}, marks=pytest.mark.thorough),
        pytest.param(
            4, {"tp": 2, "plan": PLAN, "cp_kind": "all_gather"}, marks=pytest.mark.thorough
        ),
    ],
)
def test_sequences_are_divided_in_each_way(
    size: int, options: dict[str, Any], world_pool: WorldPools
) -> None:
    CASES["divides_sequences"].check(kit_of(world_pool, size, **options))


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}])
def test_layers_are_divided_too(options: dict[str, Any], world_pool: WorldPools) -> None:
    kit = kit_of(world_pool, 4, tp=2, **options)
    scenario = replace(DECODER, num_steps=5, activation_checkpointing="full")
    (run,) = kit.train(scenario)
    kit.check(run, scenario)


def test_in_half_precision_sequences_are_divided_as_rounding_allows(
    world_pool: WorldPools,
) -> None:
    scenario = replace(LONG, precision="bf16", num_steps=5)
    runs = {}
    for param_dtype in ("fp32", "compute"):
        kit = kit_of(world_pool, param_dtype=param_dtype)
        (runs[param_dtype],) = kit.train(scenario)
        if param_dtype == "fp32":
            kit.check(runs[param_dtype], scenario)
    losses = runs["fp32"].trace.losses
    assert runs["compute"].trace.losses == pytest.approx(losses, rel=5e-2)


class Encoder(nn.Module):
    """Attention to all positions, by modules of torch's; drops hidden units in training."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(models.VOCABULARY, 12)
        self.places = nn.Embedding(models.LONG_LENGTH, 12)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(12, 2, 16, 0.0, batch_first=True) for _ in range(2)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(position_ids)
        for block in self.blocks:
            x = self.dropout(block(x))
        return x


class Numbering(Encoder):
    """Finds positions itself where it is given none, as the reference calls it."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1])[None]
        return super().forward(tokens, position_ids)


def test_encoders_of_torch_see_all_positions(world_pool: WorldPools) -> None:
    scenario = replace(LONG, model=Numbering, optimizer=sgd, num_steps=4)
    kit = kit_of(world_pool)
    (run,) = kit.train(scenario)
    kit.check(run, scenario)
    # The check compares without dropout.
    kit.train(replace(scenario, model=partial(Numbering, 0.5), num_steps=2))


class Drawing(Numbering):
    """Drops hidden units, and draws a number for each sample that goes with all its positions."""

    def forward(
        self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = super().forward(tokens, position_ids)
        self.drawn = torch.rand(len(tokens), 1, 1)
        return x * (1.0 + self.drawn)


def what_is_dropped(
    placement: Placement, directory: Path, resumed: bool
) -> tuple[list[torch.Tensor], list[float]]:
    """The masks of a rank's dropout in the second step, and what it drew for samples."""
    masks: list[torch.Tensor] = []
    drawn: list[float] = []
    tokens = torch.arange(2 * models.LONG_LENGTH).view(2, -1) % models.VOCABULARY
    data = [{"tokens": row} for row in tokens]
    torch.manual_seed(2)
    model = Drawing(0.5)
    with unipar.Session("mesh:cp=2", device="cpu", placement=placement) as session:
        engine = session.prepare(model, optimizer=sgd)
        (batch,) = session.loader(data, global_batch_size=2)
        if resumed:
            session.load(directory)
        for _ in range(1 if resumed else 2):
            if engine.num_steps:
                model.dropout.register_forward_hook(lambda *seen: masks.append(seen[2] != 0))
            engine.train_step(batch, of_every_position)
            drawn += model.drawn.flatten().tolist()
            if engine.num_steps == 1:
                session.save(directory)
    # Those before are of the comparison.
    return masks[-2:], drawn


def of_every_position(model: Any, batch: Any) -> LossSum:
    out = model(batch["tokens"])
    return LossSum(out.square().sum(), out.shape[0] * out.shape[1])


def test_ranks_drop_elements_of_their_positions_independently(
    world_pool: WorldPools, tmp_path: Path
) -> None:
    (first, drawn), (second, same) = world_pool(2).run(what_is_dropped, tmp_path, False)
    # What is drawn for a whole sample is so for all its positions.
    assert drawn == same
    for one, other in itertools.combinations([*first, *second], 2):
        # Independent ones agree at half of their 120 places, with a standard deviation of 0.05.
        assert 0.35 < (one == other).float().mean() < 0.65
    again = world_pool(2).run(what_is_dropped, tmp_path, True)
    for (masks, _), expected in zip(again, (first, second), strict=True):
        assert all(map(torch.equal, masks, expected))


class Points(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def of_changed_points(model: Any, batch: Any) -> LossSum:
    """Changes the batch that it is given, in place."""
    x, labels = batch["x"].mul_(1.5).add_(0.25), batch["labels"].flatten()
    out = model(x).flatten(0, 1)
    return LossSum(functional.cross_entropy(out, labels, reduction="sum"), len(labels))


def losses_of_changed_points(placement: Placement, strategy: str) -> list[float]:
    torch.manual_seed(3)
    points = torch.randn(4, 16, 3)
    data = [{"x": row, "labels": row.sum(1).gt(0).long()} for row in points]
    with unipar.Session(strategy, device="cpu", placement=placement) as session:
        engine = session.prepare(Points(), optimizer=sgd)
        loader = session.loader(data, global_batch_size=2)
        return [engine.train_step(batch, of_changed_points).loss for batch in loader]


def test_the_check_leaves_a_batch_as_it_is(world_pool: WorldPools) -> None:
    (alone,) = world_pool(1).run(losses_of_changed_points, "single")
    for losses in world_pool(2).run(losses_of_changed_points, "mesh:cp=2"):
        assert losses == pytest.approx(alone, rel=1e-5)


# -- checkpoints -----------------------------------------------------------------------------------


def half_a_run(
    placement: Placement, strategy: str, scenario: Scenario, source: Path | None, target: Path
) -> RankRun:
    """Five steps from where ``source`` was saved, and a checkpoint."""
    with unipar.Session(strategy, device="cpu", placement=placement) as session:
        world: World = session.world
        engine = session.strategy.prepare(scenario.spec(world.data_size), world)
        if source is not None:
            checkpoint.load(source, {"model": engine}, world)
        trace, samples = Trace(), []
        start = engine.num_steps
        for batch in batches(replace(scenario, num_steps=start + 5), world, start=start):
            trace.lrs.append(learning_rates(engine))
            samples.append(trained_on(batch))
            record(trace, engine.train_step(batch, scenario.loss))
        checkpoint.save(target, {"model": engine}, world, step=start + 5, strategy=strategy)
        return RankRun(trace, Exported.of(engine), samples, data_rank=world.data_rank)


@pytest.mark.parametrize(
    "strategies",
    [
        (("mesh:cp=2", 2), ("single", 1)),
        pytest.param((("single", 1), ("mesh:cp=2", 2)), marks=pytest.mark.thorough),
    ],
    ids=["to single", "from single"],
)
def test_runs_go_on_where_sequences_are_whole_and_back(
    strategies: Any, world_pool: WorldPools, tmp_path: Path
) -> None:
    scenario = replace(OWN_LOSS, num_steps=10, accumulation=1)
    source, losses, weights = None, [], {}
    for number, (name, size) in enumerate(strategies):
        target = tmp_path / str(number)
        ranks = world_pool(size).run(half_a_run, name, scenario, source, target)
        source = next(target.iterdir())
        run = merge(list(ranks))
        losses, weights = losses + run.trace.losses, run.trace.weights
    expected = reference_trace(scenario)
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    assert_equal_weights(weights, expected.weights, 1e-5)


# -- models of transformers ------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": 12,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
LENGTH, ROWS, STEPS = 21, 8, 4


def llama(**options: Any) -> nn.Module:
    import transformers

    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **options}))


def mistral(window: int) -> nn.Module:
    import transformers

    torch.manual_seed(1)
    config = transformers.MistralConfig(**SIZES, sliding_window=window)
    return transformers.MistralForCausalLM(config)


def ragged(step: int) -> dict[str, torch.Tensor]:
    """Prompts without labels, answers, and padding on the right."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 12, (ROWS, LENGTH), generator=generator)
    ends = torch.randint(12, LENGTH + 1, (ROWS, 1), generator=generator)
    places = torch.arange(LENGTH)[None]
    there = places < ends
    labels = ids.masked_fill(~there | (places < 9), -100)
    return {"input_ids": ids * there, "attention_mask": there.long(), "labels": labels}


def plainly(model: nn.Module) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same run by hand, on whole sequences."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**ragged(step)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def of_transformers(
    placement: Placement, model: nn.Module, options: dict[str, Any], data: Any = ragged
) -> tuple[list[float], dict[str, torch.Tensor]]:
    strategy = {"name": "mesh", "cp": 2, **options}
    with unipar.Session(strategy, device="cpu", placement=placement) as session:
        engine = session.prepare(
            model,
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
            activation_checkpointing="full",
        )
        loss, losses = Objective.of_model(engine.module), []
        share = ROWS // session.world.data_size
        for step in range(STEPS):
            rows = slice(session.world.data_rank * share, (session.world.data_rank + 1) * share)
            whole = {name: t[rows] for name, t in data(step).items()}
            # Two micro-batches, some parts of which have no label.
            parts = [{k: t[:3] for k, t in whole.items()}, {k: t[3:] for k, t in whole.items()}]
            pieces = tuple(MicroBatch(part, len(part["labels"])) for part in parts)
            losses.append(engine.train_step(Batch(pieces, ROWS), loss).loss)
        weights: Any = engine.module.named_parameters()
        return losses, {name: p.full_tensor().detach() for name, p in weights}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "size", "options"),
    [
        (llama, 2, {}),
        (partial(mistral, 64), 2, {"cp_kind": "all_gather"}),
        pytest.param(llama, 2, {"cp_kind": "ulysses"}, marks=pytest.mark.thorough),
        pytest.param(llama, 4, {"tp": 2}, marks=pytest.mark.thorough),
        pytest.param(llama, 4, {"dp_shard": 2}, marks=pytest.mark.thorough),
    ],
)
def test_models_of_transformers_train_the_same_run_by_their_own_loss(
    model: Callable[[], nn.Module], size: int, options: dict[str, Any], world_pool: WorldPools
) -> None:
    losses, weights = plainly(model())
    for found, own in world_pool(size).run(of_transformers, model(), options):
        assert found == pytest.approx(losses, rel=1e-5)
        for name, expected in weights.items():
            torch.testing.assert_close(own[name], expected, rtol=1e-5, atol=1e-5, msg=name)


def left_padded(step: int) -> dict[str, torch.Tensor]:
    return {name: t.flip(1) for name, t in ragged(step).items()}


def packed(step: int) -> dict[str, torch.Tensor]:
    batch = ragged(step)
    del batch["attention_mask"]
    return {**batch, "position_ids": (torch.arange(LENGTH) % 11).expand(ROWS, LENGTH)}


def bert() -> nn.Module:
    import transformers

    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes))


def llama4() -> nn.Module:
    import transformers

    sizes = {**SIZES, "intermediate_size_mlp": 24, "num_local_experts": 2, "head_dim": 4}
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**sizes))


def rotary(kind: str, **options: Any) -> Callable[[], nn.Module]:
    return partial(llama, rope_parameters={"rope_type": kind, "rope_theta": 1e4, **options})


def counted_padding(step: int) -> dict[str, torch.Tensor]:
    batch = ragged(step)
    return {**batch, "labels": batch["input_ids"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "data", "said"),
    [
        (llama, left_padded, "hides positions before the end.*Pad on the right"),
        (llama, packed, "'position_ids' has other positions than 0, 1, 2"),
        (partial(mistral, 8), ragged, "a mask of its own .*, a window of 8"),
        (partial(llama, attn_implementation="eager"), ragged, "attn_implementation='sdpa'"),
        (bert, ragged, "drops weights|sees all positions"),
        (llama, counted_padding, "'labels' has labels where 'attention_mask' says padding"),
        (rotary("dynamic", factor=4.0), ragged, "'LlamaForCausalLM' has rope_type='dynamic'"),
        (
            rotary(
                "longrope",
                short_factor=[1.0, 1.0],
                long_factor=[2.0, 2.0],
                original_max_position_embeddings=32,
            ),
            ragged,
            "has rope_type='longrope'.*leave cp out",
        ),
        (llama4, ragged, "Set attn_temperature_tuning=False"),
    ],
    ids=[
        "padding on the left",
        "packing",
        "a window",
        "eager attention",
        "an encoder's padding",
        "labels of padding",
        "dynamic angles",
        "angles by length",
        "temperature by place",
    ],
)
def test_models_of_transformers_are_refused_where_masks_would_be_lost(
    model: Callable[[], nn.Module], data: Any, said: str, world_pool: WorldPools
) -> None:
    with pytest.raises(ConfigError, match=said):
        world_pool(2).run(of_transformers, model(), {}, data)


# -- what is refused -------------------------------------------------------------------------------


class Wrong(models.LongDecoder):
    """Does something by itself that needs the whole sequence."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.mixing = nn.ModuleDict(
            {
                "convolution": nn.Conv1d(16, 16, 3, padding=1),
                "statistics": nn.BatchNorm1d(16),
                "attention": nn.MultiheadAttention(16, 2, batch_first=True),
            }
        )

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tokens: torch.Tensor, position_ids: Any = None, **kwargs: Any
    ) -> Any:
        x = self.tokens(tokens)
        if self.how == "positions":
            position_ids = None
        if self.how in ("convolution", "statistics"):
            x = self.mixing[self.how](x.mT).mT
        if self.how == "attention":
            x = x + self.mixing["attention"](x, x, x)[0]
        if self.how in ("mask", "dropout"):
            q = x.unflatten(-1, (2, 8)).transpose(1, 2)
            length = tokens.shape[1]
            mask = torch.ones(length, length, dtype=torch.bool).tril()
            options: Any = {"attn_mask": mask} if self.how == "mask" else {"dropout_p": 0.5}
            mixed = functional.scaled_dot_product_attention(q, q, q, **options)
            x = x + mixed.transpose(1, 2).flatten(2)
        if self.how == "sum":
            x = x.cumsum(1)
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1])[None]
        angles = position_ids[:, None, :, None] * torch.tensor(self.frequencies)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return self.head(self.norm(x))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("positions", r"call 1 of scaled_dot_product_attention gives what is .*position_ids"),
        ("convolution", r"output of 'mixing\.convolution' \(Conv1d\).*mixes positions"),
        ("statistics", r"output of 'mixing\.statistics' \(BatchNorm1d\).*statistics"),
        ("attention", r"'mixing\.attention' \(MultiheadAttention\).*need_weights=False"),
        ("sum", r"output of 'blocks\.0\.\w+' .*cumulative sum"),
        ("mask", r"a mask of shape \[5, 5\].*is_causal=True"),
        ("dropout", r"dropout_p=0\.5.*cp_kind=ulysses"),
    ],
)
def test_a_model_that_mixes_positions_is_refused_before_it_trains(
    how: str, said: str, world_pool: WorldPools
) -> None:
    scenario = replace(LONG, model=partial(Wrong, how), num_steps=1)
    with pytest.raises(ConfigError, match=said):
        kit_of(world_pool).train(scenario)


def shifted_inside(model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    logits, labels = model(batch["tokens"])[:, :-1], batch["labels"][:, 1:]
    total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, (labels != -100).sum()


def rolled_inside(model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    logits, labels = model(batch["tokens"]), batch["tokens"].roll(-1, 1)
    total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, labels.numel()


def cut_before(model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    logits, labels = model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:]
    total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, labels.numel()


def pooled(model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    logits = model(batch["tokens"]).mean(1)
    return functional.cross_entropy(logits, batch["tokens"][:, 0], reduction="sum"), len(logits)


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        (shifted_inside, r"counts \d+ items in whole sequences, and \d+ in their parts"),
        (rolled_inside, "the outputs agree, and the loss does not.*shift labels in the data set"),
        (cut_before, r"inputs of shape \[2, \d\], and .* inputs and labels have one length"),
        (pooled, "counts 2 items in whole sequences, and 4 in their parts"),
    ],
)
def test_a_loss_that_is_no_sum_over_positions_is_refused_before_training(
    terms: Any, said: str, world_pool: WorldPools
) -> None:
    with pytest.raises(ConfigError, match=said):
        kit_of(world_pool).train(replace(LONG, terms=terms, num_steps=1))
    with pytest.raises(ConfigError, match="LossSum"):
        kit_of(world_pool).train(replace(LONG, weighted=False, num_steps=1))


def test_what_cannot_be_divided_says_what_to_do(world_pool: WorldPools) -> None:
    with pytest.raises(ConfigError, match=r"2 of keys and values, which 4 does not.*\[1, 2\]"):
        kit_of(world_pool, 4, cp=4, cp_kind="ulysses").train(replace(LONG, num_steps=1))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cp": 1, "cp_kind": "ring"}, "cp_kind says how .* cp is 1. Set cp=2"),
        ({"cp": 1, "sequence_dims": {"ids": 1}}, "sequence_dims says how"),
        ({"cp": 2, "cp_kind": "star"}, "'ring', 'all_gather' or 'ulysses'"),
        ({"cp": 0}, "greater than or equal to 1"),
    ],
)
def test_options_that_say_nothing_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MeshOptions(**options)


def test_numbers_of_processes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="cp=2 does not divide the 3 processes"):
        MeshStrategy(MeshOptions(cp=2)).layout(Placement(size=3, local_size=3))


def with_metrics(placement: Placement) -> str:
    with unipar.Session("mesh:cp=2", device="cpu", placement=placement) as session:
        engine = session.prepare(models.LongDecoder())
        data: Any = models.sentences(4, models.LONG_LENGTH)
        with pytest.raises(ConfigError) as refused:
            session.evaluate(engine, data, None, metrics={"exact": lambda p, t: (p == t).mean()})
        return str(refused.value)


def test_metrics_of_parts_of_samples_are_refused(world_pool: WorldPools) -> None:
    assert all("metrics (exact)" in said for said in world_pool(2).run(with_metrics))


def two_steps(placement: Placement) -> list[str]:
    """Losses where all labels of the first batch are left out of it, then a wrong loss."""
    with unipar.Session("mesh:cp=2", device="cpu", placement=placement) as session:
        engine = session.prepare(
            models.LongDecoder(),
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        )
        data = models.sentences(8, models.LONG_LENGTH).batch(list(range(8)))
        empty = {**data, "labels": torch.full_like(data["labels"], -100)}
        said = []

        def loss(model: Any, batch: Any) -> LossSum:
            return LossSum(*shifted_inside(model, batch))

        for batch in (empty, data):
            try:
                engine.train_step(Batch((MicroBatch(batch, 8),), 8), loss)
            except ConfigError as error:
                said.append(str(error))
            except unipar.NonFiniteLossError:
                said.append("nothing")
        return said


def test_a_loss_is_checked_as_soon_as_it_counts_anything(world_pool: WorldPools) -> None:
    for said in world_pool(2).run(two_steps):
        assert "items in whole sequences" in said[-1]


class Hidden(models.LongDecoder):
    """Numbers or mixes positions in a way that its first outputs, or short sequences, hide."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.places = nn.Parameter(torch.zeros(1, 64, 16))
        self.mix = nn.Linear(16, 16)
        nn.init.zeros_(self.mix.weight)
        nn.init.zeros_(self.mix.bias)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tokens: torch.Tensor, position_ids: Any = None
    ) -> Any:
        length = tokens.shape[1]
        if position_ids is None:
            position_ids = torch.arange(length)[None]
        angles = position_ids[:, None, :, None] * torch.tensor(self.frequencies)
        x = self.tokens(tokens)
        if self.how == "places":
            x = x + self.places[:, :length]
        if self.how == "places by position_ids":
            x = x + self.places[0][position_ids]
        if self.how == "branch":
            x = x + self.mix(x.cumsum(1))
        if self.how == "small angles":
            x = x + 1e-3 * torch.arange(length)[:, None].to(x)
        if self.how == "length" and length > 24:
            # More than a part has of 40.
            x = 2 * x
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return self.head(self.norm(x))


HIDDEN = replace(LONG, data=partial(models.sentences, NUM_SAMPLES, 40), optimizer=sgd, num_steps=3)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("places", "call 1 of scaled_dot_product_attention|mixes positions"),
        ("branch", r"output of 'mix' .*mixes positions"),
        ("length", "where shorter sequences agree"),
    ],
)
def test_what_zeros_or_short_sequences_hide_is_refused(
    how: str, said: str, world_pool: WorldPools
) -> None:
    with pytest.raises(ConfigError, match=said):
        kit_of(world_pool).train(replace(HIDDEN, model=partial(Hidden, how), num_steps=1))


@pytest.mark.parametrize("param_dtype", ["fp32", "compute"])
def test_what_half_precision_hides_is_refused(param_dtype: str, world_pool: WorldPools) -> None:
    scenario = replace(HIDDEN, model=partial(Hidden, "small angles"), precision="bf16", num_steps=1)
    with pytest.raises(ConfigError, match="position_ids"):
        kit_of(world_pool, param_dtype=param_dtype).train(scenario)


@pytest.mark.parametrize("options", [{}, {"sharding": "grad_op"}])
def test_parameters_that_begin_at_zero_do_so_after_the_check(
    options: dict[str, Any], world_pool: WorldPools
) -> None:
    scenario = replace(HIDDEN, model=partial(Hidden, "places by position_ids"))
    kit = kit_of(world_pool, **options)
    (run,) = kit.train(scenario)
    kit.check(run, scenario)


def said_of(
    placement: Placement,
    losses: list[Any],
    given: list[dict[str, torch.Tensor]],
    model: Callable[[], nn.Module] = models.LongDecoder,
) -> list[str]:
    """What each of several steps is refused for."""
    with unipar.Session("mesh:cp=2", device="cpu", placement=placement) as session:
        engine = session.prepare(
            model(),
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        )
        said = []
        for loss, batch in zip(losses, given, strict=True):
            try:
                engine.train_step(Batch((MicroBatch(batch, 8),), 8), loss)
                said.append("")
            except ConfigError as error:
                said.append(str(error))
        return said


def summed(model: Any, batch: Any) -> LossSum:
    logits, labels = model(batch["tokens"]), batch["labels"]
    losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    weights = batch.get("weights", torch.ones_like(labels, dtype=torch.float32)).flatten()
    return LossSum((losses * weights).sum(), (weights * (labels.flatten() != -100)).sum())


def shifted(model: Any, batch: Any) -> LossSum:
    return LossSum(*shifted_inside(model, batch))


def long_batch(prompt: int = 0) -> dict[str, torch.Tensor]:
    batch = dict(models.sentences(8, 64).batch(list(range(8))))
    batch["labels"] = batch["labels"].clone()
    batch["labels"][:, :prompt] = -100
    return batch


def test_labels_shifted_in_the_loss_are_found_behind_a_prompt(world_pool: WorldPools) -> None:
    for (said,) in world_pool(2).run(said_of, [shifted], [long_batch(prompt=13)]):
        assert "items in whole sequences" in said


def test_each_loss_function_is_checked(world_pool: WorldPools) -> None:
    losses, given = [summed, shifted], [long_batch(), long_batch()]
    for first, second in world_pool(2).run(said_of, losses, given):
        assert not first
        assert "items in whole sequences" in second


def test_longer_sequences_are_checked_when_they_come(world_pool: WorldPools) -> None:
    given = [
        {name: t[:, :length] for name, t in long_batch().items() if t.ndim > 1}
        for length in (20, 22, 40)
    ]
    for said in world_pool(2).run(said_of, [summed] * 3, given, partial(Hidden, "length")):
        assert said[:2] == ["", ""]
        assert "where shorter sequences agree" in said[2]


def with_mean(model: Any, batch: Any) -> LossSum:
    """A term of its own for all positions, which each part weighs by its labels."""
    logits, labels = model(batch["tokens"]), batch["labels"]
    total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    count = (labels != -100).sum()
    return LossSum(total + 0.3 * logits.square().mean() * count, count)


def with_sum(model: Any, batch: Any) -> LossSum:
    """The same term, of the positions that have a label."""
    logits, labels = model(batch["tokens"]), batch["labels"]
    total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    there = labels != -100
    return LossSum(total + 0.3 * (logits.square().mean(-1) * there).sum(), there.sum())


def test_a_mean_weighed_by_labels_is_refused_where_some_are_left_out(
    world_pool: WorldPools,
) -> None:
    found = world_pool(2).run(said_of, [with_sum, with_mean], [long_batch(prompt=3)] * 2)
    for first, second in found:
        assert not first
        assert "another where parts have unequal numbers of labels" in second
    # Without such labels, each part has as many as positions.
    whole = {**long_batch(), "labels": long_batch()["tokens"]}
    assert world_pool(2).run(said_of, [with_mean], [whole]) == [[""], [""]]


class Rare(models.LongDecoder):
    """Does something else where a rare token stands."""

    def forward(self, tokens: torch.Tensor, position_ids: Any = None) -> Any:  # pyright: ignore
        x = super().forward(tokens, position_ids)
        return torch.where((tokens == models.VOCABULARY).any(1)[:, None, None], 1.5 * x, x)


def test_what_depends_on_rare_tokens_is_refused_when_they_come(world_pool: WorldPools) -> None:
    common, rare = long_batch(), long_batch()
    rare["tokens"] = rare["tokens"].clone()
    rare["tokens"][0, 0] = models.VOCABULARY
    for said in world_pool(2).run(said_of, [summed] * 4, [common, common, common, rare], Rare):
        assert said[:3] == ["", "", ""]
        assert "of micro-batch 4, where the first one agrees" in said[3]


class CountsCalls(models.LongDecoder):
    """Scales its outputs by how often it was called, and drops some of its inputs."""

    calls: torch.Tensor

    def __init__(self, replaces: bool = False) -> None:
        super().__init__()
        self.replaces = replaces
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: torch.Tensor, position_ids: Any = None) -> Any:  # pyright: ignore
        if self.replaces:
            self.calls = self.calls + 1
        else:
            self.calls += 1
        x = super().forward(tokens, position_ids) * (self.calls / 10).clamp(max=1.0)
        return functional.dropout(x, 0.1 + 0.1 * random.random(), self.training)


@pytest.mark.parametrize("replaces", [False, True])
def test_a_buffer_that_counts_calls_mixes_no_positions(
    replaces: bool, world_pool: WorldPools
) -> None:
    given = [long_batch()] * 2
    found = world_pool(2).run(said_of, [summed] * 2, given, partial(CountsCalls, replaces))
    assert found == [["", ""], ["", ""]]


def trained(
    placement: Placement, options: dict[str, Any], precision: Any, again: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, weights and buffers after eight micro-batches, of which four may be compared."""
    divides: Any = context_parallel
    compare_again, times = divides.compare_again, []

    def counted(*args: Any, **kwargs: Any) -> None:
        times.append(kwargs["number"])
        if again:
            compare_again(*args, **kwargs)

    divides.compare_again = counted
    random.seed(3)
    try:
        strategy = {"name": "mesh", "cp": 2, **options}
        with unipar.Session(
            strategy, device="cpu", placement=placement, precision=precision
        ) as session:
            torch.manual_seed(3)
            engine = session.prepare(
                CountsCalls(),
                optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.01),
            )
            data, losses = long_batch(), []
            halves = [{k: t[rows] for k, t in data.items()} for rows in (slice(5), slice(5, 8))]
            parts = tuple(MicroBatch(half, len(half["labels"])) for half in halves)
            for _ in range(4):
                losses.append(engine.train_step(Batch(parts, 8), summed).loss)
            state: Any = {
                **dict(engine.module.named_parameters()),
                **dict(engine.module.named_buffers()),
            }
            whole = {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in state.items()}
    finally:
        divides.compare_again = compare_again
    assert times == [2, 4, 8]
    return losses, {name: t.detach().clone() for name, t in whole.items()}


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        pytest.param({}, "fp32", marks=pytest.mark.thorough),
        ({"param_dtype": "compute", "reduce_scatter_every_microbatch": False}, "bf16"),
    ],
)
def test_comparing_again_leaves_a_run_as_it_is(
    options: dict[str, Any], precision: str, world_pool: WorldPools
) -> None:
    with_it, without = (
        world_pool(2).run(trained, options, precision, again)[0] for again in (True, False)
    )
    assert with_it[0] == without[0]
    for name, tensor in with_it[1].items():
        assert torch.equal(tensor, without[1][name]), name
    assert with_it[1]["calls"] == 8


def test_counts_may_be_sums_of_weights(world_pool: WorldPools) -> None:
    # Sums of these differ by rounding between whole sequences and parts.
    torch.manual_seed(3)
    batch = {**long_batch(), "weights": torch.rand(8, 64)}
    assert world_pool(2).run(said_of, [summed], [batch]) == [[""], [""]]


def test_scenarios_of_the_kit_have_sequences() -> None:
    assert Scenario().in_sequences().data().columns["x"].ndim == 3
    assert LONG.in_sequences() is LONG
    assert len(LONG.data()) == NUM_SAMPLES
