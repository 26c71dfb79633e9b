"""Layers divided over two ranks: models of several kinds, sequences, wrong plans, traffic."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import unipar
from unipar.data.batch import Batch, MicroBatch
from unipar.errors import ConfigError
from unipar.loss import LossSum
from unipar.state import local_part
from unipar.strategy import Strategy
from unipar.testing import models
from unipar.testing.cases import ALL
from unipar.testing.cases.numbers import PLAIN
from unipar.testing.cases.shapes import DECODER
from unipar.testing.compare import assert_equal_weights
from unipar.testing.kit import Kit, Target
from unipar.testing.pool import WorldPools
from unipar.testing.scenarios import predict_tokens, sgd
from unipar.world import Placement
from unipar_torch.mesh import MeshStrategy
from unipar_torch.mesh_options import MeshOptions

CASES = {case.name: case for case in ALL}
PAIRS = {
    **{f"blocks.*.attention.{name}": "colwise" for name in "qkv"},
    "blocks.*.attention.out": "rowwise",
    "blocks.*.down": "rowwise",
    "blocks.*.gate": "colwise",
    "blocks.*.up": "colwise",
}


def made(**options: Any) -> Callable[[], Strategy]:
    return lambda: MeshStrategy(MeshOptions(tp=2, **options))


def kit_of(world_pool: WorldPools, **options: Any) -> Kit:
    return Kit(Target(f"mesh with {options}", made(**options)), 2, world_pool)


# -- models ----------------------------------------------------------------------------------------


def logits_of(model: Any) -> Callable[..., torch.Tensor]:
    # With a cache, as models of transformers have it unless they are told otherwise.
    return lambda tokens: model(input_ids=tokens).logits


def predict(model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    return predict_tokens(logits_of(model), batch)


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


def llama() -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    )


def qwen3() -> nn.Module:
    import transformers

    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=4))


def olmo2() -> nn.Module:
    import transformers

    return transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**SIZES))


def gemma2() -> nn.Module:
    import transformers

    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, head_dim=4))


def phi3() -> nn.Module:
    import transformers

    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**SIZES))


def neox() -> nn.Module:
    import transformers

    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    config = transformers.GPTNeoXConfig(**sizes, hidden_dropout=0.0, attention_dropout=0.0)
    return transformers.GPTNeoXForCausalLM(config)


def bert() -> nn.Module:
    import transformers

    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    config = transformers.BertConfig(
        **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    model = transformers.BertForMaskedLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("key.bias"):
            # It moves all scores of a query alike, so its gradient is rounding error.
            parameter.requires_grad_(False)
    return _Bert(model)


class _Bert(nn.Module):
    """Its plan is found by tracing."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.model(input_ids=input_ids)


