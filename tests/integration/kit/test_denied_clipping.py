"""A strategy that denies clipping owes no norm of the gradient, and all else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import broken_strategies as broken
import pytest

from unipar.errors import ConfigError
from unipar.strategy import Capabilities, Engine, EngineSpec, Strategy
from unipar.testing.cases import ALL
from unipar.testing.kit import Kit, Target
from unipar.testing.pool import WorldPools
from unipar.world import World

CASES = {case.name: case for case in ALL}


def without_clipping(made: Any) -> Strategy:
    """The same strategy, which cannot so much as measure a norm."""

    class Unclipped(type(made)):
        def capabilities(self) -> Capabilities:
            return replace(super().capabilities(), clipping=False)

        def prepare(self, spec: EngineSpec, world: World) -> Engine:
            if spec.max_grad_norm is not None:
                raise ConfigError("a norm is asked for, and the capabilities deny clipping")
            return super().prepare(spec, world)

    return Unclipped(made.options)


@pytest.mark.parametrize(
    "case",
    ["equals_the_reference", "keeps_to_fp16", "skips_overflow", "refuses_what_it_denies"],
)
def test_no_norm_is_asked_for(case: str, world_pool: WorldPools) -> None:
    target = Target("unclipped", lambda: without_clipping(broken.with_classes()()))
    CASES[case].check(Kit(target, 2, world_pool))


def test_all_else_is_proved(world_pool: WorldPools) -> None:
    wrong = broken.with_classes(engine=broken.MeanOfMeans)
    target = Target("unclipped", lambda: without_clipping(wrong()))
    with pytest.raises(AssertionError, match="the number of items of step 1"):
        CASES["weighs_tokens"].check(Kit(target, 2, world_pool))
