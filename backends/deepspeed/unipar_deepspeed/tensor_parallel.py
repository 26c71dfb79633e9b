"""AutoTP: DeepSpeed divides the layers of a model of transformers, and ZeRO what each rank has.

Ranks of one group, ``tp`` neighbors, hold parts of each layer and are given the same samples. ZeRO
divides over the others, each of which has the same parts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from unipar.engine import WholeLosses, has_hooks, layers_of, refuse_parameter_hooks
from unipar.errors import ConfigError
from unipar.layout import Layout
from unipar.state import Box, LocalState, TensorState, named_weights
from unipar.strategy import Capabilities
from unipar.world import Placement, World

PROVED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
"""Classes of transformers whose runs have been compared with plain ones."""

CAPABILITIES = Capabilities(
    precisions=frozenset({"fp32", "bf16", "fp16"}),
    device_types=frozenset({"cpu", "cuda"}),
    sharded=frozenset({"optimizer", "gradients", "parameters"}),
    several_engines=False,
    compile=False,
    splits_tensors=True,
    sparse_gradients=False,
)

_LAYERS = {
    "column": r"(?:.*\.)?layers\.\d+\.(?:self_attn\.[qkv]_proj|mlp\.(?:gate|up)_proj)\.weight$",
    "row": r"(?:.*\.)?layers\.\d+\.(?:self_attn\.o_proj|mlp\.down_proj)\.weight$",
}
"""Which weights are divided by their first dimension, and which by their second.

Embeddings, norms and the head stay whole. DeepSpeed 0.19.8 would go by the plan of transformers
else, which has other layers in other versions, and then make a loss of its own of a tied head
(runtime/engine.py, ``_apply_autotp_partitioning``).
"""
_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def configuration(tp: int) -> dict[str, Any]:
    """DeepSpeed's section ``tensor_parallel``."""
    specs = [{"patterns": [pattern], "partition_type": kind} for kind, pattern in _LAYERS.items()]
    partition = {"use_default_specs": False, "layer_specs": specs}
    return {"tensor_parallel": {"autotp_size": tp, "partition_config": partition}}


