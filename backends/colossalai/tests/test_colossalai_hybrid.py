"""Tensor and pipeline parallelism train the same run as a plain loop in one process."""

from __future__ import annotations

import functools
import time
from typing import Any

import pytest
import torch
from colossalai_hybrid import BOTH, OWN_LOSS, PP, TP, prepare, take
from colossalai_models import (
    BATCH,
    Sentences,
    Step,
    adamw,
    entropy,
    inputs,
    language_model,
    plain_loop,
)

from unipar import LossSum, Objective, Session
from unipar.benchmark.bubble import PassTimes
from unipar.benchmark.records import Passes
from unipar.errors import ConfigError
from unipar.testing.pool import WorldPools
from unipar.world import Placement

pytestmark = pytest.mark.slow

STEPS = 12


def train(
    placement: Placement,
    strategy: str,
    micro: int | None = None,
    settings: dict[str, Any] | None = None,
    loss: Any = None,
    steps: int = STEPS,
    activations: str = "off",
    shares: list[float] | None = None,
) -> list[Step]:
    with Session(strategy, device="cpu", placement=placement) as session:
        # Each rank's own weights, of which those of rank 0 must be what is trained.
        model = language_model(seed=placement.rank, **(settings or {}))
        engine, loader = prepare(
            session, model, micro, shares, activation_checkpointing=activations
        )
        return take(engine, loader, steps, loss)


@functools.cache
def expected(settings: tuple[tuple[str, Any], ...]) -> list[Step]:
    return plain_loop(language_model(**dict(settings)), STEPS)


def assert_same(done: list[list[Step]], settings: dict[str, Any] | None = None) -> None:
    for of_rank in done:
        wanted = expected(tuple((settings or {}).items()))[: len(of_rank)]
        assert of_rank == [pytest.approx(step, rel=1e-5) for step in wanted]


TIED = {"tie_word_embeddings": True}
SDPA = {"attn_implementation": "sdpa"}
WINDOW = {"kind": "Mistral", "sliding_window": 4}


@pytest.mark.parametrize(
    ("strategy", "ranks", "micro", "settings"),
    [
        (TP, 2, None, {}),
        (TP, 2, 3, TIED),
        (PP, 2, None, {}),
        (PP, 2, 3, TIED),
        (PP, 4, 1, {}),
        (BOTH, 4, 3, TIED),
        (TP + ",native={make_vocab_size_divisible_by: 1}", 2, None, {}),
        (TP, 2, None, SDPA),
        (BOTH, 4, None, WINDOW | TIED),
        *(
            pytest.param(*one, marks=pytest.mark.thorough)
            for one in (
                (TP, 4, 1, TIED),
                (PP, 2, 3, SDPA),
                (TP, 2, 3, WINDOW),
                (PP, 2, 3, WINDOW | SDPA),
            )
        ),
    ],
)
def test_losses_and_gradient_norms_are_those_of_a_plain_loop(
    strategy: str,
    ranks: int,
    micro: int | None,
    settings: dict[str, Any],
    world_pool: WorldPools,
) -> None:
    assert_same(world_pool(ranks).run(train, strategy, micro, settings), settings)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", [TP, PP])
def test_replicas_take_unequal_shares(strategy: str, world_pool: WorldPools) -> None:
    run = functools.partial(train, shares=[3, 1])
    assert_same(world_pool(4).run(run, strategy, 3))


def is_flat(name: str, parameter: torch.Tensor) -> bool:
    return "norm" in name or name.endswith("bias")


def train_by_two(placement: Placement, strategy: str) -> list[Step]:
    """By an optimizer for each parameter group of the plain loop's, with a scheduler for each."""
    common = {
        "name": "adamw",
        "eps": 1e-4,
        "lr_scheduler": {"name": "steplr", "step_size": 3, "gamma": 0.8},
    }
    two = {
        "flat": {**common, "lr": 5e-3, "weight_decay": 0.0, "params": is_flat},
        "deep": {**common, "lr": 1e-2, "weight_decay": 0.1},
    }
    with Session(strategy, device="cpu", placement=placement) as session:
        engine, loader = prepare(session, language_model(), optimizer=two, lr_scheduler=None)
        return take(engine, loader, 6)