MODELS = [
    llama,
    *(
        pytest.param(m, marks=pytest.mark.thorough)
        for m in (qwen3, olmo2, gemma2, phi3, neox, bert)
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_models_of_transformers_train_the_same_run(
    model: Callable[[], nn.Module], world_pool: WorldPools
) -> None:
    scenario = replace(DECODER, model=model, terms=predict, optimizer=sgd, num_steps=5)
    kit = kit_of(world_pool)
    (run,) = kit.train(scenario)
    kit.check(run, scenario)


@pytest.mark.slow
@pytest.mark.parametrize("model", [llama, pytest.param(neox, marks=pytest.mark.thorough)])
def test_models_of_transformers_divide_sequences(
    model: Callable[[], nn.Module], world_pool: WorldPools
) -> None:
    scenario = replace(DECODER, model=model, terms=predict, optimizer=sgd, num_steps=5)
    kit = kit_of(world_pool, sequence_parallel=True)
    (run,) = kit.train(scenario)
    kit.check(run, scenario)


def test_sequences_are_divided_with_recomputation_in_half_precision(
    world_pool: WorldPools,
) -> None:
    scenarios = [
        replace(DECODER, activation_checkpointing="full", accumulation=2, num_steps=5),
        replace(DECODER, precision="bf16", num_steps=5),
    ]
    # Gathered in bf16, weights and their gradients are rounded once more than by autocast alone.
    kit = kit_of(world_pool, sequence_parallel=True, param_dtype="fp32")
    for run, scenario in zip(kit.train(*scenarios), scenarios, strict=True):
        kit.check(run, scenario)


def test_sequences_are_divided_with_activations_elsewhere(world_pool: WorldPools) -> None:
    scenarios = [
        replace(DECODER, activation_checkpointing="selective", accumulation=2, num_steps=3),
        replace(DECODER, activation_offload=True, num_steps=3),
    ]
    kit = kit_of(world_pool, sequence_parallel=True)
    for run, scenario in zip(kit.train(*scenarios), scenarios, strict=True):
        kit.check(run, scenario)


def test_tied_embeddings_are_divided_as_a_plan_says(world_pool: WorldPools) -> None:
    options = {"plan": {**PAIRS, "tokens": "embedding_rowwise"}, "sequence_parallel": True}
    CASES["divides_a_decoder"].check(kit_of(world_pool, **options))


def test_without_tensor_parallelism_it_is_fsdp_to_the_bit(world_pool: WorldPools) -> None:
    scenario = replace(PLAIN, num_steps=4)
    runs = [Kit(Target.named(name), 2, world_pool).train(scenario)[0] for name in ("mesh", "fsdp")]
    assert runs[0].trace.losses == runs[1].trace.losses
    assert runs[0].trace.grad_norms == runs[1].trace.grad_norms
    assert_equal_weights(runs[0].trace.weights, runs[1].trace.weights, 0.0)


# -- plans that change what a model computes -------------------------------------------------------


class Scaled(nn.Module):
    """Between divided layers there is a factor, whose gradient each rank has a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.factor = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)) * self.factor)


class ScaledNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Held(nn.Module):
    """A block that holds another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Scaled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class HeldNetwork(ScaledNetwork):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Held() for _ in range(2))


class ZeroNetwork(ScaledNetwork):
    """Blocks begin as nothing."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(2):
            nn.init.zeros_(self.get_parameter(f"blocks.{number}.down.weight"))


class Given(nn.Module):
    """Between divided layers there is a factor that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)) * factor)


class GivingNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([1.5]))
        self.blocks = nn.ModuleList(Given() for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = self.factor * 2
        for block in self.blocks:
            x = block(x, factor)
        return self.head(x)


SCALED = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
WRONG = {
    "a layer left out": (
        DECODER,
        {name: style for name, style in PAIRS.items() if "gate" not in name},
        r"dividing 'blocks\.0' \(DecoderBlock\).* divided, it raises RuntimeError",
    ),
    "no sum": (
        replace(PLAIN, model=ScaledNetwork),
        {"blocks.*.up": "colwise_gather_output", "blocks.1.down": "rowwise"},
        r"dividing 'blocks\.1' \(Scaled\).* divided, it raises RuntimeError",
    ),
    "a gradient in parts": (
        replace(PLAIN, model=ScaledNetwork),
        SCALED,
        r"dividing 'blocks\.0'.* the gradient of factor is \d.*replicated_with_grad_allreduce",
    ),
    "a gradient in parts, behind zeros": (
        replace(PLAIN, model=ZeroNetwork),
        SCALED,
        r"dividing 'blocks\.0'.* the gradient of factor is \d",
    ),
    "a gradient in parts, of what a block is given": (
        replace(PLAIN, model=GivingNetwork),
        SCALED,
        r"dividing 'blocks\.0'.* the gradient of what else it is given \(tensor 1\) is \d",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_plan_that_changes_the_model_is_refused_in_the_first_pass(
    name: str, world_pool: WorldPools
) -> None:
    scenario, plan, said = WRONG[name]
    with pytest.raises(ConfigError, match=said):
        kit_of(world_pool, plan=plan).train(replace(scenario, num_steps=1))


class Branching(Scaled):
    """In training it does otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("fired", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.up(x))
        return x + self.down(self.trained(inner) if self.training else inner)

    def trained(self, inner: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Centered(Branching):
    """Hidden units are coupled."""

    def trained(self, inner: torch.Tensor) -> torch.Tensor:
        return inner - inner.mean(-1, keepdim=True)


class Firing(Branching):
    """Counts for each hidden unit."""

    def trained(self, inner: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.fired += (inner > 0).flatten(0, -2).sum(0)
        return inner


class Noisy(Branching):
    """Random numbers for each hidden unit."""

    def trained(self, inner: torch.Tensor) -> torch.Tensor:
        return inner * torch.rand_like(inner)


class OfPython(Branching):
    """Random numbers that ranks have each for themselves."""

    def __init__(self) -> None:
        super().__init__()
        # A session before this one may have given ranks the same.
        random.seed(os.getpid())

    def trained(self, inner: torch.Tensor) -> torch.Tensor:
        return inner * random.random()


def network_of(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = ScaledNetwork()
        model.blocks = nn.ModuleList(kind() for _ in range(2))
        return model

    return build


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Centered, r"dividing 'blocks\.0' \(Centered\).*: output 0 is \d"),
        (Firing, r"\(Firing\).*divided, it raises RuntimeError"),
        (Noisy, r"\(Noisy\).*draws other random numbers where it is divided"),
        (OfPython, r"'blocks\.0' \(OfPython\) draws from Python's random"),
    ],
)
def test_what_blocks_do_in_training_alone_is_checked(
    kind: Callable[[], nn.Module], said: str, world_pool: WorldPools
) -> None:
    plan = {**SCALED, "blocks.*": "replicated_with_grad_allreduce"}
    with pytest.raises(ConfigError, match=said):
        kit_of(world_pool, plan=plan).train(replace(PLAIN, model=network_of(kind), num_steps=1))


class Averaging(models.DecoderBlock):
    """In training it mixes positions."""

    def forward(self, x: torch.Tensor, cos: Any = None, sin: Any = None) -> torch.Tensor:
        y = super().forward(x, cos, sin)
        return y + x.mean(1, keepdim=True) if self.training else y


def averaging() -> nn.Module:
    model = models.Decoder()
    model.blocks = nn.ModuleList(Averaging(16, 4, 2) for _ in range(2))
    return model


def test_blocks_that_mix_positions_in_training_alone_are_refused_where_sequences_are_divided(
    world_pool: WorldPools,
) -> None:
    kit = kit_of(world_pool, plan=PAIRS, sequence_parallel=True)
    with pytest.raises(ConfigError, match=r"\(Averaging\).*output 0 is \d"):
        kit.train(replace(DECODER, model=averaging, num_steps=1))


class Keeping(nn.Module):
    """Statistics, a count, a list and dropout, all of which a trial of it would change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.count, self.seen = 0, [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
            self.seen.append(self.count)
        return x + self.down(nn.functional.dropout(self.up(self.norm(x)), 0.5, self.training))


def kept(placement: Placement, model: nn.Module) -> tuple[Any, Any]:
    """What blocks keep after a step, and what a rank draws then."""
    with unipar.Session("mesh:tp=2", device="cpu", placement=placement) as session:
        engine = session.prepare(model, optimizer="sgd")
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
        engine.train_step(
            Batch((MicroBatch(x, 16),), 16), lambda model, x: model(x).square().mean()
        )
        blocks: Any = engine.module.get_submodule("blocks")
        return [
            (block.norm.num_batches_tracked.item(), block.count, list(block.seen))
            for block in blocks
        ], torch.rand(2).tolist()


def test_checks_leave_nothing_behind(world_pool: WorldPools) -> None:
    for blocks, drawn in world_pool(2).run(kept, network_of(Keeping)()):
        assert blocks == [(1, 1, [0, 1])] * 2
        torch.manual_seed(0)
        for _ in range(2):
            nn.functional.dropout(torch.ones(16, 4))
        assert drawn == torch.rand(2).tolist()


def patched_forwards(
    placement: Placement, model: nn.Module, options: dict[str, Any]
) -> tuple[float, list[str]]:
    """The loss of a step, and which patched modules have another forward after the session."""
    plan = {"*.up": "colwise", "*.down": "rowwise"}
    strategy = {"name": "mesh", "tp": 2, "plan": plan, **options}
    with unipar.Session(strategy, device="cpu", placement=placement) as session:
        engine = session.prepare(model, optimizer="sgd")
        module: nn.Module = engine.module
        batch = Batch((MicroBatch(some_sequences(), 8),), 8)
        loss = engine.train_step(batch, lambda model, x: model(x).square().mean()).loss
    left = [
        name
        for name, part in module.named_modules()
        if ("forward" in vars(part)) != hasattr(part, "patched")
        or (hasattr(part, "patched") and vars(part)["forward"].__name__ != "thrice")
    ]
    return loss, left


def some_sequences() -> torch.Tensor:
    return torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(1))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def patch(part: nn.Module) -> None:
    own = part.forward
    vars(part)["patched"] = True

    def thrice(x: torch.Tensor) -> torch.Tensor:
        return 3 * own(x)

    part.forward = thrice


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}])
def test_patched_forwards_are_trained_with_and_given_back(
    options: dict[str, Any], world_pool: WorldPools
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Residual(), Residual())
    for block in model:
        patch(block)
    plain = model(some_sequences()).square().mean().item()
    for loss, left in world_pool(2).run(patched_forwards, model, options):
        assert loss == pytest.approx(plain, rel=1e-5)
        assert left == []


