"""The seam between the training loop and a framework, and the registry of strategies."""

from __future__ import annotations

from unipar.optimizers.factories import OptimizerFactory, SchedulerFactory
from unipar.strategy.base import (
    Availability,
    Capabilities,
    SelfTest,
    Strategy,
    StrategyOptions,
)
from unipar.strategy.engine import (
    ActivationCheckpointing,
    DropoutSeed,
    Engine,
    EngineSpec,
    OnNaN,
    Parallelize,
    Precision,
    initial_values,
    seeded_model,
)
from unipar.strategy.initial import InitialValues, InitialWeights
from unipar.strategy.loss_scale import LossScale
from unipar.strategy.model_function import (
    ModelContext,
    ModelFactory,
    build_model,
    takes_context,
)
from unipar.strategy.step_result import StepResult

__all__ = [
    "ActivationCheckpointing",
    "Availability",
    "Capabilities",
    "DropoutSeed",
    "Engine",
    "EngineSpec",
    "InitialValues",
    "InitialWeights",
    "LossScale",
    "ModelContext",
    "ModelFactory",
    "OnNaN",
    "OptimizerFactory",
    "Parallelize",
    "Precision",
    "SchedulerFactory",
    "SelfTest",
    "StepResult",
    "Strategy",
    "StrategyOptions",
    "build_model",
    "initial_values",
    "seeded_model",
    "takes_context",
]
