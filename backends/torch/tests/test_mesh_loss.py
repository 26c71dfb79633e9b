"""Losses computed from logits that two ranks divide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unipar import Session
from unipar.errors import ConfigError
from unipar.loss import LossSum
from unipar.strategy import Strategy
from unipar.testing import models
from unipar.testing.cases.shapes import DECODER
from unipar.testing.kit import Kit, Target
from unipar.testing.pool import WorldPools
from unipar.testing.scenarios import Scenario, predict_tokens, sgd
from unipar.world import Placement
from unipar_torch.mesh import MeshStrategy
from unipar_torch.mesh_options import MeshOptions

VOCABULARY = 20
"""Of no other size in the model, nor of a rank's part of one."""


def made(**options: Any) -> Callable[[], Strategy]:
    return lambda: MeshStrategy(MeshOptions(tp=2, loss_parallel=True, **options))


def kit_of(world_pool: WorldPools, **options: Any) -> Kit:
    return Kit(Target(f"mesh with loss_parallel, {options}", made(**options)), 2, world_pool)


def llama(*, tied: bool = True, vocabulary: int = VOCABULARY) -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=tied,
        )
    )


def untied() -> nn.Module:
    return llama(tied=False)


def predict(model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    return predict_tokens(lambda tokens: model(input_ids=tokens).logits, batch)


def of_each_token(model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    """Weighted by position, smoothed, with the classes in the second dimension."""
    logits, labels = model(input_ids=batch["tokens"]).logits, batch["labels"]
    losses = functional.cross_entropy(
        logits.transpose(1, 2), labels, reduction="none", label_smoothing=0.1
    )
    weights = torch.linspace(0.5, 1.5, labels.shape[1]) * (labels != -100)
    return (losses * weights).sum(), weights.sum()


def with_other_terms(model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    """What is no cross-entropy: a penalty on normalizers, and probabilities by one's own."""
    logits, labels = model(input_ids=batch["tokens"]).logits / 1.5, batch["labels"]
    kept = labels != -100
    total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    penalty = (logits.logsumexp(-1).square() * kept).sum()
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return total + 0.01 * penalty - 0.1 * (chosen * kept).sum(), kept.sum()


def of_no_cross_entropy(model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    """What DTensor computes wrong gradients of, and what it takes no plain tensor beside."""
    logits, labels = model(input_ids=batch["tokens"]).logits, batch["labels"]
    kept = (labels != -100).flatten()
    logits, labels = logits.flatten(0, 1), labels.flatten().clamp(min=0)
    total = functional.mse_loss(logits, functional.one_hot(labels, VOCABULARY).float())
    right = (logits.detach().argmax(-1) == labels).float()
    weights = torch.linspace(0.5, 1.5, VOCABULARY)
    costs = functional.cross_entropy(logits, labels, weights, reduction="none") * (1 + right)
    margins = functional.multi_margin_loss(logits, labels, reduction="none")
    count = kept.sum()
    return total * count + ((costs + margins) * kept).sum(), count


def sharpened() -> nn.Module:
    """Parameters beside the layer that gives logits."""
    model: Any = untied()
    model.scale, model.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(VOCABULARY))
    model.register_forward_hook(sharpen)
    return model


def sharpen(model: Any, args: Any, output: Any) -> Any:
    output.logits = 5 * torch.tanh(output.logits / 5) * model.scale + model.shift
    return output


LLAMA = replace(DECODER, model=llama, terms=predict, optimizer=sgd, num_steps=4)
SCENARIOS: dict[str, tuple[Scenario, dict[str, Any]]] = {
    "tied": (LLAMA, {}),
    "each token's": (replace(LLAMA, terms=of_each_token), {}),
    "other terms": (replace(LLAMA, model=untied, terms=with_other_terms), {}),
    "no cross-entropy": (replace(LLAMA, model=untied, terms=of_no_cross_entropy), {}),
    "parameters after logits": (replace(LLAMA, model=sharpened), {}),
    "divided sequences, recomputation, accumulation": (
        replace(LLAMA, activation_checkpointing="full", accumulation=2),
        {"sequence_parallel": True},
    ),
    "bf16": (replace(LLAMA, precision="bf16"), {"param_dtype": "fp32"}),
    "compiled": (replace(LLAMA, compile_backend="aot_eager"), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough if name == "compiled" else ())
        for name in SCENARIOS
    ],
)
def test_losses_of_divided_logits_train_the_same_run(name: str, world_pool: WorldPools) -> None:
    scenario, options = SCENARIOS[name]
    kit = kit_of(world_pool, **options)
    (run,) = kit.train(scenario)
    kit.check(run, scenario)


@pytest.mark.thorough
def test_beside_sharded_parameters(world_pool: WorldPools) -> None:
    scenario = replace(LLAMA, accumulation=2)
    kit = Kit(Target("mesh with loss_parallel", made(dp_shard=2)), 4, world_pool)
    (run,) = kit.train(scenario)
    kit.check(run, scenario)


# -- what ranks hold -------------------------------------------------------------------------------


class _Widest(TorchDispatchMode):
    """The most elements of a plain tensor whose last dimension is the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if type(tensor) is torch.Tensor and tensor.ndim and tensor.shape[-1] == VOCABULARY:
                self.elements = max(self.elements, tensor.numel())
        return out


def widest(placement: Placement, strategy: str) -> tuple[int, list[str]]:
    """The most elements of whole logits in a step, and what evaluation's loss is given."""
    given: list[str] = []

    def loss(model: Any, batch: Any) -> LossSum:
        logits = model(input_ids=batch["tokens"]).logits
        given.append(type(logits).__name__)
        labels = batch["labels"]
        total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return LossSum(total, (labels != -100).sum())

    with Session(strategy, device="cpu", placement=placement) as session:
        engine = session.prepare(llama(), optimizer=sgd)
        data = models.sentences(8, models.EVEN_LENGTH)
        batches = list(session.loader(data, global_batch_size=4))
        engine.train_step(batches[0], loss)
        with _Widest() as widest:
            engine.train_step(batches[1], loss)
        given.clear()
        session.evaluate(engine, batches[:1], loss)
        return widest.elements, given


def test_no_rank_holds_logits_of_the_whole_vocabulary(world_pool: WorldPools) -> None:
    pool = world_pool(2)
    for elements, given in pool.run(widest, "mesh:tp=2,loss_parallel=true"):
        assert elements == 0
        # Metrics are made for whole ones.
        assert given == ["Tensor"]
    for elements, _ in pool.run(widest, "mesh:tp=2"):
        assert elements == 4 * models.EVEN_LENGTH * VOCABULARY


# -- bad input -------------------------------------------------------------------------------------


def outside(placement: Placement, label: int) -> str:
    """What is said of labels that are no tokens."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        logits = model(input_ids=batch).logits.flatten(0, 1)
        labels = torch.full((len(logits),), label)
        labels[0] = VOCABULARY - 1 - label
        return functional.cross_entropy(logits, labels)

    with Session("mesh:tp=2,loss_parallel=true", device="cpu", placement=placement) as session:
        engine = session.prepare(llama(), optimizer=sgd)
        batch = next(iter(session.loader(torch.zeros(4, 6).long(), global_batch_size=4)))
        with pytest.raises(Exception, match="out of bounds") as raised:
            engine.train_step(batch, loss)
        return type(raised.value).__name__


def test_labels_outside_of_the_vocabulary_are_an_error(world_pool: WorldPools) -> None:
    # One is below all that the first rank has, the other above all of the last one's.
    assert world_pool(2).run(outside, -5) == ["RuntimeError"] * 2


def test_a_vocabulary_that_stays_whole_is_refused(world_pool: WorldPools) -> None:
    scenario = replace(LLAMA, model=lambda: llama(vocabulary=21), num_steps=1)
    with pytest.raises(ConfigError, match=r"loss_parallel divides the logits.* multiple of tp"):
        kit_of(world_pool).train(scenario)


def in_place(placement: Placement) -> str:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        logits = model(input_ids=batch).logits
        logits[..., 0] = -1e9
        return functional.cross_entropy(logits.flatten(0, 1), batch.flatten())

    with Session("mesh:tp=2,loss_parallel=true", device="cpu", placement=placement) as session:
        engine = session.prepare(llama(), optimizer=sgd)
        batch = next(iter(session.loader(torch.ones(4, 6).long(), global_batch_size=4)))
        with pytest.raises(ConfigError) as raised:
            engine.train_step(batch, loss)
        return str(raised.value)


def test_logits_that_a_loss_changes_in_place_are_refused(world_pool: WorldPools) -> None:
    for said in world_pool(2).run(in_place):
        assert "__setitem__ changes logits in place" in said


def by_hand(placement: Placement) -> str:
    with Session("mesh:tp=2,loss_parallel=true", device="cpu", placement=placement) as session:
        engine = session.prepare(llama(), optimizer=sgd)
        with pytest.raises(ConfigError) as raised:
            engine(input_ids=torch.zeros(1, 4).long())
        return str(raised.value)


def test_a_loop_of_ones_own_is_refused(world_pool: WorldPools) -> None:
    for said in world_pool(2).run(by_hand):
        assert "call engine.train_step(batch, loss_fn)" in said


# -- losses of what a rank has ---------------------------------------------------------------------


def of_hidden_states(model: Any, batch: Any) -> torch.Tensor:
    found = model(input_ids=batch["tokens"], output_hidden_states=True).hidden_states
    return torch.stack([hidden.square().mean() for hidden in found]).sum()


def of_attention_weights(model: Any, batch: Any) -> torch.Tensor:
    found = model(input_ids=batch["tokens"], output_attentions=True).attentions
    return torch.stack([weights.square().mean() for weights in found]).sum()


def of_logits(model: Any, batch: Any) -> torch.Tensor:
    return model(input_ids=batch["tokens"]).logits.logsumexp(-1).mean()


def losses_of(placement: Placement, strategy: str, loss: Any, warmed_up: bool) -> list[float]:
    torch.manual_seed(0)
    model = llama()
    model.set_attn_implementation("eager")  # pyright: ignore[reportCallIssue]
    tokens = torch.arange(24).view(4, 6) % VOCABULARY
    with Session(strategy, device="cpu", placement=placement) as session:
        engine = session.prepare(model, optimizer=sgd)
        batches = list(session.loader([{"tokens": row} for row in tokens], global_batch_size=4))
        if warmed_up:
            engine.train_step(batches[0], of_logits)
        return [engine.train_step(batches[0], loss).loss]


@pytest.mark.parametrize(
    ("sequence", "loss", "warmed_up", "said"),
    [
        (False, of_attention_weights, False, r"self_attn\.[kq]_proj' by another way"),
        # Blocks are compared in the first pass, whose attention weights are then among these.
        (False, of_attention_weights, True, r"self_attn\.[kq]_proj' by another way"),
        (True, of_hidden_states, False, r"\(a part of the sequence\)' by another way"),
    ],
)
def test_a_loss_of_what_each_rank_has_a_part_of_is_refused(
    sequence: bool, loss: Any, warmed_up: bool, said: str, world_pool: WorldPools
) -> None:
    strategy = "mesh:tp=2" + ",sequence_parallel=true" * sequence
    with pytest.raises(ConfigError, match=said):
        world_pool(2).run(losses_of, strategy, loss, warmed_up)


def test_a_loss_of_whole_hidden_states_is_that_of_one_process(world_pool: WorldPools) -> None:
    (alone,) = world_pool(1).run(losses_of, "single", of_hidden_states, False)
    for losses in world_pool(2).run(losses_of, "mesh:tp=2", of_hidden_states, False):
        assert losses == pytest.approx(alone, rel=1e-5)
