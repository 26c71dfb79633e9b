"""The user's module, as a loss function sees it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from unipar.data.batch import Batch
from unipar.errors import ConfigError
from unipar.loss import Loss, LossFn
from unipar.strategy import Engine, StepResult, Strategy
from unipar.testing import models
from unipar.testing.cases.case import case_also_at
from unipar.testing.cases.loops import assert_refusals, or_error
from unipar.testing.harness import RankRun, train
from unipar.testing.kit import Kit, merge
from unipar.testing.scenarios import Scenario, classify
from unipar.world import World

# DDP has a dim and a logger, and DeepSpeed's engine a config.
ATTRIBUTES = {"dim": 9, "logger": "own", "config": {"width": 9}}
REFUSED = ["refused"]
"""Stands for names that a strategy refuses to give."""


class Attributed(models.Network):
    """Has attributes that wrappers have, too, and one that its loss sets.

    Args:
        training: the mode that it is in.

    Attributes:
        heat: what the loss sets.
        passes: the mode and the heat that each forward pass found.
    """

    scale: torch.Tensor

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, models.FEATURES))
        self.dim, self.logger, self.config = ATTRIBUTES.values()
        self.heat = 0.0
        self.passes: list[tuple[bool, float]] = []
        self.train(training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes.append((self.training, self.heat))
        return super().forward(x * self.scale)


def _use_names(model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    """Classify, and keep one layer's weights small, by its name."""
    total, count = classify(model, batch)
    for name, parameter in model.named_parameters():
        if name == "outward.weight":
            total = total + 0.1 * count * parameter.square().sum()
    return total, count


def _scenario(mode: bool, terms: Any) -> Scenario:
    return Scenario(model=partial(Attributed, training=mode), terms=terms, num_steps=3)


class Look(NamedTuple):
    """What a loss function saw of the model in one call; attributes as they are printed."""

    step: int
    evaluating: bool
    training: bool
    attributes: list[str]
    names: dict[str, list[str]]


class Seen(NamedTuple):
    """What one rank saw of a model.

    Attributes:
        looks: those of the loss function; those that are alike once, for a strategy may try a loss
            before it trains by it.
        parts: modes of the model, of its first and of its last layer: after each step, and before
            the second step after an evaluation.
        passes: of the user's module; see :class:`Attributed`.
    """

    looks: list[Look]
    parts: list[list[bool]]
    passes: list[tuple[bool, float]]


@case_also_at(2)
def shows_losses_the_users_module(kit: Kit) -> None:
    """A loss function sees the modes, names and attributes of the user's module, and sets these.

    So does the module itself, also where its modes are set after an evaluation. A loss may compute
    from weights that it finds by name, and load what ``state_dict`` gives; where ranks divide
    parameters, that may be an error, and so may their names.
    """
    able = kit.capabilities
    if able.pipeline:
        # Its losses are given what the model has computed, and not the model.
        return
    divided, modes = "parameters" in able.sharded, (True, False)
    asked = [kit.fit(_scenario(mode, _use_names)) for mode in modes]
    ranks = kit.run(or_error, _see, asked) if divided else kit.run(_see, asked)
    if errors := [said for said in ranks if isinstance(said, str)]:
        assert_refusals(kit, ranks, errors, "")
        asked = [kit.fit(_scenario(mode, classify)) for mode in modes]
        ranks = kit.run(_see, asked)
    for mode, scenario, runs in zip(modes, asked, zip(*ranks, strict=True), strict=True):
        subject = f"{kit.target.name}, a model in {'training' if mode else 'evaluation'} mode"
        names = _names(scenario.build())
        allowed = [names, names | {"parameters": REFUSED}] if divided else [names]
        for rank, (_, seen) in enumerate(runs):
            _assert_seen(seen, mode, allowed, subject=f"{subject}, rank {rank}")
        kit.check(merge([run for run, _ in runs]), scenario, subject=subject)


def _assert_seen(
    seen: Seen, mode: bool, allowed: list[dict[str, list[str]]], *, subject: str
) -> None:
    for look in seen.looks:
        if look.names not in allowed:
            raise AssertionError(
                f"{subject}: in step {look.step}, the loss function finds the names {look.names}; "
                f"the user's module has {allowed[0]}"
            )
    when = ((0, False), (1, True), (1, False), (2, False))
    found = [look[:4] for look in seen.looks]
    own = [repr(value) for value in ATTRIBUTES.values()]
    expected = [(step, evaluating, mode and not evaluating, own) for step, evaluating in when]
    if found != expected:
        raise AssertionError(
            f"{subject}: by step, whether in evaluation, the loss function sees the mode and the "
            f"attributes {found}; those of the user's module are {expected}"
        )
    parts = [[mode] * 3, [mode, not mode, mode], *[[mode, not mode, not mode]] * 2]
    if seen.parts != parts:
        raise AssertionError(
            f"{subject}: modes that were set after an evaluation are {seen.parts}, and not {parts}"
        )
    passes = [(mode, 1.0), (False, 2.0), (mode, 3.0), (mode, 4.0)]
    if seen.passes != passes:
        raise AssertionError(
            f"{subject}: forward passes find the mode and what the loss function has set to be "
            f"{seen.passes}, and not {passes}"
        )


def _names(model: Any) -> dict[str, list[str]]:
    try:
        parameters = [name for name, _ in model.named_parameters()]
    except ConfigError as error:
        if "parameters" not in str(error):
            raise
        parameters = REFUSED
    return {
        "parameters": parameters,
        "buffers": [name for name, _ in model.named_buffers()],
        "modules": [name for name, _ in model.named_modules()],
        "state_dict": list(model.state_dict()),
    }


def _see(strategy: Strategy, world: World, scenarios: list[Scenario]) -> list[tuple[RankRun, Seen]]:
    return [_see_one(strategy, world, scenario) for scenario in scenarios]


def _see_one(strategy: Strategy, world: World, scenario: Scenario) -> tuple[RankRun, Seen]:
    seen = Seen([], [], [])

    def looking(loss_fn: LossFn, step: int, *, evaluating: bool = False) -> LossFn:
        def look(model: Any, data: Any) -> Loss:
            attributes = [repr(getattr(model, name, None)) for name in ATTRIBUTES]
            one = Look(step, evaluating, model.training, attributes, _names(model))
            if one not in seen.looks:
                seen.looks.append(one)
            if scenario.terms is _use_names:
                model.load_state_dict(model.state_dict())
            model.heat = getattr(model, "heat", 0.0) + 1.0
            return loss_fn(model, data)

        return look

    def step(
        engine: Engine, world: World, batch: Batch, loss_fn: Callable[[Any, Any], Any]
    ) -> StepResult:
        number, module = engine.num_steps, cast("Any", engine.module)
        parts = module, module.inward, module.outward
        if number == 1:
            parts[1].train(not module.training)
            engine.eval_batch(batch, looking(loss_fn, number, evaluating=True))
            seen.parts.append([part.training for part in parts])
            parts[2].train(not module.training)
        result = engine.train_step(batch, looking(loss_fn, number))
        seen.parts.append([part.training for part in parts])
        seen.passes[:] = module.passes
        return result

    return train(strategy, world, scenario, step), seen
