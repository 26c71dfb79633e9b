"""``deepspeed.initialize``: a configuration becomes settings of the run, and a model an engine."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from unipar.compat.deepspeed.data import DeepSpeedDataLoader
from unipar.compat.deepspeed.engine import DeepSpeedEngine
from unipar.compat.deepspeed.ops.adam import FusedAdam
from unipar.compat.deepspeed.parts import EngineModel, EngineOptimizer
from unipar.compat.deepspeed.runtime import lr_schedules
from unipar.compat.deepspeed_config import (
    DEFAULT_CLIPPING,
    find_auto,
    is_enabled,
    load_config,
    read_config,
    skips_not_finite,
    zero_stage,
)
from unipar.compat.deepspeed_names import refuse
from unipar.compat.run import current
from unipar.engine import COMPUTE_DTYPES
from unipar.errors import ConfigError
from unipar.session import Session

log = logging.getLogger("unipar")


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, EngineOptimizer | None, DeepSpeedDataLoader | None, Any]:
    """Put a model under a strategy. Collective.

    Arguments are DeepSpeed's. The configuration becomes the strategy, its options and settings of
    the run, over which ``unipar.yaml`` and the environment win.

    Returns:
        The engine, its optimizer, the loader if there is data, and the scheduler.

    Raises:
        ConfigError: the configuration has no counterpart, or the strategy cannot run here.
    """
    if mpu is not None:
        refuse("initialize(mpu=…)")
    if mesh_param is not None:
        refuse("initialize(mesh_param=…)")
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"deepspeed.initialize was given a {type(model).__name__} as its model. Give model= a "
            "torch.nn.Module."
        )
    settings = _configuration(args, config if config is not None else config_params)
    trains = optimizer is not None or bool(settings.get("optimizer"))
    # A model that is only asked, as a reward's, computes in whatever run there is.
    session = current.session if current.session and not trains else _open(settings)
    assert current.config is not None
    precision = current.config.precision
    clip = float(settings.get("gradient_clipping", DEFAULT_CLIPPING))
    size, accumulation = _batch(settings, session.world.data_size)
    half = None if precision == "fp32" else COMPUTE_DTYPES[precision]
    _widen(model, precision)
    prepared = EngineModel(model, session, half=half, device=session.world.device, widens=False)
    own = _optimizer(settings, model, optimizer, model_parameters)
    taken = None
    if own is None:
        # DeepSpeed 0.19.8 broadcasts parameters alone (engine.py, _broadcast_model).
        prepared.share_weights(buffers=False)
    else:
        may_skip = precision == "fp16" or current.config.on_nan == "skip"
        taken = EngineOptimizer(own, session, accumulating=lambda: False, may_skip=may_skip)
        if taken.model_among([prepared]) is None:
            raise ConfigError(
                f"the {type(own).__name__} updates no parameter of this "
                f"{type(model).__name__}. Build it over model.parameters()."
            )
        taken.takes_up(prepared, max_grad_norm=clip or None)
    engine = DeepSpeedEngine(
        prepared, taken, settings, micro_batch_size=size, accumulation_steps=accumulation,
        precision=precision, clips=clip > 0, collate_fn=collate_fn,
    )  # fmt: skip
    engine.client_optimizer = optimizer
    engine.lr_scheduler = _scheduler(settings, taken, lr_scheduler)
    if training_data is not None:
        engine.training_data = training_data
        engine.training_dataloader = engine.deepspeed_io(training_data)
    return engine, taken, engine.training_dataloader, engine.lr_scheduler


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Let the command line name the configuration.

    Args:
        parser: gets ``--deepspeed`` and ``--deepspeed_config``.
    """
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    hidden = argparse.SUPPRESS
    group.add_argument("--deepspeed", action="store_true", default=False, help="means nothing")
    group.add_argument("--deepspeed_config", default=None, type=str, help="a JSON file")
    group.add_argument("--deepscale", action="store_true", default=False, help=hidden)
    group.add_argument("--deepscale_config", default=None, type=str, help=hidden)
    return parser


def _configuration(args: Any, given: Any) -> dict[str, Any]:
    named = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if named is not None and given is not None:
        raise ConfigError(
            f"the command line names the configuration {named}, and initialize was given another. "
            "Leave one out."
        )
    if named is None and given is None:
        raise ConfigError(
            "deepspeed.initialize has no configuration. Give config= a dict or the path of a JSON "
            "file, or start the script with --deepspeed_config."
        )
    settings = load_config(named if given is None else given)
    key = find_auto(settings)
    if key is not None:
        raise ConfigError(
            f'DeepSpeed\'s configuration has "auto" as its {key}, which nobody fills in. Write a '
            "value, or leave it out."
        )
    return settings


def _open(settings: Mapping[str, Any]) -> Session:
    """Open the run, with what the configuration asks for where nothing else decides."""
    found = read_config(settings, builds=True)
    strategy = found["strategy"]
    if current.placement().device_type == "cpu":
        # Scripts ask for it everywhere, and on a CPU there are no streams to overlap.
        strategy.pop("overlap_comm", None)
    asked: dict[str, Any] = {}
    if strategy != {"name": "deepspeed", "stage": 0}:
        asked["strategy"] = strategy
    if "loss_scale" in found:
        asked["loss_scale"] = found["loss_scale"]
    asked["precision"] = found.get("precision", "fp32")
    # DeepSpeed leaves steps out as here, and so does its own strategy, which looks at each anyway,
    # as a scaler does. For others a run in bf16 or fp32 would wait for the device in each step.
    if asked["precision"] == "fp16" or (
        skips_not_finite(settings) and not current.decides("strategy")
    ):
        asked["on_nan"] = "skip"
    begins = current.session is None
    session = current.open(asked)
    if begins and session.world.is_main:
        _tell_of_other_steps(settings)
    return session


