"""The claims of a strategy, held against what it does."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

from unipar.errors import ConfigError
from unipar.strategy import EngineSpec, Precision, Strategy
from unipar.testing.cases.case import case, case_also_at
from unipar.testing.cases.numbers import PLAIN
from unipar.testing.harness import Part, RankRun, train
from unipar.testing.kit import Kit, Run, merge
from unipar.testing.optimizers import (
    adafactor,
    each_schedule,
    layerwise,
    orthogonal_and_adamw,
    orthogonal_and_adamw_by_hand,
)
from unipar.testing.scenarios import Scenario
from unipar.world import Placement, World

NOT_ELEMENTWISE = (
    Scenario(optimizer=adafactor, num_steps=6),
    Scenario(optimizer=layerwise, num_steps=6),
    Scenario(
        optimizer=orthogonal_and_adamw,
        scheduler=each_schedule,
        by_hand=orthogonal_and_adamw_by_hand,
        num_steps=6,
    ),
)


@case
def refuses_what_it_denies(kit: Kit) -> None:
    """Whatever the capabilities deny is a ConfigError, before any process starts."""
    spec = kit.fit(PLAIN).spec(kit.size)
    asked: list[EngineSpec] = [
        *(replace(spec, precision=precision) for precision in get_args(Precision)),
        replace(spec, accumulation=4),
        replace(spec, max_grad_norm=1.0),
        replace(spec, activation_checkpointing="full"),
        replace(spec, activation_checkpointing="selective"),
        replace(spec, activation_offload=True),
        replace(spec, compile=True),
        replace(spec, parallelize=lambda module, world: None),
        replace(spec, on_nan="skip"),
        replace(spec, dropout_seed="sample"),
    ]
    for one in asked:
        kit.refuses_spec(one)
    for device_type in ("cpu", "cuda", "no-such-device"):
        kit.refuses_spec(spec, replace(kit.placement, device_type=device_type))
    limit = kit.capabilities.max_devices
    if limit is not None:
        too_many = Placement(size=limit + 1, device_type=kit.placement.device_type)
        if not kit.refuses_spec(spec, too_many):
            raise AssertionError(f"{kit.target.name} has max_devices={limit} and takes {limit + 1}")


@case_also_at(4)
def shards_what_it_claims(kit: Kit) -> None:
    """Ranks hold less than everything of what is sharded, and everything of what is not."""
    (run,) = kit.train(PLAIN)
    claims = kit.capabilities.sharded
    _check_shares(kit, run, "parameters", "parameters" in claims)
    _check_shares(kit, run, "optimizer", "optimizer" in claims)


def _check_shares(kit: Kit, run: Run, what: str, claimed: bool) -> None:
    parts = [
        own.state.weights if what == "parameters" else own.state.optimizer for own in run.ranks
    ]
    # Step counters are one number each, and need not be divided.
    whole = sum(math.prod(part.shape) for part in parts[0] if part.shape)
    held = [sum(_held(part) for part in own if part.shape) for own in parts]
    # Two ranks may be two replicas by choice (hybrid sharding), which four are no longer.
    if claimed and kit.size > 2 and max(held) == whole:
        raise AssertionError(
            f"{kit.target.name} claims to shard {what}, and a rank holds all {whole} elements"
        )
    if not claimed and min(held) < whole:
        raise AssertionError(
            f"{kit.target.name} does not claim to shard {what}, and its ranks hold {held} of "
            f"{whole} elements: say so in its capabilities"
        )


def _held(part: Part) -> int:
    return sum(tensor.numel() for tensor in part.tensors)


@case
def splits_only_what_can_be_split(kit: Kit) -> None:
    """Optimizers that need whole tensors, alone or beside another, make the reference's run.

    Or they are refused.
    """
    for scenario in map(kit.fit, NOT_ELEMENTWISE):
        outcomes = kit.run(_train_or_refuse, scenario)
        refusals = [one for one in outcomes if isinstance(one, str)]
        subject = f"{kit.target.name}, {scenario.optimizer.__name__}"
        if not refusals:
            kit.check(merge(outcomes), scenario, subject=subject)
        elif len(refusals) < kit.size:
            raise AssertionError(f"{subject}: {len(refusals)} of {kit.size} ranks refuse it")
        elif not kit.capabilities.splits_tensors:
            raise AssertionError(
                f"{subject}: it is refused, and the capabilities say that tensors stay whole: "
                f"{refusals[0]}"
            )


def _train_or_refuse(strategy: Strategy, world: World, scenario: Scenario) -> RankRun | str:
    try:
        return train(strategy, world, scenario)
    except ConfigError as error:
        return str(error)