def test_a_layer_with_a_patched_forward_is_not_divided(world_pool: WorldPools) -> None:
    torch.manual_seed(0)
    patched = Residual()
    patch(patched.up)
    model = nn.Sequential(Residual(), patched)
    with pytest.raises(ConfigError, match=r"computes otherwise than nn\.Linear"):
        world_pool(2).run(patched_forwards, model, {})


def test_parts_of_blocks_that_are_gathered_by_themselves_are_checked(
    world_pool: WorldPools,
) -> None:
    scenario = replace(PLAIN, model=HeldNetwork, num_steps=5)
    plan = {name.replace("*.", "*.inner."): style for name, style in SCALED.items()}
    with pytest.raises(ConfigError, match=r"the gradient of inner\.factor is \d"):
        kit_of(world_pool, plan=plan, wrap=["Scaled"]).train(scenario)
    summed = {**plan, "blocks.*.inner": "replicated_with_grad_allreduce"}
    kit = kit_of(world_pool, plan=summed, wrap=["Scaled"])
    (run,) = kit.train(scenario)
    kit.check(run, scenario)


def test_a_gradient_in_parts_is_summed_where_the_plan_says_so(world_pool: WorldPools) -> None:
    scenario = replace(PLAIN, model=ScaledNetwork, num_steps=5)
    plan = {**SCALED, "blocks.*": "replicated_with_grad_allreduce"}
    kit = kit_of(world_pool, plan=plan)
    (run,) = kit.train(scenario)
    kit.check(run, scenario)


def test_sequences_that_do_not_divide_are_refused(world_pool: WorldPools) -> None:
    odd = models.sentences(16, 7)
    with pytest.raises(ConfigError, match=r"of length 7 .*Pad them to a multiple of 2"):
        kit_of(world_pool, sequence_parallel=True).train(
            replace(DECODER, data=lambda: odd, num_steps=1)
        )
    with pytest.raises(ConfigError, match=r"shape \(batch, sequence, width\)"):
        kit_of(world_pool, sequence_parallel=True).train(replace(PLAIN, num_steps=1))


class Mixing(models.Decoder):
    """Something between blocks sees the whole sequence."""

    def forward(self, tokens: torch.Tensor, position_ids: Any = None) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x).cumsum(1)
        return self.head(self.norm(x))


def test_what_happens_between_blocks_is_refused_where_sequences_are_divided(
    world_pool: WorldPools,
) -> None:
    with pytest.raises(ConfigError, match=r"does something between its blocks"):
        kit_of(world_pool, sequence_parallel=True).train(
            replace(DECODER, model=Mixing, num_steps=1)
        )


# -- what ranks do alike, and what they send -------------------------------------------------------


class Dropping(models.Decoder):
    """Drops what all ranks have whole, and would learn apart from different masks."""

    def forward(self, tokens: torch.Tensor, position_ids: Any = None) -> torch.Tensor:
        x = nn.functional.dropout(self.tokens(tokens), 0.5, self.training)
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.5, self.training)
        return self.head(self.norm(x))


