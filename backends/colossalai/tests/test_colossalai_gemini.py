"""Gemini: really divided, summed and clipped in fp32, and refused where it would go wrong."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from colossalai_engines import GEMINI, adamw, network, square, with_engine
from torch import nn, optim

from unipar import Session
from unipar.data.batch import Batch, MicroBatch
from unipar.engine.checks import check_capabilities
from unipar.errors import ConfigError
from unipar.objective import Objective
from unipar.strategy import EngineSpec, registry
from unipar.testing import reference
from unipar.testing.compare import assemble, assemble_weights, assert_equal_weights
from unipar.testing.harness import Exported
from unipar.testing.kit import HALF_PRECISION_FACTOR, ROUNDINGS
from unipar.testing.pool import WorldPools
from unipar.world import Placement


def refusal(strategy: str, precision: Any = "bf16", model: nn.Module | None = None) -> str:
    spec = EngineSpec(model or nn.Linear(2, 2), precision=precision)
    with pytest.raises(ConfigError) as info:
        check_capabilities(registry.resolve(strategy), spec, Placement(size=2))
    return str(info.value)


def sgd(named: Any) -> optim.Optimizer:
    return optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


def rows(index: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 24 * (index + 1))[-8:].reshape(2, 4)


def train(
    engine: Any, world: Any, steps: int = 2, microbatches: int = 1, loss: Any = square
) -> Any:
    norms = []
    for step in range(steps):
        mine = [
            MicroBatch(rows(step + micro * world.size + world.rank), 2)
            for micro in range(microbatches)
        ]
        batch = Batch(tuple(mine), 2 * world.size * microbatches)
        norms.append(engine.train_step(batch, loss).grad_norm)
    return Exported.of(engine), norms


# -- what it does --------------------------------------------------------------------------------


def shares(engine: Any, world: Any) -> tuple[int, int, int]:
    train(engine, world)
    chunks = engine.state.held.chunks
    assert not any(chunk.keep_gathered or chunk.is_gathered for chunk in chunks)
    working = sum(chunk.payload.numel() for chunk in chunks)
    masters = sum(chunk.paired_chunk.payload.numel() for chunk in chunks)
    assert all(p.untyped_storage().size() == 0 for p in engine.module.parameters())
    return working, masters, engine.num_parameters


@pytest.mark.parametrize(("options", "chunks"), [("", 1), (",chunk_size_m=0", 5)])
def test_models_of_any_size_are_divided(options: str, chunks: int, world_pool: WorldPools) -> None:
    for working, masters, whole in world_pool(4).run(
        with_engine, GEMINI + options, shares, network()
    ):
        assert working == masters
        # At most a parameter's worth of each chunk is left over.
        assert whole / 4 <= working <= whole / 4 + chunks * 162


def by_hand(size: int, microbatches: int, max_norm: float) -> tuple[dict[str, torch.Tensor], list]:
    """Half-precision gradients, averaged over ranks in half precision; the rest is fp32."""
    model, norms = network(), []
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    call = reference.Rounding(rounded)
    optimizer = sgd(model.named_parameters())
    for step in range(2):
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for micro in range(microbatches):
            of_ranks = []
            for rank in range(size):
                rounded.zero_grad()
                (square(call, rows(step + micro * size + rank)) / microbatches).backward()
                of_ranks.append([p.grad for p in rounded.parameters()])
            for total, grads in zip(sums, zip(*of_ranks, strict=True), strict=True):
                total += torch.stack(grads).sum(0).div(size)
        for p, total in zip(model.parameters(), sums, strict=True):
            p.grad = total
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        with torch.no_grad():
            for own, master in zip(rounded.parameters(), model.parameters(), strict=True):
                own.copy_(master)
    return reference.copy_weights(model), norms


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_micro_batches_are_summed_and_clipped_in_fp32(
    size: int, microbatches: int, world_pool: WorldPools
) -> None:
    weights, norms = by_hand(size, microbatches, 0.05)
    assert min(norms) > 0.05

    def run(engine: Any, world: Any) -> Any:
        return train(engine, world, microbatches=microbatches)

    results = world_pool(size).run(clipped, run)
    assert_equal_weights(assemble_weights([state for state, _ in results]), weights, 1e-6)
    for _, own in results:
        assert own == pytest.approx(norms, rel=1e-6)


def clipped(placement: Placement, run: Any) -> Any:
    return with_engine(placement, GEMINI, run, network(), optimizer=sgd, max_grad_norm=0.05)


@pytest.mark.parametrize(
    "options",
    [
        "placement=auto",
        "placement=auto,native={steady_cuda_cap_ratio: 0.8}",
        "shard_param_frac=0",
        "shard_param_frac=0.5,offload_optim_frac=0.5",
        "offload_optim_frac=1,offload_param_frac=1",
        "chunk_size_m=0",
    ],
)
def test_options_change_where_things_are_and_no_number(
    options: str, world_pool: WorldPools
) -> None:
    plain = world_pool(2).run(with_engine, GEMINI, train, network())
    other = world_pool(2).run(with_engine, f"{GEMINI},{options}", train, network())
    assert_equal_weights(
        assemble_weights([state for state, _ in other]),
        assemble_weights([state for state, _ in plain]),
        0.0,
    )


def test_trying_a_micro_batch_leaves_nothing_to_the_first_step(world_pool: WorldPools) -> None:
    def tried(engine: Any, world: Any) -> Any:
        engine.probe(MicroBatch(rows(5), 2), square)
        return train(engine, world)

    found = world_pool(2).run(with_engine, GEMINI, tried, network())
    plain = world_pool(2).run(with_engine, GEMINI, train, network())
    assert_equal_weights(
        assemble_weights([state for state, _ in found]),
        assemble_weights([state for state, _ in plain]),
        0.0,
    )


def test_automatic_placement_evaluates_before_it_has_seen_a_step(world_pool: WorldPools) -> None:
    def run(engine: Any, world: Any) -> tuple[float, float]:
        batch = Batch((MicroBatch(rows(0), 2),), 2)
        before = engine.eval_batch(batch, square).total.item()
        train(engine, world)
        return before, engine.eval_batch(batch, square).total.item()

    results = world_pool(2).run(with_engine, f"{GEMINI},placement=auto", run, network())
    plain = world_pool(2).run(with_engine, GEMINI, run, network())
    assert results == plain
    assert results[0][0] != results[0][1]


class Rates(nn.Module):
    """A buffer and a frozen weight that half precision would round, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(4, 3)
        self.frozen = nn.Parameter(torch.tensor([0.1, 0.2, 0.3]), requires_grad=False)
        self.register_buffer("rate", torch.tensor(0.1))
        self.register_buffer("calls", torch.tensor(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inward(x) * self.frozen * self.rate


def test_what_does_not_change_is_saved_as_it_was_given(world_pool: WorldPools) -> None:
    weights = assemble_weights(
        [state for state, _ in world_pool(2).run(with_engine, GEMINI, train, Rates())]
    )
    assert torch.equal(weights["frozen"], torch.tensor([0.1, 0.2, 0.3]))
    assert torch.equal(weights["rate"], torch.tensor(0.1))
    assert torch.equal(weights["calls"], torch.tensor(2.0))


def test_a_model_with_its_own_loss_is_as_far_from_fp32_as_by_hand(world_pool: WorldPools) -> None:
    exact, rounded = gpt2_by_hand(None, 1), [gpt2_by_hand(torch.bfloat16, n) for n in ROUNDINGS]
    bound = HALF_PRECISION_FACTOR * max(_apart(losses, exact) for losses in rounded)
    for losses in world_pool(2).run(gpt2_losses):
        assert 0 < _apart(losses, exact) <= bound


def _apart(losses: list[float], exact: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, exact, strict=True))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {
        "vocab_size": 11,
        "n_positions": 8,
        "n_embd": 8,
        "n_layer": 2,
        "n_head": 2,
    }
    rates: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0))


