"""``precision="fp8"``: matrix products of linear layers in float8, by torchao.

Scales are dynamic, one for each tensor. Weights stay as they are, so neither a checkpoint nor an
optimizer knows of it.
"""

from __future__ import annotations

import logging
from importlib import metadata
from types import MethodType

import torch
from torch import nn

from unipar.engine.forwards import replace_forward
from unipar.engine.transforms import Undo, last_first
from unipar.errors import ConfigError, first_few
from unipar.strategy import Precision
from unipar.utils.logs import quiet_framework
from unipar.utils.torch_versions import check_torchao
from unipar.world import Placement

log = logging.getLogger("unipar")

_TORCHAO = "0.18."
_MULTIPLE = 16


def check_float8(placement: Placement) -> None:
    """Raise :class:`ConfigError` if nothing can be computed in float8 here."""
    instead = "Use precision='bf16', or a GPU of compute capability 8.9 or above (Ada, Hopper)."
    if placement.device_type != "cuda":
        raise ConfigError(
            f"precision='fp8' needs a GPU, and this run is on {placement.device_type}. {instead}"
        )
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 9):
        raise ConfigError(
            f"precision='fp8' is not supported by {torch.cuda.get_device_name()}, whose compute "
            f"capability is {major}.{minor}. {instead}"
        )
    check_torchao()
    try:
        found = metadata.version("torchao")
    except metadata.PackageNotFoundError:
        found = ""
    if not found.startswith(_TORCHAO):
        has = f"torchao {found} is installed" if found else "torchao is not installed"
        raise ConfigError(
            f"precision='fp8' needs torchao {_TORCHAO}*, and {has}. Run: pip install 'unipar[fp8]'"
        )


def float8_layers(model: nn.Module) -> tuple[list[nn.Linear], list[str]]:
    """The linear layers that can multiply in float8, and the names of those that cannot.

    Raises:
        ConfigError: there is none.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    fitting = [layer for layer in layers.values() if _fits(layer)]
    if not fitting:
        raise ConfigError(
            f"precision='fp8' needs nn.Linear layers whose in_features and out_features are "
            f"multiples of {_MULTIPLE}, and none of the {len(layers)} linear layers of the model "
            f"({type(model).__name__}) is one. Use precision='bf16', or other sizes."
        )
    return fitting, [name for name, layer in layers.items() if not _fits(layer)]


def compute_in_float8(model: nn.Module, precision: Precision, *, emulate: bool = False) -> Undo:
    """Let linear layers multiply in float8, if that is the precision.

    ``forward`` is replaced on the instances: layers keep their class, names, hooks and parameters.
    Those that do not fit compute as before.

    Args:
        model: with whole weights, before anything else is done to it.
        precision: of the run; all but ``"fp8"`` change nothing.
        emulate: round to float8 and multiply in fp32, which needs no GPU; for tests.

    Raises:
        ConfigError: the model has no layer that fits.
    """
    if precision != "fp8":
        return lambda: None
    layers, others = float8_layers(model)
    # Takes as long to import as torch, and complains of kernels that are not for this machine.
    with quiet_framework("torchao", "torch.utils._pytree"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # Gradients of weights are products over the rows of a micro-batch, of any number in a last one.
    config = Float8LinearConfig(pad_inner_dim=True, emulate=emulate)
    template = convert_to_float8_training(
        nn.Linear(_MULTIPLE, _MULTIPLE, device="meta"), config=config
    )
    # torchao 0.18, float8_linear.py: beside what an nn.Linear has, `forward` reads these two.
    # torchao's own way puts other modules in the place of layers, without their hooks.
    added = {"config": template.config, "linear_mm_config": template.linear_mm_config}
    changed = [layer for layer in layers if not _is_float8(layer)]
    for layer in changed:
        vars(layer).update(added)
    forward = type(template).forward
    give_back_forwards = last_first(
        [replace_forward(layer, MethodType(forward, layer)) for layer in changed]
    )
    log.info(
        "precision='fp8': %d of %d linear layers compute in float8%s",
        len(layers),
        len(layers) + len(others),
        f"; as in bf16, since their sizes or kinds do not fit: {first_few(others)}"
        if others
        else "",
    )

    def give_back() -> None:
        give_back_forwards()
        for layer in changed:
            for name in added:
                vars(layer).pop(name, None)

    return give_back


def _fits(layer: nn.Linear) -> bool:
    """Whether it is a plain layer, not one that does more or whose weight is divided already."""
    if layer.in_features % _MULTIPLE or layer.out_features % _MULTIPLE:
        return False
    plain = type(layer) is nn.Linear and type(layer.weight) in (nn.Parameter, torch.Tensor)
    return plain and (_is_float8(layer) or "forward" not in vars(layer))


def _is_float8(layer: nn.Linear) -> bool:
    """Return whether another engine, which shares the layer, has changed it already."""
    return "linear_mm_config" in vars(layer)