def step_of(placement: Placement, model: nn.Module, options: dict[str, Any]) -> Any:
    """A step in a session: its loss, a weight that is whole on each rank, and collectives."""
    with unipar.Session({"name": "mesh", **options}, device="cpu", placement=placement) as session:
        engine = session.prepare(
            model, optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)
        )
        data = models.sentences(8, models.EVEN_LENGTH)
        part = MicroBatch(data.batch(list(range(8))), 8)

        def loss(model: Any, batch: Any) -> LossSum:
            return LossSum(*predict_tokens(model, batch))

        engine.train_step(Batch((part,), 8), loss)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            told = engine.train_step(Batch((part,), 8), loss).loss
        weight: Any = dict(engine.module.named_parameters())["blocks.0.norm_feed.weight"]
        counts = {event.key.split("::")[-1]: event.count for event in profiled.key_averages()}
        return told, local_part(weight).tolist(), counts


def test_dropout_is_the_same_where_all_ranks_have_the_whole(world_pool: WorldPools) -> None:
    (loss, own, _), (other, others, _) = world_pool(2).run(step_of, Dropping(), {"tp": 2})
    assert loss == other
    assert own == others


def test_each_pair_of_layers_sums_once_in_each_direction(world_pool: WorldPools) -> None:
    """Queries, keys and values have one input, whose gradient is summed once; so a gate and up."""
    *_, counts = world_pool(2).run(step_of, models.Decoder(), {"tp": 2})[0]
    pairs = 2 * len(models.Decoder().blocks)
    assert counts["all_reduce"] == 2 * pairs


def test_divided_sequences_are_scattered_and_gathered_in_place_of_sums(
    world_pool: WorldPools,
) -> None:
    options = {"tp": 2, "sequence_parallel": True}
    *_, counts = world_pool(2).run(step_of, models.Decoder(), options)[0]
    pairs = 2 * len(models.Decoder().blocks)
    assert counts["reduce_scatter_tensor"] == 2 * pairs


# -- what one rank alone sees, and torch's shortcuts -----------------------------------------------


class _Overflow(torch.autograd.Function):
    """Has gradients overflow on the second rank, once it is told to."""

    wanted = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        here = _Overflow.wanted and torch.distributed.get_rank() == 1
        return gradients[0] * (float("inf") if here else 1.0)


class Overflowing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(_Overflow.apply(self.up(x))))


class OverflowingNetwork(nn.Module):
    """Its first parameter is whole on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.blocks = nn.ModuleList([Overflowing()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[0](x))


def overflows(placement: Placement, plan: dict[str, str]) -> list[bool]:
    """Whether steps are skipped whose gradients overflow on the second rank."""
    with unipar.Session(
        {"name": "mesh", "tp": 2, "plan": plan},
        device="cpu",
        placement=placement,
        precision="fp16",
    ) as session:
        engine = session.prepare(
            OverflowingNetwork(),
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        )
        batch = Batch((MicroBatch((torch.ones(2, 6), torch.tensor([0, 1])), 2),), 2)

        def loss(model: Any, batch: Any) -> torch.Tensor:
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

        skipped = []
        for _Overflow.wanted in (False, True):
            skipped.append(engine.train_step(batch, loss).skipped)
        _Overflow.wanted = False
        return skipped


def test_all_ranks_skip_a_step_in_fp16_that_overflows_on_one(world_pool: WorldPools) -> None:
    assert world_pool(2).run(overflows, SCALED) == [[False, True]] * 2


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def without_gradients(placement: Placement, model: nn.Module) -> float:
    """How far the outputs are apart with gradients, without, and in inference mode."""
    strategy = {"name": "mesh", "tp": 2, "wrap": "none"}
    with unipar.Session(strategy, device="cpu", placement=placement) as session:
        module = session.prepare(model).module.eval()
        x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
        expected = module(x).detach()
        with torch.no_grad():
            apart = (module(x) - expected).abs().max()
        with torch.inference_mode():
            return max(apart.item(), (module(x) - expected).abs().max().item())


def test_divided_layers_compute_the_same_without_gradients(world_pool: WorldPools) -> None:
    assert world_pool(2).run(without_gradients, Encoder()) == pytest.approx([0.0, 0.0], abs=1e-5)


# -- exchanges beside products ---------------------------------------------------------------------


class Gated(nn.Module):
    """A block whose products have no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def gated() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(Gated(), Gated()), nn.Linear(8, 3))


