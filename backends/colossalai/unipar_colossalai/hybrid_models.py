"""The models that HybridParallelPlugin is proved with, and the sizes that it can divide them by.

Colossal-AI 0.5.0 (colossalai/shardformer/policies/auto_policy.py) has policies for more models.
They are refused until a run of theirs has been compared with a plain one, as are two that cannot
be: OPT's policy has no class for PyTorch's attention, its default (policies/opt.py, line 55), and
its later stages fail without a mask (modeling/opt.py, opt_model_forward); Falcon's ignores tp_size
for multi-query attention, with a warning (policies/falcon.py, line 35).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unipar.engine import refuse_parameter_hooks
from unipar.errors import ConfigError
from unipar.layout import Layout
from unipar.world import Placement


@dataclass(frozen=True)
class Proved:
    """Requirements that a class of transformers has to meet.

    Attributes:
        divided: what of its configuration ``tp_size`` has to divide.
        attentions: its implementations of attention.
    """

    divided: tuple[str, ...] = ("num_attention_heads",)
    attentions: tuple[str, ...] = ("eager", "sdpa")


_GROUPED = Proved(("num_attention_heads", "num_key_value_heads", "intermediate_size"))

PROVED: dict[str, Proved] = {
    "LlamaForCausalLM": _GROUPED,
    "MistralForCausalLM": _GROUPED,
    "Qwen2ForCausalLM": _GROUPED,
    "GPT2LMHeadModel": Proved(("num_attention_heads", "n_inner")),
    "GPTJForCausalLM": Proved(("num_attention_heads", "n_inner"), ("eager",)),
    "BloomForCausalLM": Proved(attentions=("eager",)),
}
"""By name, since importing the classes takes seconds."""


def check_sizes(tp_size: int, pp_size: int, placement: Placement) -> None:
    """Refuse processes that do not fall into whole replicas.

    Raises:
        ConfigError: how many there are, and how many a replica takes.
    """
    parts = tp_size * pp_size
    if parts == 1:
        raise ConfigError(
            "colossalai: plugin='hybrid' with tp_size=1 and pp_size=1 divides nothing. Set tp_size "
            "or pp_size to 2 or more, or use plugin='zero2' for data parallelism alone."
        )
    if placement.size % parts:
        raise ConfigError(
            f"colossalai: tp_size={tp_size} times pp_size={pp_size} makes {parts} processes a "
            f"replica of the model, and {placement.size} processes do not fall into such. Set "
            f"devices to a multiple of {parts}, or make the sizes smaller."
        )


def make_layout(tp_size: int, pp_size: int, placement: Placement, zero_stage: int = 0) -> Layout:
    """Which ranks hold parts of one replica.

    Colossal-AI's mesh is (data, pipeline, tensor), the last one varying fastest.

    Raises:
        ConfigError: the processes do not fall into whole replicas, or into one for ZeRO to divide.
    """
    check_sizes(tp_size, pp_size, placement)
    replicas = placement.size // (tp_size * pp_size)
    order = ("dp_replicate", "dp_shard", "cp", "pp", "tp")
    if zero_stage:
        if replicas == 1:
            raise ConfigError(
                f"colossalai: zero_stage={zero_stage} divides among replicas, and "
                f"tp_size={tp_size} makes one of the {placement.size} processes. Start "
                f"{2 * tp_size} processes or more, or leave zero_stage out."
            )
        return Layout(dp_shard=replicas, tp=tp_size, order=order)
    return Layout(dp_replicate=replicas, tp=tp_size, pp=pp_size, order=order)


def check_model(model: nn.Module, tp_size: int, pp_size: int) -> None:
    """Refuse a model that is not proved, or whose sizes do not divide.

    Raises:
        ConfigError: what the model has, and what is possible.
    """
    kind = type(model).__name__
    if kind not in PROVED or not type(model).__module__.startswith("transformers."):
        raise ConfigError(
            f"colossalai: plugin='hybrid' divides models of transformers that it knows, and this "
            f"is a {kind} of {type(model).__module__}. It is proved with: {', '.join(PROVED)}. "
            "Use one of these, or plugin='zero2', which takes any module."
        )
    config: Any = model.config
    proved = PROVED[kind]
    if config._attn_implementation not in proved.attentions:
        allowed = " or ".join(f"'{name}'" for name in proved.attentions)
        raise ConfigError(
            f"colossalai: the model has attn_implementation='{config._attn_implementation}', and "
            f"plugin='hybrid' takes {kind} with {allowed}. Load it with "
            f"attn_implementation='{proved.attentions[0]}'."
        )
    for name, parameter in model.named_parameters():
        if parameter.dtype is not torch.float32:
            raise ConfigError(
                f"colossalai: parameter '{name}' is {parameter.dtype}, and plugin='hybrid' is "
                "proved in float32 alone. Call model.float()."
            )
    if getattr(config, "add_cross_attention", False):
        raise ConfigError(
            "colossalai: the model has add_cross_attention=True, and plugin='hybrid' is proved "
            "with models that attend to themselves. Use plugin='zero2', which takes any module."
        )
    for attribute in proved.divided:
        size = getattr(config, attribute)
        # n_inner may be left out, and follows from what the heads divide.
        if size is not None and size % tp_size:
            raise ConfigError(
                f"colossalai: tp_size={tp_size} does not divide the model's {attribute}={size}. "
                "Set tp_size to a divisor of it."
            )
    if config.num_hidden_layers < pp_size:
        raise ConfigError(
            f"colossalai: pp_size={pp_size} is more than the model's "
            f"num_hidden_layers={config.num_hidden_layers}: a stage needs one. "
            f"Set pp_size={config.num_hidden_layers} at most."
        )


def check_training(model: nn.Module) -> None:
    """Refuse frozen weights, and those with hooks.

    Raises:
        ConfigError: there is one.
    """
    refuse_parameter_hooks(model, "colossalai")
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            raise ConfigError(
                f"colossalai: parameter '{name}' is frozen, and plugin='hybrid' is proved with "
                "models that are trained whole. Thaw it, or use plugin='ddp'."
            )
