"""Models of many shapes."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from unipar.engine.checks import check_gradients
from unipar.engine.offload import Offloaded
from unipar.errors import ConfigError
from unipar.loss import LossSum
from unipar.objective import Objective
from unipar.testing import models
from unipar.testing.cases.case import Case, case, case_also_at
from unipar.testing.cases.numbers import PLAIN, SHORT_TOKENS, TOKENS
from unipar.testing.compare import assert_equal_weights
from unipar.testing.kit import Kit, Run
from unipar.testing.optimizers import each_schedule, sgd_and_adamw, sgd_and_adamw_by_hand
from unipar.testing.reference import copy_weights
from unipar.testing.scenarios import (
    AN_EPOCH_AND_MORE,
    NUM_SAMPLES,
    Scenario,
    grouped,
    num_shifted,
    own_loss_inputs,
    pass_dict,
    pass_keywords,
    pass_tuple,
    plain_sgd,
    predict_next,
    predict_tokens,
    predict_with_routers,
    sgd,
    warmup_and_decay,
)

FROZEN = Scenario(model=models.Frozen, num_steps=AN_EPOCH_AND_MORE)
SPARSE = replace(TOKENS, model=models.Sparse, optimizer=plain_sgd, max_grad_norm=None, num_steps=5)
GROUPS = Scenario(optimizer=grouped, scheduler=warmup_and_decay, num_steps=AN_EPOCH_AND_MORE)
SEVERAL = Scenario(
    optimizer=sgd_and_adamw,
    scheduler=each_schedule,
    by_hand=sgd_and_adamw_by_hand,
    num_steps=AN_EPOCH_AND_MORE,
)
DECODER = replace(
    TOKENS,
    model=models.Decoder,
    data=partial(models.sentences, NUM_SAMPLES, models.EVEN_LENGTH),
    num_steps=AN_EPOCH_AND_MORE,
)


def _loss_with_activations_on_host(logits: torch.Tensor, batch: Any) -> LossSum:
    if torch.is_grad_enabled() and not any(type(one) is Offloaded for one in gc.get_objects()):
        raise AssertionError("activation_offload=True, and nothing that was saved is on the host")
    return LossSum(*predict_tokens(lambda _: logits, batch))


OFFLOADED = replace(
    DECODER,
    activation_offload=True,
    # The last batch has a row for each rank, which is below what is moved.
    num_steps=4,
    objective=Objective(lambda batch: batch["tokens"], _loss_with_activations_on_host),
)
LONG = replace(
    TOKENS,
    model=models.LongDecoder,
    data=partial(models.sentences, NUM_SAMPLES, models.LONG_LENGTH),
    num_steps=AN_EPOCH_AND_MORE,
)
OWN_LOSS = replace(
    LONG,
    terms=predict_next,
    objective=Objective(
        own_loss_inputs, lambda output, batch: output["loss"], num_shifted, shifts_labels=True
    ),
    optimizer=sgd,
    max_grad_norm=0.25,
    accumulation=2,
    activation_checkpointing="full",
)
MIXED = replace(TOKENS, model=models.Mixed, terms=predict_with_routers, num_steps=AN_EPOCH_AND_MORE)
BUFFERS = Scenario(model=models.Buffered, num_steps=AN_EPOCH_AND_MORE)
FORWARDS = (
    Scenario(model=models.TakesDict, terms=pass_dict, num_steps=3),
    Scenario(model=models.TakesTuple, terms=pass_tuple, num_steps=3),
    Scenario(model=models.TakesKeywords, terms=pass_keywords, num_steps=3),
)


@case
def keeps_tied_weights_tied(kit: Kit) -> None:
    """One tensor with two names is exported once, known by both, and trained as one."""
    (run,) = kit.train(SHORT_TOKENS)
    kit.check(run, SHORT_TOKENS)
    tied = {"embedding.weight", "head.weight"}
    for rank, own in enumerate(run.ranks):
        exported = tied.intersection(part.name for part in own.state.weights)
        aliases = {frozenset(pair) for pair in own.state.aliases.items()}
        if len(exported) != 1 or frozenset(tied) not in aliases:
            raise AssertionError(
                f"rank {rank} exports {sorted(exported)} and aliases {own.state.aliases}; tied "
                "weights are one tensor with an alias"
            )


@case_also_at(4)
def divides_a_decoder(kit: Kit) -> None:
    """Where ranks divide layers: a decoder with grouped queries and tied embeddings.

    One run by token weights, one clipped and accumulated, whose norm counts what all ranks have
    once.
    """
    layout = kit.layout
    scenarios = [
        DECODER,
        replace(DECODER, optimizer=sgd, accumulation=2, max_grad_norm=0.25),
    ]
    scenarios = [scenario for scenario in scenarios if not kit.refuses(scenario)]
    if layout.tp == 1 or not scenarios:
        return
    for run, scenario in zip(kit.train(*scenarios), scenarios, strict=True):
        kit.check(run, scenario, subject=f"{kit.target.name}, {scenario.optimizer.__name__}")
        _assert_divided(kit, run, "blocks.0.attention.q.weight", layout.tp, "each layer")


@case_also_at(4)
def divides_sequences(kit: Kit) -> None:
    """Where ranks divide sequences: a causal decoder with rotary positions and grouped queries.

    One run by token weights. One whose model computes its own loss, of each output with the label
    after it, which another rank may have; clipped, accumulated, and computed twice.
    """
    scenarios = [scenario for scenario in (LONG, OWN_LOSS) if not kit.refuses(scenario)]
    if kit.layout.cp == 1 or not scenarios:
        return
    for run, scenario in zip(kit.train(*scenarios), scenarios, strict=True):
        kit.check(run, scenario, subject=f"{kit.target.name}, {scenario.terms.__name__}")


@case_also_at(4)
def divides_experts(kit: Kit) -> None:
    """Where ranks divide experts: a language model of mixtures, whose routers have a loss, too.

    One run by token weights, one clipped and accumulated, whose norm counts each element once.
    """
    layout = kit.layout
    scenarios = [
        MIXED,
        replace(MIXED, optimizer=sgd, accumulation=2, max_grad_norm=0.25),
    ]
    scenarios = [scenario for scenario in scenarios if not kit.refuses(scenario)]
    if layout.ep == 1 or not scenarios:
        return
    for run, scenario in zip(kit.train(*scenarios), scenarios, strict=True):
        kit.check(run, scenario, subject=f"{kit.target.name}, {scenario.optimizer.__name__}")
        _assert_divided(kit, run, "blocks.0.mixture.experts.up", layout.ep, "experts")


def _assert_divided(kit: Kit, run: Run, name: str, parts: int, what: str) -> None:
    for rank, own in enumerate(run.ranks):
        (held,) = (part for part in own.state.weights if part.name == name)
        if sum(t.numel() for t in held.tensors) * parts > math.prod(held.shape):
            raise AssertionError(
                f"{kit.target.name} says that {parts} ranks divide {what}, and rank {rank} holds "
                f"more than that part of {name}"
            )


@case
def takes_sparse_gradients(kit: Kit) -> None:
    """An embedding with sparse gradients is trained as the reference does it, or is refused."""
    scenarios = [SPARSE, replace(SPARSE, accumulation=2)]
    if kit.capabilities.sparse_gradients:
        for run, scenario in zip(kit.train(*scenarios), scenarios, strict=True):
            kit.check(run, scenario)
        return
    try:
        check_gradients(SPARSE.build(), kit.target.make(), SPARSE.spec(kit.size))
    except ConfigError:
        return
    raise AssertionError(f"{kit.target.name} says that it has no sparse gradients, and takes them")


@case
def leaves_frozen_weights(kit: Kit) -> None:
    """Parameters that require no gradient stay as they are, to the bit; the others train."""
    (run,) = kit.train(FROZEN)
    kit.check(run, FROZEN)
    model = FROZEN.build()
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    before = copy_weights(model)
    assert_equal_weights(
        {name: run.trace.weights[name] for name in frozen},
        {name: before[name] for name in frozen},
        0.0,
        subject=f"{kit.target.name}, frozen",
    )
    moments = {name.rsplit(".", 1)[0] for name in run.optimizer}
    if frozen & moments:
        raise AssertionError(f"the optimizer keeps state of frozen weights: {frozen & moments}")


@case
def keeps_parameter_groups(kit: Kit) -> None:
    """Learning rate, decay and betas of each group are its own, under one scheduler."""
    (run,) = kit.train(GROUPS)
    kit.check(run, GROUPS)


@case
def steps_every_optimizer(kit: Kit) -> None:
    """Two optimizers over parameters of their own, one with two groups, each with its scheduler."""
    (run,) = kit.train(SEVERAL)
    kit.check(run, SEVERAL)


@case
def keeps_buffers(kit: Kit) -> None:
    """Buffers, persistent or not, and BatchNorm with fixed statistics.

    Statistics that follow the batches depend on what a rank sees, so nothing equal can be asked of
    them on several ranks; on one they are the reference's (see ``follows_batch_statistics``).
    """
    (run,) = kit.train(BUFFERS)
    kit.check(run, BUFFERS)


def _follows_batch_statistics(kit: Kit) -> None:
    """On one rank, with one micro-batch, BatchNorm in training is the plain loop's."""
    scenario = Scenario(model=models.Normalized)
    (run,) = kit.train(scenario)
    kit.check(run, scenario, whole=True)