def _tell_of_other_steps(settings: Mapping[str, Any]) -> None:
    """Warn of what DeepSpeed itself trains by in half precision without ZeRO.

    DeepSpeed 0.19.8, runtime/fp16/unfused_optimizer.py and fused_optimizer.py: what they divide by,
    which backward of runtime/engine.py multiplies by for ZeRO's alone; initialize_optimizer_states.
    """
    halves = [key for key in ("fp16", "bf16", "bfloat16") if is_enabled(settings.get(key))]
    if not halves or zero_stage(settings):
        return
    divides = "divides gradients by a loss scale that it has not applied, and "
    log.warning(
        "In %s without ZeRO, DeepSpeed 0.19.8 %sbegins with a step by gradients of zero, which "
        "Adam counts and by which weights decay. That is not repeated here, so losses differ from "
        "those of DeepSpeed itself (docs/migrate/deepspeed.md, half precision).",
        halves[0], divides if halves[0] == "fp16" else "",
    )  # fmt: skip


def _widen(model: nn.Module, precision: str) -> None:
    """Give half-precision weights the fp32 that DeepSpeed keeps copies of them in."""
    halves = [n for n, one in model.named_parameters() if one.dtype in (torch.bfloat16, torch.half)]
    if halves and precision == "fp32":
        dtype = str(model.get_parameter(halves[0]).dtype).removeprefix("torch.")
        more = f" and {len(halves) - 1} more are" if len(halves) > 1 else " is"
        raise ConfigError(
            f"the model's {halves[0]}{more} {dtype}, and DeepSpeed's configuration enables neither "
            "bf16 nor fp16. Enable one, or give initialize model.float()."
        )
    if halves:
        model.float()


def _batch(settings: Mapping[str, Any], ranks: int) -> tuple[int, int]:
    """Samples of a micro-batch on a rank, and micro-batches of a step."""
    train = settings.get("train_batch_size")
    micro = settings.get("train_micro_batch_size_per_gpu")
    steps = settings.get("gradient_accumulation_steps")
    if micro is None:
        if train is None:
            raise ConfigError(
                "DeepSpeed's configuration has neither train_batch_size nor "
                "train_micro_batch_size_per_gpu. Write one of them."
            )
        micro = train // ranks // (steps or 1)
    if steps is None:
        steps = 1 if train is None else train // max(1, micro) // ranks
    if micro < 1 or steps < 1 or (train is not None and micro * steps * ranks != train):
        raise ConfigError(
            f"train_batch_size={train} is not train_micro_batch_size_per_gpu={micro} times "
            f"gradient_accumulation_steps={steps} times {ranks} ranks. Change one of them in "
            "DeepSpeed's configuration."
        )
    return micro, steps


def _optimizer(
    settings: Mapping[str, Any], model: nn.Module, given: Any, parameters: Any
) -> torch.optim.Optimizer | None:
    """The script's optimizer, or the one that the configuration names."""
    parameters = list(model.parameters() if parameters is None else parameters)
    if given is not None:
        made = given if isinstance(given, torch.optim.Optimizer) else given(parameters)
    elif settings.get("optimizer"):
        made = _named_optimizer(settings["optimizer"], parameters)
    else:
        return None
    # As DeepSpeed does; an engine would have to say whose state an empty group has.
    made.param_groups[:] = [group for group in made.param_groups if group["params"]]
    return made


def _named_optimizer(section: Mapping[str, Any], parameters: list[Any]) -> torch.optim.Optimizer:
    kind, params = str(section.get("type")), dict(section.get("params") or {})
    if "max_grad_norm" in params:
        raise ConfigError(
            "DeepSpeed's configuration gives its optimizer max_grad_norm, which DeepSpeed refuses, "
            "too. Write gradient_clipping beside the optimizer instead."
        )
    if "betas" in params:
        params["betas"] = tuple(params["betas"])
    if kind.lower() in ("adam", "adamw"):
        # As DeepSpeed does: Adam is AdamW unless it is told not to be.
        decoupled = params.pop("adam_w_mode", True) or kind.lower() == "adamw"
        params.pop("fp32_optimizer_states", None)
        if not params.pop("torch_adam", False):
            return FusedAdam(parameters, adam_w_mode=bool(decoupled), **params)
        kind = "AdamW" if decoupled else "Adam"
    found = getattr(torch.optim, kind, None)
    if not isinstance(found, type) or kind.lower() in ("muon", "lbfgs"):
        raise ConfigError(
            f"DeepSpeed's configuration names the optimizer {kind}, which is DeepSpeed's own. Use "
            "Adam, AdamW, or another of torch.optim by its name there."
        )
    return found(parameters, **params)


def _scheduler(settings: Mapping[str, Any], optimizer: Any, given: Any) -> Any:
    """The script's scheduler, or the one that the configuration names."""
    if given is not None:
        own = optimizer.optimizer if optimizer is not None else None
        return given if hasattr(given, "step") or not callable(given) else given(own)
    section = settings.get("scheduler") or {}
    kind = section.get("type")
    if kind is None or optimizer is None:
        return None
    made = lr_schedules.__dict__.get(kind) if kind in lr_schedules.NAMES else None
    made = made or getattr(torch.optim.lr_scheduler, kind, None)
    if made is None:
        raise ConfigError(
            f"DeepSpeed's configuration names the scheduler {kind}, and there are "
            f"{', '.join(lr_schedules.NAMES)} and those of torch.optim.lr_scheduler."
        )
    return made(optimizer.optimizer, **(section.get("params") or {}))