def tokens() -> torch.Tensor:
    return torch.randint(11, (16, 8), generator=torch.Generator().manual_seed(1))


def gpt2_by_hand(half_weights: torch.dtype | None, parts: int) -> list[float]:
    def terms(model: Any, rows: Any) -> tuple[torch.Tensor, Any]:
        count = rows.numel() - len(rows)
        return model(input_ids=rows, labels=rows).loss * count, count

    batches = [list(whole.chunk(parts)) for whole in tokens().split(4)]
    return reference.train(gpt2(), batches, terms, adamw, half_weights=half_weights).losses


def gpt2_losses(placement: Placement) -> list[float]:
    def run(engine: Any, world: Any) -> list[float]:
        losses, loss = [], Objective.of_model(engine.module)
        for whole in tokens().split(4):
            mine = whole.chunk(world.size)[world.rank]
            batch = Batch((MicroBatch({"input_ids": mine, "labels": mine}, len(mine)),), 4)
            losses.append(engine.train_step(batch, loss).loss)
        return losses

    return with_engine(placement, GEMINI, run, gpt2())


def test_a_checkpoint_is_taken_over_to_the_bit(world_pool: WorldPools, tmp_path: Path) -> None:
    before = world_pool(2).run(save_or_load, GEMINI, "bf16", tmp_path, False)
    for strategy, precision, size in ((GEMINI, "bf16", 4), ("colossalai:plugin=zero2", "fp32", 1)):
        after = world_pool(size).run(save_or_load, strategy, precision, tmp_path, True)
        assert_equal_weights(assemble_weights(after), assemble_weights(before), 0.0)
        assert_equal_weights(
            assemble([one.optimizer for one in after]),
            assemble([one.optimizer for one in before]),
            0.0,
        )