def sequences() -> torch.Tensor:
    return torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))


def overlapped(placement: Placement) -> Any:
    """Losses of two steps whose exchanges the compiler puts into products, and what it puts in."""
    from torch._inductor import config
    from torch.distributed import _symmetric_memory as memory

    fused: set[str] = set()

    def look(graph: torch.fx.Graph) -> None:
        fused.update(str(node.target) for node in graph.nodes if "symm_mem" in str(node.target))

    # The operations are CUDA's; what torch tests them by runs anywhere (torch 2.13,
    # distributed/_symmetric_memory/__init__.py).
    kernels = torch.library.Library("symm_mem", "IMPL")
    kernels.impl("fused_all_gather_matmul", memory._fused_all_gather_matmul_fallback, "CPU")
    kernels.impl("fused_matmul_reduce_scatter", memory._fused_matmul_reduce_scatter_fallback, "CPU")
    options = {"name": "mesh", "tp": 2, "sequence_parallel": True, "async_tp": True}
    try:
        with (
            memory._test_mode(),
            mock.patch("torch.distributed.is_nccl_available", return_value=True),
            mock.patch("unipar_torch.async_tp.check"),
            mock.patch.object(config, "post_grad_custom_post_pass", look),
            unipar.Session(options, device="cpu", placement=placement) as session,
        ):
            engine = session.prepare(gated(), optimizer={"name": "sgd", "lr": 0.1}, compile=True)
            part = Batch((MicroBatch(sequences(), 4),), 4)
            losses = [
                engine.train_step(part, lambda model, x: model(x).square().mean()).loss
                for _ in range(2)
            ]
    finally:
        kernels._destroy()
    return losses, fused, config._micro_pipeline_tp


@pytest.mark.thorough
@pytest.mark.timeout(600)  # Each rank compiles.
def test_exchanges_go_into_products_and_change_nothing(world_pool: WorldPools) -> None:
    model, expected = gated(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(sequences()).square().mean()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses, fused, left in world_pool(2).run(overlapped, timeout=600.0):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert {name.split(".")[1] for name in fused} == {
            "fused_all_gather_matmul",
            "fused_matmul_reduce_scatter",
        }
        assert not left


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sequence_parallel": True}, r"async_tp=true needs GPUs .* Leave async_tp out"),
        ({}, r"async_tp is about exchanges of divided sequences. Set sequence_parallel=true"),
    ],
)
def test_exchanges_that_no_compiler_can_overlap_are_refused(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        unipar.fit(
            gated(),
            sequences(),
            strategy={"name": "mesh", "tp": 2, "async_tp": True, **options},
            loss=lambda model, x: model(x).square().mean(),
            devices=2,
            device="cpu",
            compile=True,
            global_batch_size=4,
        )


class Remembering(torch.optim.SGD):
    """Keeps gradients as they come, which checkpoints then hold."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["last"] = parameter.grad.detach()
        return super().step(closure)


def remembered(placement: Placement) -> list[tuple[Any, Any]]:
    """How parameters are divided, and what an optimizer of one's own keeps of their gradients."""
    strategy = {"name": "mesh", "tp": 2, "sequence_parallel": True}
    with unipar.Session(strategy, device="cpu", placement=placement) as session:
        engine = session.prepare(
            gated(), optimizer=lambda named: Remembering([p for _, p in named], lr=0.1)
        )
        part = Batch((MicroBatch(sequences(), 4),), 4)
        engine.train_step(part, lambda model, x: model(x).square().mean())
        optimizer: Any = engine.optimizer
        state = optimizer.state
        return [
            (getattr(p, "placements", None), getattr(state[p]["last"], "placements", None))
            for p in engine.module.parameters()
        ]


@pytest.mark.skipif(
    torch.__version__ < "2.11", reason="what computes with DTensors of torch 2.8 is refused"
)
def test_optimizers_get_gradients_that_are_divided_as_parameters_are(
    world_pool: WorldPools,
) -> None:
    for pairs in world_pool(2).run(remembered):
        # Layers and norms of blocks, and what stands outside of them, which is plain.
        assert {placed is None for placed, _ in pairs} == {True, False}
        assert all(placed == kept for placed, kept in pairs)
