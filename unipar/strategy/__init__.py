"""The seam between the training loop and a framework, and the registry of those that fill it."""

from __future__ import annotations

from unipar.strategy.base import (
    Availability,
    Capabilities,
    Engine,
    EngineSpec,
    ModelContext,
    ModelFactory,
    OnNaN,
    OptimizerFactory,
    Parallelize,
    Precision,
    SchedulerFactory,
    StepResult,
    Strategy,
    StrategyOptions,
    build_model,
    seeded_model,
    takes_context,
)

__all__ = [
    "Availability",
    "Capabilities",
    "Engine",
    "EngineSpec",
    "ModelContext",
    "ModelFactory",
    "OnNaN",
    "OptimizerFactory",
    "Parallelize",
    "Precision",
    "SchedulerFactory",
    "StepResult",
    "Strategy",
    "StrategyOptions",
    "build_model",
    "seeded_model",
    "takes_context",
]
