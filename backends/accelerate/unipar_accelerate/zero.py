"""Accelerate's DeepSpeed plugin: its Accelerator prepares, and the strategy 'deepspeed' trains.

ZeRO's step and its portable state are that strategy's, which is found by its name as any other is.
What Accelerate has of its own under DeepSpeed is how ``deepspeed.initialize`` gets called, and that
is what it does here.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from unipar.engine import Undo
from unipar.errors import ConfigError
from unipar.strategy import EngineSpec, Strategy, registry
from unipar_accelerate.accelerator import of_views
from unipar_accelerate.framework import Framework, quiet
from unipar_accelerate.options import ACCELERATOR_KEYS, AccelerateOptions

if TYPE_CHECKING:
    from accelerate import Accelerator

_INSTEAD = {
    "backward": "engine.backward(loss, num_items=...) and engine.step(), or engine.train_step(...)",
    "clip_grad_norm_": "max_grad_norm, which DeepSpeed clips to when it steps",
    "clip_grad_value_": "max_grad_norm: DeepSpeed cannot clip by value",
    "accumulate": "micro_batch_size",
    "no_sync": "micro_batch_size",
}
"""Methods that step behind the engine's back or do nothing under DeepSpeed, and what to use."""


def make_strategy(options: AccelerateOptions) -> Strategy:
    """The strategy 'deepspeed', with what was given of it.

    Raises:
        ConfigError: its package or DeepSpeed is not installed, or an option is none of its.
    """
    if "deepspeed" not in registry.names():
        raise ConfigError(
            "accelerate: plugin='deepspeed' trains by the strategy 'deepspeed', whose package is "
            "not installed. In a checkout of unipar: pip install ./backends/deepspeed; or pip "
            "install the wheel unipar_deepspeed-….whl that make dist builds there. Then: unipar "
            "install deepspeed."
        )
    available = registry.strategy_class("deepspeed").availability()
    if not available.ok:
        raise ConfigError(
            f"accelerate: plugin='deepspeed' cannot be used: {available.reason} "
            f"To fix it: {available.remedy}"
        )
    return registry.make("deepspeed", {"stage": options.stage, **options.deepspeed})


def check(options: AccelerateOptions, spec: EngineSpec, environment: Mapping[str, str]) -> None:
    """Refuse what Accelerate would need or would pass over without a word.

    Raises:
        ConfigError: transformers is missing, or ``accelerate launch`` has set something else.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            "accelerate: Accelerate's DeepSpeedPlugin imports transformers, which is not "
            "installed: pip install transformers. Or use strategy='deepspeed'."
        )
    clip = spec.max_grad_norm
    wanted = {
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": (float(options.stage), "the option 'stage'"),
        "ACCELERATE_GRADIENT_CLIPPING": (
            0.0 if clip is None or math.isinf(clip) else clip,
            "max_grad_norm",
        ),
    }
    for name, (value, place) in wanted.items():
        given = environment.get(name, "auto")
        if given != "auto" and _number(given) != value:
            raise ConfigError(
                f"accelerate: the environment has {name}={given}, and the run has {value:g}. "
                f"Unset the variable, and set {place}."
            )
    for name in sorted(environment):
        unused = environment[name].lower() in {"", "none", "false"}
        if name.startswith(("ACCELERATE_DEEPSPEED_OFF", "ACCELERATE_DEEPSPEED_CON")) and not unused:
            raise ConfigError(
                f"accelerate: the environment has {name}={environment[name]}, which would not be "
                "looked at. Unset the variable, and use the option 'deepspeed': "
                "deepspeed={'offload_optimizer': True}, or its native keys."
            )


class Prepared:
    """Calls ``deepspeed.initialize`` by an ``Accelerator``, which is then at :attr:`accelerator`.

    Args:
        framework: Accelerate's state in this process.
        options: of the strategy.
    """

    def __init__(self, framework: Framework, options: AccelerateOptions) -> None:
        self._framework, self._options = framework, options
        self._made: Accelerator | None = None

    @property
    def accelerator(self) -> Accelerator:
        """The Accelerator; where there was nothing to initialize, one that has prepared nothing."""
        if self._made is None:
            zero = {"stage": self._options.stage}
            with quiet():
                self._made = self._make(
                    {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
                )
        return self._made

    def __call__(
        self, module: nn.Module, optimizer: Optimizer, config: dict[str, Any]
    ) -> tuple[Any, Undo]:
        with quiet():
            self._made = accelerator = self._make(config)
            engine, _ = accelerator.prepare(module, optimizer)
        assert accelerator.deepspeed_engine_wrapped is not None, "Accelerate left DeepSpeed out"
        for name, instead in _INSTEAD.items():
            setattr(accelerator, name, _refused(name, instead))
        accelerator.unwrap_model = of_views(accelerator.unwrap_model)

        def release() -> None:
            # Else it would destroy the engine a second time.
            accelerator.deepspeed_engine_wrapped = None
            accelerator.free_memory()
            self._framework.forget_plugin()

        return engine, release

    def _make(self, config: dict[str, Any]) -> Accelerator:
        from accelerate.utils import (
            DataLoaderConfiguration,
            DeepSpeedPlugin,
            GradientAccumulationPlugin,
        )
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        native = {k: v for k, v in self._options.native.items() if k in ACCELERATOR_KEYS}
        if self._framework.precision() is not None:
            raise ConfigError(
                "accelerate: an Accelerator of this process was made before the run, and the next "
                "one cannot be given DeepSpeed. Make none before, and use engine.accelerator; one "
                "made after the model is prepared shares its state."
            )
        plugin = DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=False)
        # Not `cpu=True`: with it Accelerate 1.15.0 leaves the plugin out without a word (state.py,
        # `AcceleratorState.__init__`). The device is known from the state that is there.
        accelerator = self._framework.accelerate.Accelerator(
            deepspeed_plugin=plugin,
            # Half precision is autocast's, over fp32 parameters.
            mixed_precision="no",
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            dataloader_config=DataLoaderConfiguration(split_batches=True),
            **native,
        )
        # transformers has been told of the plugin, and would make all models from here on by
        # zero.Init.
        unset_hf_deepspeed_config()
        return accelerator


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _refused(name: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(
            f"accelerate: accelerator.{name}() does not do under DeepSpeed what it says. "
            f"Use {instead}."
        )

    return refuse