def make_layout(tp: int, placement: Placement, strategy: str) -> Layout:
    """Neighbors divide layers, and the others samples and what ZeRO divides.

    Raises:
        ConfigError: the processes do not fall into groups of ``tp``.
    """
    if placement.size % tp:
        raise ConfigError(
            f"{strategy}: tp={tp} does not divide the {placement.size} processes that there are. "
            f"Start a multiple of {tp} processes, or set tp to a divisor of their number."
        )
    return Layout(dp_shard=placement.size // tp, tp=tp)


def check_model(model: nn.Module, tp: int, strategy: str) -> None:
    """Refuse a model that is not proved, or whose sizes do not divide.

    Raises:
        ConfigError: what the model has, and what is possible.
    """
    kind = type(model).__name__
    if kind not in PROVED or not type(model).__module__.startswith("transformers."):
        raise ConfigError(
            f"{strategy}: tp={tp} divides models of transformers that it is proved with "
            f"({', '.join(PROVED)}), and this is a {kind} of {type(model).__module__}. Use "
            f"'mesh:tp={tp}', which finds how to divide any model, or leave tp out."
        )
    for name, parameter in model.named_parameters():
        if parameter.dtype is not torch.float32:
            raise ConfigError(
                f"{strategy}: parameter '{name}' is {parameter.dtype}, and tp={tp} is proved with "
                "float32 alone. Call model.float(); precision='bf16' computes in bfloat16 all the "
                "same."
            )
    config: Any = model.config
    for attribute in _DIVIDED:
        if (size := getattr(config, attribute)) % tp:
            raise ConfigError(
                f"{strategy}: tp={tp} does not divide the model's {attribute}={size}. Set tp to a "
                "divisor of it."
            )
    refuse_parameter_hooks(model, strategy)
    _check_layers(model, tp, strategy)


def _check_layers(model: nn.Module, tp: int, strategy: str) -> None:
    """Refuse layers that DeepSpeed would put others in the place of, without what they have.

    Raises:
        ConfigError: it has a hook, or a weight that another layer has too, or is of another class.
    """
    _, aliases = named_weights(model)
    shared = {*aliases, *aliases.values()}
    for name, layer in model.named_modules():
        if not _is_divided(f"{name}.weight"):
            continue
        if type(layer) is not nn.Linear:
            what = f"is a {type(layer).__name__}, and DeepSpeed divides torch.nn.Linear alone"
        elif has_hooks(layer):
            what = "has a hook, which DeepSpeed would lose with the layer that it replaces"
        elif f"{name}.weight" in shared:
            what = "shares its weight with another layer, and DeepSpeed would cut it twice"
        else:
            continue
        raise ConfigError(
            f"{strategy}: '{name}' {what}. Take that away, or use 'mesh:tp={tp}', which divides "
            "layers where they are, or leave tp out."
        )


def _is_divided(name: str) -> bool:
    """Return whether a weight of this name is divided."""
    return any(re.match(pattern, name) for pattern in _LAYERS.values())


def _columns(module: nn.Module) -> Iterator[nn.Module]:
    """The layers that are divided by their outputs."""
    return (m for n, m in module.named_modules() if re.match(_LAYERS["column"], f"{n}.weight"))


def keep_inputs_contiguous(module: nn.Module) -> None:
    """Have each layer's gradient summed over the ranks, whatever its input's strides are.

    DeepSpeed 0.19.8 reduces a copy of a gradient that is not contiguous, and goes on with this
    rank's own (module_inject/layers.py, ``ColumnParallel.backward``): that of an input that is not,
    as ``inputs_embeds`` of one transposed sample.
    """
    for layer in _columns(module):
        layer.register_forward_pre_hook(lambda _, args: (args[0].contiguous(), *args[1:]))


def _shape(held: Any) -> tuple[int, ...]:
    """The shape of this rank's part of layers; stage 3 leaves it beside an empty tensor."""
    return tuple(getattr(held, "ds_shape", held.shape))


def stop() -> None:
    """Have DeepSpeed forget that layers were divided to be trained."""
    from deepspeed import set_autotp_mode  # pyright: ignore

    set_autotp_mode(training=False)


@dataclass(frozen=True)
class LayerParts:
    """Which part of the user's tensors a rank has: an equal slice along one dimension, or all.

    Attributes:
        shapes: of the user's weights, by name.
        num_parameters: of the user's model.
        tp: how many ranks divide layers.
        rank: which of them this one is.
    """

    shapes: Mapping[str, tuple[int, ...]]
    num_parameters: int
    tp: int
    rank: int

    @classmethod
    def of(cls, module: nn.Module, world: World) -> LayerParts:
        """Read what there is of a module that is whole."""
        weights, _ = named_weights(module)
        return cls(
            {name: tuple(weight.shape) for name, weight in weights.items()},
            sum(parameter.numel() for parameter in module.parameters()),
            world.layout.tp,
            world.layout.coordinate("tp", world.rank),
        )

    def check(self, module: nn.Module, engine: Any) -> None:
        """Hold that DeepSpeed has divided what it was asked to, and leave samples to the run.

        Its first forward pass would pickle the batch, to compare it between ranks that were given
        the same share of the data.
        """
        weights, _ = named_weights(module)
        for name, weight in weights.items():
            wanted = list(self.shapes[name])
            for dim, pattern in enumerate(_LAYERS.values()):
                # A bias is divided with the weight's first dimension.
                of_weight = re.sub(r"\.bias$", ".weight", name)
                if dim < len(wanted) and re.match(pattern, of_weight):
                    wanted[dim] //= self.tp
            held = _shape(weight)
            assert held == tuple(wanted), (name, held, wanted)
        engine.first_dataloader_check.remove()

    def whole_losses(self, module: nn.Module, strategy: str) -> WholeLosses:
        """Refuse losses that are computed from this rank's parts."""
        divided = {n: p for n, p in module.named_parameters() if _shape(p) != self.shapes[n]}
        columns = set(_columns(module))
        whole = [layer for layer in layers_of(module) if layer not in columns]
        return WholeLosses(divided, whole, strategy)

    def place(self, name: str, state: TensorState) -> TensorState:
        """Describe a state of this rank's slice as one of the user's tensor.

        Args:
            name: of the weight.
            state: of what this rank has of it, or of a moment of that.
        """
        logical = self.shapes[name]
        if state.shape == logical:
            return state
        assert isinstance(state, LocalState)
        (dim,) = (d for d, size in enumerate(logical) if size != state.shape[d])
        start = self.rank * state.shape[dim]
        assert math.prod(logical) == math.prod(state.shape) * self.tp
        boxes = tuple(
            Box((*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]), sizes)
            for offsets, sizes in state.boxes
        )
        return replace(state, shape=logical, boxes=boxes)