def save_or_load(
    placement: Placement, strategy: str, precision: Any, path: Path, load: bool
) -> Exported:
    with Session(strategy, precision=precision, device="cpu", placement=placement) as session:
        engine = session.prepare(network(4 if load else 3), optimizer=adamw)
        if load:
            session.load(path)
        else:
            train(engine, session.world)
            session.save(path)
        return Exported.of(engine)


# -- what it refuses -----------------------------------------------------------------------------


def test_fp32_is_refused_with_what_to_set() -> None:
    assert "Set precision='bf16', or use plugin='zero2'" in refusal(GEMINI, "fp32")


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (f"{GEMINI},native={{placement_policy: auto}}", "the option 'placement'"),
        (f"{GEMINI},native={{master_weights: false}}", "the run's precision"),
        (f"{GEMINI},native={{enable_gradient_accumulation: false}}", "micro_batch_size"),
        (f"{GEMINI},native={{tp_size: 2}}", "does not take here"),
    ],
)
def test_a_native_argument_that_unipar_owns_or_nobody_proved_is_refused(
    strategy: str, said: str
) -> None:
    assert said in refusal(strategy)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("placement=auto,shard_param_frac=0.5", "leave the fractions out"),
        ("offload_param_frac=1", "offload_param_frac needs shard_param_frac=1"),
        ("reduce_bucket_size_m=1", "zero1 or zero2 only"),
    ],
)
def test_options_that_have_no_effect_are_refused(options: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        registry.resolve(f"{GEMINI},{options}")


def test_weights_that_are_rounded_already_are_refused() -> None:
    assert "'weight' is torch.bfloat16" in refusal(GEMINI, model=nn.Linear(2, 2).bfloat16())


def test_norms_are_those_of_the_whole_gradient(world_pool: WorldPools) -> None:
    def run(placement: Placement) -> Any:
        return with_engine(placement, GEMINI, train, network(), max_grad_norm=math.inf)[1]

    _, expected = by_hand(2, 1, math.inf)
    assert world_pool(2).run(run)[1][0] == pytest.approx(expected[0], rel=1e-6)


class Strided(nn.Module):
    """Its gradients come in an order of strides that is not the parameters'."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.transposed = transposed
        self.inward = nn.Linear(4, 4)
        self.heads = nn.Parameter(torch.randn(2, 4, 4) / 4)
        self.outward = nn.Parameter(torch.randn(3, 4) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inward(x)
        if self.transposed:
            return torch.einsum("bi,hij->bhj", x, self.heads).sum(1) @ self.outward.t()
        first, second = (nn.functional.linear(x, head.mT.contiguous()) for head in self.heads)
        return nn.functional.linear(first + second, self.outward)


def test_gradients_of_other_strides_are_the_parameters(world_pool: WorldPools) -> None:
    found = []
    for transposed in (True, False):
        ranks = world_pool(2).run(with_engine, GEMINI, train, Strided(transposed))
        found.append(assemble_weights([state for state, _ in ranks]))
    for name, weight in found[1].items():
        # Half precision keeps 8 bits of the gradients, whose sums are taken in another order.
        torch.testing.assert_close(found[0][name], weight, rtol=1e-2, atol=1e-2)
