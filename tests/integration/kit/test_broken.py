"""The kit can fail: each broken strategy is caught, by the case that is there for it."""

from __future__ import annotations

from collections.abc import Callable

import broken_strategies as broken
import pytest

from unipar.strategy import Strategy
from unipar.testing.cases import ALL
from unipar.testing.kit import Kit, Target
from unipar.testing.pool import WorldPools

CASES = {case.name: case for case in ALL}
made_of = broken.with_classes

BROKEN = [
    (
        "the last micro-batch dropped",
        broken.staged,
        "accumulates",
        "the (loss|number of items|gradient norm) of step 1 ",
    ),
    (
        "clip ignored",
        made_of(stepper=broken.ClipIgnored),
        "clips",
        "the (loss|gradient norm) of step",
    ),
    (
        "gradients summed, not averaged",
        made_of(reducer=broken.GradientsSummed),
        "equals_the_reference",
        "the gradient norm of step 1 ",
    ),
    (
        "gradients never reduced",
        made_of(reducer=broken.NeverReduced),
        "equals_the_reference",
        "rank 1 was told other grad_norms than rank 0|holds other values of",
    ),
    (
        "an unused parameter unnoticed",
        made_of(reducer=broken.UnusedUnnoticed),
        "knows_unused_parameters",
        "rank 1 was told other grad_norms",
    ),
    (
        "reduced after each forward pass",
        made_of(engine=broken.ReducedAfterForward, reducer=broken.UnusedUnnoticed),
        "holds_forwards",
        "holds other values of|rank 1 was told other",
    ),
    (
        "a wrapper shown to the loss",
        made_of(engine=broken.WrapperShown),
        "shows_losses_the_users_module",
        r"rank 0: in step 0, the loss function finds the names .*'module\.inward\.weight'",
    ),
    (
        "modes forgotten after an evaluation",
        made_of(engine=broken.ModesForgotten),
        "shows_losses_the_users_module",
        "modes that were set after an evaluation are",
    ),
    (
        "an inner gradient taken for the step's",
        made_of(engine=broken.InnerGradientTaken),
        "lets_losses_differentiate",
        "the (loss|gradient norm) of step",
    ),
    (
        "changed weights lost",
        made_of(engine=broken.WeightsGathered),
        "loses_no_change_of_weights",
        "weights clamped: the (loss|gradient norm) of step",
    ),
    (
        "gradients clipped by hand",
        made_of(reducer=broken.GradientsUnguarded),
        "guards_gradients",
        "rank 0 clips between backward and step, and trains on",
    ),
    (
        "last batch dropped",
        made_of(engine=broken.LastBatchDropped),
        "equals_the_reference",
        r"the number of items of step 5 is 0\.0, and 2\.0 in the reference",
    ),
    (
        "scheduler stepped on every rank's account",
        made_of(engine=broken.SchedulerPerRank),
        "equals_the_reference",
        "the learning rate of step 2 ",
    ),
    (
        "scheduler given the loss of a step for a metric",
        made_of(engine=broken.PlateauStepped),
        "leaves_a_plateau_to_its_metric",
        "the learning rate of step 3 ",
    ),
    (
        "mean of means",
        made_of(engine=broken.MeanOfMeans),
        "weighs_tokens",
        "the number of items of step 1",
    ),
    (
        "ranks weighed alike",
        made_of(engine=broken.RanksAlike),
        "weighs_unequal_shares",
        "accumulation 2: the (loss|gradient norm) of step 1 ",
    ),
    (
        "padding evaluated",
        made_of(engine=broken.PaddingEvaluated),
        "evaluates_every_sample_once",
        r"evaluation counted 68 items, and there are 66",
    ),
    (
        "not deterministic",
        made_of(engine=broken.Undetermined),
        "repeats_itself",
        "the same run twice gave other losses",
    ),
    (
        "scheduler stepped by a skipped step",
        made_of(engine=broken.NanSteppedOnOneRank),
        "skips_a_loss_that_is_not_finite",
        "the learning rate of step",
    ),
    (
        "gradients left from another model's step",
        made_of(reducer=broken.StrayGradients),
        "trains_several_models",
        "discriminator: the loss of step 3",
    ),
    (
        "moments not restored",
        made_of(engine=broken.MomentsForgotten),
        "resumes",
        "resumed: the (loss|gradient norm) of step",
    ),
    (
        "optimizer built before sharding",
        broken.early_optimizer,
        "equals_the_reference",
        "the (loss|gradient norm) of step 2",
    ),
    (
        "tensors split whatever the optimizer",
        made_of(stepper=broken.TensorsSplit, engine=broken.PartsUnsaved),
        "splits_only_what_can_be_split",
        "adafactor: the (loss|gradient norm) of step 2",
    ),
    (
        "the first optimizer stepped alone",
        made_of(stepper=broken.FirstOptimizerStepped),
        "steps_every_optimizer",
        "the (loss|gradient norm) of step 2",
    ),
    (
        "no sum after layers divided by rows",
        broken.dividing(broken.SumForgottenStrategy),
        "equals_the_reference",
        "holds other values of|was told other|the (loss|gradient norm) of step 1 ",
    ),
    (
        "a router's loss counted for each rank",
        broken.dividing_experts(broken.RouterLossPerRankStrategy),
        "divides_experts",
        "the gradient norm of step 1 ",
    ),
    (
        "no sum of gradients before layers divided by columns",
        broken.dividing(broken.GradientSumForgottenStrategy),
        "divides_a_decoder",
        "rank 1 was told other|holds other values of|the (loss|gradient norm) of step",
    ),
    (
        "loss counted by every rank of a replica",
        broken.dividing(broken.LossOfEveryRankStrategy),
        "equals_the_reference",
        r"the number of items of step 1 is 32\.0, and 16\.0",
    ),
    (
        "norm counted by every rank of a replica",
        broken.dividing(broken.NormOverRanksStrategy),
        "clips",
        "the gradient norm of step 1 ",
    ),
    (
        "labels not shifted before sequences are divided",
        broken.dividing_sequences(broken.Unshifted),
        "divides_sequences",
        "predict_next: the number of items of step 1",
    ),
    (
        "attention to the positions of its own rank",
        broken.dividing_sequences(broken.OwnAttentionOnly),
        "divides_sequences",
        "predict_tokens: the (loss|gradient norm) of step 1",
    ),
    ("precision ignored", broken.precision_ignored, "keeps_to_bf16", "changed nothing"),
    (
        "sharding pretended",
        broken.sharding_pretended,
        "shards_what_it_claims",
        "claims to shard parameters, and a rank holds all",
    ),
]

# Two ranks pad nothing and may replicate by choice; what is stray differs on each of several ranks.
SIZES = {"shards_what_it_claims": 4, "evaluates_every_sample_once": 4, "trains_several_models": 1}


@pytest.mark.parametrize(
    ("name", "make", "case", "message"), BROKEN, ids=[name.replace(" ", "-") for name, *_ in BROKEN]
)
def test_broken_strategy_is_caught(
    name: str, make: Callable[[], Strategy], case: str, message: str, world_pool: WorldPools
) -> None:
    size = SIZES.get(case, 2)
    with pytest.raises(AssertionError, match=message):
        CASES[case].check(Kit(Target(name, make), size, world_pool))
