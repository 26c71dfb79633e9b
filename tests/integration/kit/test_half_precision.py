"""A strategy that has no fp32 is proved in half precision, and still cannot go wrong unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import broken_strategies as broken
import pytest

from unipar.strategy import Capabilities, EngineSpec, Strategy
from unipar.testing.cases import ALL
from unipar.testing.kit import Kit, Target
from unipar.testing.pool import WorldPools
from unipar.world import World
from unipar_torch.ddp import DDPEngine, DDPOptions, DDPStrategy

CASES = {case.name: case for case in ALL}


def in_bf16(engine_type: type[DDPEngine]) -> Callable[[], Strategy]:
    class HalfOnly(DDPStrategy):
        def capabilities(self) -> Capabilities:
            return replace(super().capabilities(), precisions=frozenset({"bf16"}))

        def prepare(self, spec: EngineSpec, world: World) -> DDPEngine:
            engine = super().prepare(spec, world)
            engine.__class__ = engine_type
            return engine

    return lambda: HalfOnly(DDPOptions.model_validate({}))


@pytest.mark.parametrize("case", ["weighs_tokens", "evaluates_every_sample_once", "resumes"])
def test_what_is_right_passes(case: str, world_pool: WorldPools) -> None:
    CASES[case].check(Kit(Target("half", in_bf16(DDPEngine)), 2, world_pool))


@pytest.mark.parametrize(
    ("engine_type", "case", "message"),
    [
        (broken.ClipIgnored, "clips", "is .* from fp32, and the reference"),
        (broken.GradientsSummed, "equals_the_reference", "grad_norm is .* from fp32"),
        (broken.MeanOfMeans, "weighs_tokens", "the number of items of step 1"),
        (broken.SchedulerPerRank, "equals_the_reference", "the learning rate of step 2"),
        (broken.MomentsForgotten, "resumes", "is .* from fp32, and the reference"),
    ],
)
def test_what_is_wrong_is_caught(
    engine_type: type[DDPEngine], case: str, message: str, world_pool: WorldPools
) -> None:
    with pytest.raises(AssertionError, match=message):
        CASES[case].check(Kit(Target("broken", in_bf16(engine_type)), 2, world_pool))
