"""The numbers of a run: losses, gradient norms, learning rates and weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from unipar.objective import Objective
from unipar.testing import models
from unipar.testing.cases.case import case, case_also_at
from unipar.testing.compare import assert_equal_runs, difference
from unipar.testing.kit import TOLERANCE, Kit
from unipar.testing.scenarios import (
    AN_EPOCH_AND_MORE,
    NUM_SAMPLES,
    Scenario,
    mean_over_tokens,
    on_plateau,
    predict_tokens,
    reference_trace,
    sgd,
    warmup_and_decay,
)

PLAIN = Scenario(scheduler=warmup_and_decay)
CLIPPED = Scenario(optimizer=sgd, max_grad_norm=0.25)
TOKENS = Scenario(
    model=models.Tied,
    data=partial(models.sentences, NUM_SAMPLES),
    terms=predict_tokens,
    weighted=True,
)
# Runs that several cases look at.
SHORT_TOKENS = replace(TOKENS, num_steps=AN_EPOCH_AND_MORE)
SHORT_CLIPPED_TOKENS = replace(SHORT_TOKENS, accumulation=4, max_grad_norm=0.5)
IN_PARTS = replace(
    SHORT_CLIPPED_TOKENS,
    objective=Objective(
        lambda batch: batch["tokens"],
        mean_over_tokens,
        lambda batch: (batch["labels"] != -100).sum(),
    ),
)
UNEQUAL = (
    replace(PLAIN, unequal=True, accumulation=2, num_steps=AN_EPOCH_AND_MORE),
    replace(SHORT_TOKENS, unequal=True, max_grad_norm=0.5),
)
MOST_SKIPPED = {"bf16": 0, "fp16": 4}
"""Steps that may overflow until a loss scaler, which starts at 2**16, has found its scale."""


@case_also_at(1, 2, 4)
def equals_the_reference(kit: Kit) -> None:
    """Losses, gradient norms, weights, learning rates and samples, with a ragged last batch."""
    (run,) = kit.train(PLAIN)
    kit.check(run, PLAIN)
    for rank, own in enumerate(run.ranks):
        if own.scheduler_steps != PLAIN.num_steps:
            raise AssertionError(
                f"rank {rank} stepped its scheduler {own.scheduler_steps} times in "
                f"{PLAIN.num_steps} steps"
            )


@case
def leaves_a_plateau_to_its_metric(kit: Kit) -> None:
    """A scheduler that waits for a metric moves when it is given one, and at no other time."""
    scenario = replace(PLAIN, scheduler=on_plateau, num_steps=6)
    (run,) = kit.train(scenario)
    kit.check(run, scenario)
    rates = [rate for (rate,) in run.trace.lrs]
    if len(set(rates)) != 3:
        raise AssertionError(f"the learning rates {rates} were to be halved twice in six steps")


@case
def accumulates(kit: Kit) -> None:
    """Four micro-batches a step make the same run as one."""
    scenario = replace(PLAIN, accumulation=4, num_steps=AN_EPOCH_AND_MORE)
    if kit.refuses(scenario):
        return
    (run,) = kit.train(scenario)
    kit.check(run, scenario)


@case_also_at(in_brief=False)
def trains_recurrent_layers(kit: Kit) -> None:
    """Layers that move their weights on a GPU compute with those that the last step has left."""
    able = kit.capabilities
    if able.pipeline or kit.layout.cp > 1:
        # Their models are made of blocks alone, or compute on parts of a sequence.
        return
    # AdamW would make a step of what is left of a gradient near zero, which kernels round apart.
    scenario = replace(PLAIN, model=models.Recurrent, optimizer=sgd, num_steps=AN_EPOCH_AND_MORE)
    (run,) = kit.train(scenario)
    kit.check(run, scenario)


@case
def drops_by_sample(kit: Kit) -> None:
    """Dropout that draws for each sample draws what the hand-written loop draws for all of them."""
    scenario = replace(
        PLAIN,
        model=models.Dropping,
        dropout_seed="sample",
        num_steps=AN_EPOCH_AND_MORE,
    )
    if kit.refuses(scenario):
        return
    able = kit.capabilities
    if able.activation_checkpointing:
        scenario = replace(scenario, activation_checkpointing="full")
    if able.accumulation:
        scenario = replace(scenario, accumulation=2)
    (run,) = kit.train(scenario)
    expected = reference_trace(replace(scenario, model=models.DroppingByHand))
    assert_equal_runs(run.trace, expected, TOLERANCE, subject=kit.target.name)


@case
def clips(kit: Kit) -> None:
    """Gradients are clipped to ``max_grad_norm``, and their norm before is reported.

    Plain SGD shows it: AdamW's step hardly depends on the gradient's length.
    """
    clipped = [replace(CLIPPED, num_steps=AN_EPOCH_AND_MORE)]
    clipped += [replace(clipped[0], accumulation=4)]
    if kit.refuses(CLIPPED):
        return
    norms = reference_trace(clipped[0]).grad_norms
    limit = CLIPPED.max_grad_norm or 0.0
    if not sum((norm or 0.0) > limit for norm in norms) > len(norms) / 2:
        raise AssertionError(f"max_grad_norm={limit} does not bite: the norms are {norms}")
    scenarios = [s for s in clipped if not kit.refuses(s)]
    for run, scenario in zip(kit.train(*scenarios), scenarios, strict=True):
        kit.check(run, scenario, subject=f"{kit.target.name}, accumulation {scenario.accumulation}")


@case
def measures_the_norm_only_when_asked(kit: Kit) -> None:
    """Without ``max_grad_norm`` there is no norm to report, and nothing is clipped."""
    scenario = replace(PLAIN, max_grad_norm=None, num_steps=3)
    (run,) = kit.train(scenario)
    if any(norm is not None for norm in run.trace.grad_norms):
        raise AssertionError(f"norms were measured that nobody asked for: {run.trace.grad_norms}")
    kit.check(run, scenario)


@case_also_at(4)
def weighs_tokens(kit: Kit) -> None:
    """A mean over tokens, of which micro-batches and ranks hold unequal numbers, some none."""
    both = [SHORT_TOKENS, SHORT_CLIPPED_TOKENS]
    scenarios = [scenario for scenario in both if not kit.refuses(scenario)]
    for run, scenario in zip(kit.train(*scenarios), scenarios, strict=True):
        kit.check(run, scenario, subject=f"{kit.target.name}, accumulation {scenario.accumulation}")


@case
def weighs_unequal_shares(kit: Kit) -> None:
    """One rank has three times the samples of each other, in as many micro-batches."""
    data_size = kit.layout.batch
    if data_size == 1:
        return
    scenarios = [scenario for scenario in UNEQUAL if not kit.refuses(scenario)]
    for run, scenario in zip(kit.train(*scenarios), scenarios, strict=True):
        kit.check(run, scenario, subject=f"{kit.target.name}, accumulation {scenario.accumulation}")
        expected = scenario.loader(0, data_size).share_sizes
        for own in run.ranks:
            if len(own.samples[0]) != expected[own.data_rank or 0]:
                raise AssertionError(
                    f"data-parallel rank {own.data_rank} has {len(own.samples[0])} samples of the "
                    f"first batch, which is divided into {expected}"
                )


@case
def takes_losses_in_parts(kit: Kit) -> None:
    """An objective, whose means over tokens are of unequal numbers, some of none."""
    if kit.refuses(IN_PARTS):
        return
    (run,) = kit.train(IN_PARTS)
    kit.check(run, IN_PARTS)


@case
def keeps_to_bf16(kit: Kit) -> None:
    """bf16 is as far from fp32 as the reference in bf16, and no further.

    The reference rounds as the capabilities say that the strategy does: by autocast, or with
    half-precision weights.
    """
    _half_precision(kit, replace(PLAIN, precision="bf16"))


@case
def keeps_to_fp16(kit: Kit) -> None:
    """fp16 likewise, its gradients scaled so that none underflows."""
    _half_precision(kit, replace(PLAIN, precision="fp16"))


def _half_precision(kit: Kit, scenario: Scenario) -> None:
    if kit.refuses(scenario):
        return
    scenario = kit.fit(scenario)
    (run,) = kit.train(scenario)
    skipped = frozenset(step for step, was in enumerate(run.trace.skipped) if was)
    if len(skipped) > MOST_SKIPPED[scenario.precision]:
        raise AssertionError(
            f"{kit.target.name} skipped {len(skipped)} of {scenario.num_steps} steps"
        )
    exact = reference_trace(replace(scenario, precision="fp32", leave_out=skipped))
    norms = [
        None if was else norm
        for norm, was in zip(run.trace.grad_norms, run.trace.skipped, strict=True)
    ]
    if scenario.max_grad_norm is None:
        norms = exact.grad_norms
    # Other cases may look at this run, too.
    found = difference(replace(run.trace, grad_norms=norms), exact)
    kit.measurements.add(kit.target.name, kit.size, scenario.precision, found)
    for name, tensor in run.trace.weights.items():
        if tensor.dtype != exact.weights[name].dtype:
            raise AssertionError(f"the master weight {name} is {tensor.dtype}")
    kit.assert_rounded(found, replace(scenario, leave_out=skipped), subject=kit.target.name)
    if found.largest <= TOLERANCE:
        raise AssertionError(
            f"{kit.target.name}: precision={scenario.precision!r} changed nothing: it is {found} "
            "from fp32"
        )