follows_batch_statistics = Case(
    "follows_batch_statistics", _follows_batch_statistics, max_size=1, also_at=(1,)
)


@case
def passes_any_forward(kit: Kit) -> None:
    """Forwards that take a dict, a tuple or keywords, and return a dict."""
    for run, scenario in zip(kit.train(*FORWARDS), FORWARDS, strict=True):
        kit.check(run, scenario, subject=f"{kit.target.name}, {scenario.model.__name__}")


@case
def builds_from_a_function(kit: Kit) -> None:
    """A function gives the weights of the model that it builds, to the bit, and the same run."""
    fresh = [
        Scenario(model=model, factory=True, num_steps=0, seed=7)
        for model in (models.Network, models.Buffered, models.Tied, models.Frozen)
    ]
    trained = [
        replace(BUFFERS, factory=True, num_steps=5),
        replace(TOKENS, factory=True, num_steps=5),
    ]
    runs = kit.train(*fresh, *trained)
    for run, scenario in zip(runs, fresh, strict=False):
        assert_equal_weights(
            run.trace.weights,
            copy_weights(kit.fit(scenario).build()),
            0.0,
            subject=f"{kit.target.name}, {scenario.model.__name__} from a function",
        )
    for run, scenario in zip(runs[len(fresh) :], trained, strict=True):
        kit.check(run, scenario, subject=f"{kit.target.name}, {scenario.model.__name__}")