@pytest.mark.parametrize("strategy", [TP, PP])
def test_several_optimizers_train_the_same_run(strategy: str, world_pool: WorldPools) -> None:
    assert_same(world_pool(2).run(train_by_two, strategy))


@pytest.mark.parametrize("strategy", [TP, PP])
def test_recomputed_activations_change_nothing(strategy: str, world_pool: WorldPools) -> None:
    done = world_pool(2).run(train, strategy, 4, {}, None, 5, "full")
    assert_same(done)


def mean_of_labels(output: Any, batch: Any) -> torch.Tensor:
    logits, labels = output.logits[:, :-1], batch["labels"][:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


COUNTED = Objective(
    lambda batch: (batch["input_ids"], batch["attention_mask"]),
    mean_of_labels,
    lambda batch: (batch["labels"][:, 1:] != -100).sum(),
)
"""The same loss, its items counted on the host."""


@pytest.mark.parametrize(("strategy", "ranks"), [(TP, 2), (PP, 2), (BOTH, 4)])
def test_a_loss_of_the_users_own_is_honored(
    strategy: str, ranks: int, world_pool: WorldPools
) -> None:
    for loss in (OWN_LOSS, COUNTED):
        assert_same(world_pool(ranks).run(train, strategy, 3, {}, loss, 8))


def own_loop(placement: Placement) -> list[float]:
    with Session(TP, device="cpu", placement=placement) as session:
        engine, loader = prepare(session, language_model(), 3)
        losses: list[float] = []
        for batch in loader:
            for microbatch in batch:
                loss = OWN_LOSS(engine, microbatch.data)
                engine.backward(loss if microbatch.num_samples else LossSum(loss.total * 0, 0))
            losses.append(engine.step().loss)
        return losses


def test_a_loop_of_the_users_own_trains_the_same_run(world_pool: WorldPools) -> None:
    wanted = [step.loss for step in expected(())[:7]]
    for losses in world_pool(4).run(own_loop):
        assert losses == pytest.approx(wanted, rel=1e-5)


SLOW, BATCH_PARTS = 0.1, 4


def timed(placement: Placement) -> Passes | None:
    """Two steps of micro-batches of which the first stage takes ``SLOW`` seconds each."""
    with Session(PP, device="cpu", placement=placement) as session:
        engine, loader = prepare(session, language_model(), BATCH // BATCH_PARTS)
        if placement.rank == 0:
            engine.module.get_input_embeddings().register_forward_pre_hook(
                lambda *_: time.sleep(SLOW)
            )
        with PassTimes(engine.schedule, "cpu", 0) as times:
            take(engine, loader, 2)
        take(engine, loader, 1)
        return times.read()


def test_a_stage_that_waits_for_a_slow_one_is_seen_to_idle(world_pool: WorldPools) -> None:
    slow, fast = world_pool(2).run(timed)
    assert slow.formula == fast.formula == [1 / (BATCH_PARTS + 1)] * 2
    for own, other in zip(slow.computing, fast.computing, strict=True):
        assert own > BATCH_PARTS * SLOW
        assert own > other
    for whole, computing in zip(fast.whole, fast.computing, strict=True):
        assert whole - computing > BATCH_PARTS * SLOW / 2


# -- evaluation ----------------------------------------------------------------------------------


def accuracy(predictions: torch.Tensor, labels: torch.Tensor) -> LossSum:
    counts = labels != -100
    return LossSum(((predictions == labels) & counts).sum(), counts.sum())


def predictions(output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return output.logits[:, :-1].argmax(-1), batch["labels"][:, 1:]


PREDICT = Objective(inputs, predictions)


def measure(placement: Placement, strategy: str) -> dict[str, float]:
    with Session(strategy, device="cpu", placement=placement) as session:
        nothing = dict.fromkeys(("optimizer", "lr_scheduler", "max_grad_norm"))
        engine, loader = prepare(session, language_model(), 3, **nothing)
        return session.evaluate(
            engine,
            loader,
            Objective.of_model(engine.module),
            metrics={"accuracy": accuracy},
            predict=PREDICT,
        )


@pytest.mark.parametrize(("strategy", "ranks"), [(TP, 4), (PP, 2), (BOTH, 4)])
def test_an_evaluation_counts_each_label_once(
    strategy: str, ranks: int, world_pool: WorldPools
) -> None:
    data, model = Sentences()[:], language_model()
    with torch.no_grad():
        total, count = entropy(model, data)
        right = accuracy(*PREDICT(model, data))
    wanted = {"loss": (total / count).item(), "accuracy": float(right.total / right.count)}
    for metrics in world_pool(ranks).run(measure, strategy):
        assert metrics == pytest.approx(wanted, rel=1e-5)


# -- what a pipeline cannot take -----------------------------------------------------------------


def plain(model: Any, batch: Any) -> torch.Tensor:
    return model(**batch).loss


def test_a_loss_that_calls_the_model_is_refused_with_what_to_write(world_pool: WorldPools) -> None:
    with pytest.raises(ConfigError, match=r"Give them apart: loss=unipar.Objective\(inputs="):
        world_pool(2).run(train, PP, None, {}, plain)


def measure_by_a_function(placement: Placement) -> None:
    with Session(PP, device="cpu", placement=placement) as session:
        engine, loader = prepare(session, language_model())

        def predict(model: Any, batch: Any) -> Any:
            return predictions(model(**inputs(batch)), batch)

        session.evaluate(engine, loader, metrics={"accuracy": accuracy}, predict=predict)


def test_predictions_of_a_function_that_calls_the_model_are_refused(world_pool: WorldPools) -> None:
    with pytest.raises(ConfigError, match="For predict, the second part returns"):
        world_pool(2).run(measure_by_a_function)


def noisy(batch: Any) -> dict[str, torch.Tensor]:
    noise = torch.randint(0, 2, batch["input_ids"].shape)
    return {"input_ids": (batch["input_ids"] + noise) % 11}


def test_inputs_that_are_drawn_at_random_are_refused(world_pool: WorldPools) -> None:
    with pytest.raises(ConfigError, match="draws random numbers"):
        world_pool(2).run(train, PP, None, {}, Objective(noisy, mean_of_labels))


def call_the_engine(placement: Placement, what: str) -> None:
    with Session(PP, device="cpu", placement=placement) as session:
        engine = session.prepare(language_model(), optimizer=adamw)
        if what == "call":
            engine(input_ids=torch.zeros(1, 2, dtype=torch.long))
        elif what == "backward":
            engine.backward(torch.ones((), requires_grad=True))
        else:
            engine.step()


@pytest.mark.parametrize("what", ["call", "backward", "step"])
def test_a_pipeline_takes_whole_steps_only(what: str, world_pool: WorldPools) -> None:
    with pytest.raises(ConfigError, match="takes whole steps only"):
        world_pool(2).run(call_the_engine, what)


# -- losses of what a rank has ---------------------------------------------------------------------


def with_another_term(placement: Placement, strategy: str, what: str) -> None:
    with Session(strategy, device="cpu", placement=placement) as session:
        model = language_model()
        engine, loader = prepare(session, model)

        def given(batch: Any) -> dict[str, Any]:
            return {**inputs(batch), "output_hidden_states": what == "hidden states"}

        def loss(output: Any, batch: Any) -> torch.Tensor:
            terms = model.parameters() if what == "weights" else output.hidden_states
            return mean_of_labels(output, batch) + sum(t.square().mean() for t in terms)

        take(engine, loader, 1, Objective(given, loss))


@pytest.mark.parametrize(
    ("strategy", "what", "said"),
    [
        (PP, "weights", r"depends on '[\w.]+' by another way .* weight_decay of the optimizer"),
        (PP, "hidden states", r"asked for output_hidden_states=True.*Leave output_hidden_states"),
        (TP, "hidden states", r"asked for output_hidden_states=True.*Leave output_hidden_states"),
    ],
)
def test_a_loss_of_what_a_rank_has_a_part_of_is_refused(
    strategy: str, what: str, said: str, world_pool: WorldPools
) -> None:
    with pytest.raises(ConfigError, match=said):
        world_pool(2).run(with_another_term, strategy, what)
