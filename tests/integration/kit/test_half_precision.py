"""A strategy that has no fp32 is proved in half precision, and still cannot go wrong unnoticed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import broken_strategies as broken
import pytest

from unipar.strategy import Capabilities, Strategy
from unipar.testing.cases import ALL
from unipar.testing.kit import Kit, Target
from unipar.testing.pool import WorldPools

CASES = {case.name: case for case in ALL}


def in_bf16(made: Any) -> Strategy:
    """The same strategy without fp32."""

    class HalfOnly(type(made)):
        def capabilities(self) -> Capabilities:
            return replace(super().capabilities(), precisions=frozenset({"bf16"}))

    return HalfOnly(made.options)


@pytest.mark.parametrize(
    "case",
    [
        "weighs_tokens",
        "evaluates_every_sample_once",
        "shows_losses_the_users_module",
        "resumes",
    ],
)
def test_what_is_right_passes(case: str, world_pool: WorldPools) -> None:
    CASES[case].check(Kit(Target("half", lambda: in_bf16(broken.with_classes()())), 2, world_pool))


@pytest.mark.parametrize(
    ("part", "its_class", "case", "message"),
    [
        (
            "stepper",
            broken.ClipIgnored,
            "clips",
            "is .* from fp32, and the reference",
        ),
        (
            "reducer",
            broken.GradientsSummed,
            "equals_the_reference",
            "grad_norm is .* from fp32",
        ),
        (
            "engine",
            broken.MeanOfMeans,
            "weighs_tokens",
            "the number of items of step 1",
        ),
        (
            "engine",
            broken.SchedulerPerRank,
            "equals_the_reference",
            "the learning rate of step 2",
        ),
        (
            "engine",
            broken.MomentsForgotten,
            "resumes",
            "is .* from fp32, and the reference",
        ),
    ],
)
def test_what_is_wrong_is_caught(
    part: str, its_class: type, case: str, message: str, world_pool: WorldPools
) -> None:
    made = broken.with_classes(**{part: its_class})
    with pytest.raises(AssertionError, match=message):
        CASES[case].check(Kit(Target("broken", lambda: in_bf16(made())), 2, world_pool))