@case
def recomputes_activations(kit: Kit) -> None:
    """Activation checkpointing changes memory, and no number."""
    scenarios = [
        replace(PLAIN, activation_checkpointing="full", num_steps=5),
        replace(PLAIN, activation_checkpointing=("Block",), accumulation=2, num_steps=5),
        replace(DECODER, activation_checkpointing="selective", accumulation=2, num_steps=5),
    ]
    scenarios = [scenario for scenario in scenarios if not kit.refuses(scenario)]
    for run, scenario in zip(kit.train(*scenarios), scenarios, strict=True):
        kit.check(run, scenario)


@case
def offloads_activations(kit: Kit) -> None:
    """What blocks save is on the host when the loss is computed, and no number changes.

    Also with recomputed blocks, whose inputs are then there.
    """
    scenarios = [
        OFFLOADED,
        replace(OFFLOADED, activation_checkpointing="full", accumulation=2),
    ]
    scenarios = [scenario for scenario in scenarios if not kit.refuses(scenario)]
    for run, scenario in zip(kit.train(*scenarios), scenarios, strict=True):
        kit.check(run, scenario)


@case
def compiles(kit: Kit) -> None:
    """``torch.compile`` changes speed, and no number."""
    scenario = replace(PLAIN, compile_backend="aot_eager", num_steps=5)
    if kit.refuses(scenario):
        return
    (run,) = kit.train(scenario)
    kit.check(run, scenario)
