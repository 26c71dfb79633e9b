"""Checks before any process starts: what a strategy cannot do is refused."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from unipar.engine import check_float8, float8_layers, sparse_parameters
from unipar.engine.sample_dropout import refuse_recurrent
from unipar.errors import ConfigError, first_few
from unipar.strategy import (
    Capabilities,
    EngineSpec,
    ModelContext,
    ModelFactory,
    Strategy,
    build_model,
    takes_context,
)
from unipar.world import Placement

_OFFLOAD = "activation_offload=True"


def check_capabilities(strategy: Strategy, spec: EngineSpec, placement: Placement) -> None:
    """Raise :class:`ConfigError` for the first thing asked for that the strategy cannot do here.

    Args:
        strategy: with its options.
        spec: what is asked of an engine.
        placement: ``size`` and ``device_type`` of the run; the rest is not looked at.
    """
    available = strategy.availability()
    if not available.ok:
        remedy = f" To fix it: {available.remedy}" if available.remedy else ""
        raise ConfigError(f"strategy '{strategy.name}': {available.reason}{remedy}")
    # Before the rest, since a strategy's own words say more than what follows.
    strategy.check(spec, placement)
    able = strategy.capabilities()
    for problem in (
        _device(able, placement),
        _one_of("precision", spec.precision, able.precisions),
        _needs(able.clipping, spec.max_grad_norm is not None, "max_grad_norm", "None"),
        _needs(
            able.activation_checkpointing,
            spec.activation_checkpointing != "off",
            "activation_checkpointing",
            "'off'",
        ),
        _needs(
            able.selective_checkpointing,
            spec.activation_checkpointing == "selective",
            "activation_checkpointing='selective'",
            "'full' (which keeps nothing of a block)" if able.activation_checkpointing else "'off'",
        ),
        _needs("activations" in able.offload, spec.activation_offload, _OFFLOAD, "False"),
        _offloads(spec),
        _needs(able.compile, spec.compile is not False, "compile", "False"),
        _needs(able.parallelize, spec.parallelize is not None, "parallelize", "None"),
        _compiles(spec.compile),
        _needs(
            able.sample_dropout,
            spec.dropout_seed == "sample",
            "dropout_seed='sample'",
            "'rank'",
        ),
        _compiles_dropout(spec),
        _needs(able.skip_nan, spec.on_nan == "skip", "on_nan='skip'", "'raise'"),
        _needs(
            able.accumulation,
            (spec.accumulation or 1) > 1,
            f"accumulation (micro_batch_size={spec.micro_batch_size} makes "
            f"{spec.accumulation} micro-batches a step)",
            "a micro_batch_size of global_batch_size / devices",
        ),
    ):
        if problem:
            raise ConfigError(f"strategy '{strategy.name}': {problem}")
    _check_device_supports(spec, placement)


def check_model(model: Any) -> None:
    """Raise :class:`ConfigError` for what is no model, or has parameters without values yet."""
    if not isinstance(model, nn.Module):
        if callable(model):
            _check_builds(model)
            return
        raise ConfigError(
            f"the model is a {type(model).__name__}. Pass a torch.nn.Module, or a function "
            "without arguments that builds one."
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError(
            f"the model ({type(model).__name__}) is on the meta device, where parameters have no "
            "values. Pass the function that builds it, and leave the device to the strategy."
        )
    check_shapes(model)


def check_initial_weights(model: Any, asked: object) -> None:
    """Raise :class:`ConfigError` where weights were asked for that a module has already.

    Args:
        model: a module, or a function that builds one.
        asked: ``initial_weights``.
    """
    if asked != "model" and isinstance(model, nn.Module):
        path = "path" if asked == "by_name" else repr(str(asked))
        raise ConfigError(
            f"initial_weights='{asked}' was given, and the model is a {type(model).__name__} that "
            "has its weights. Pass the function that builds it, such as "
            f"lambda: {type(model).__name__}(…), or leave initial_weights out and load the weights "
            f"before: unipar.load_model({path}, model)."
        )


def check_dropout(model: nn.Module, spec: EngineSpec) -> None:
    """Raise :class:`ConfigError` where dropout cannot draw as it is asked to."""
    if spec.dropout_seed == "sample":
        refuse_recurrent(model)


def check_shapes(model: nn.Module) -> None:
    """Raise :class:`ConfigError` if a parameter takes its shape in the first forward pass."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    if lazy:
        raise ConfigError(
            f"the model ({type(model).__name__}) has parameters that take their shape in its first "
            f"forward pass: {first_few(lazy)}. Run one on a "
            "sample before, or use modules that are told their sizes (nn.Linear for nn.LazyLinear)."
        )


def _check_builds(function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Some built-in functions have none.
        return
    if takes_context(function):
        return
    try:
        signature.bind()
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise ConfigError(
            f"the model function {name}{signature} is called without arguments, or with "
            f"one, a unipar.strategy.ModelContext: {error}. Give them beforehand: "
            f"lambda: {name}(…), or functools.partial({name}, …)."
        ) from error


def check_trainable(model: nn.Module) -> None:
    """Raise :class:`ConfigError` if no parameter of the model requires a gradient."""
    parameters = list(model.parameters())
    if not any(p.requires_grad for p in parameters):
        has = f"all {len(parameters)} parameters are frozen" if parameters else "it has none"
        raise ConfigError(
            f"the model ({type(model).__name__}) has no trainable parameter: {has}. "
            "Set requires_grad_(True) on those to train, or evaluate instead of training."
        )


def check_gradients(model: nn.Module, strategy: Strategy, spec: EngineSpec) -> None:
    """Raise :class:`ConfigError` if the model cannot be trained, or not under the strategy.

    Args:
        model: what is to be trained.
        strategy: with its options.
        spec: what is asked of its engine; the model in it is not looked at.
    """
    check_trainable(model)
    if spec.precision == "fp8":
        float8_layers(model)
    sparse = next((n for p, n in sparse_parameters(model).items() if p.requires_grad), None)
    if sparse is None:
        return
    has = f"parameter '{sparse}' has sparse gradients (sparse=True)"
    if not strategy.capabilities().sparse_gradients:
        raise ConfigError(
            f"strategy '{strategy.name}': {has}, which it cannot reduce. Build the embedding with "
            "sparse=False, or use a strategy that keeps gradients whole, such as 'ddp'."
        )
    if spec.max_grad_norm is not None:
        raise ConfigError(
            f"max_grad_norm={spec.max_grad_norm:g} was given, and {has}, of which torch computes "
            "no norm. Build the embedding with sparse=False, or leave max_grad_norm out."
        )


@dataclass(frozen=True)
class CheckedModel:
    """A function that builds a model, and refuses one that cannot be used.

    Attributes:
        build: the user's function.
        check: called with the model; raises a :class:`ConfigError` if it cannot be trained.
        context: given to the function, if it takes an argument; left out: of one process.
    """

    build: ModelFactory
    check: Callable[[nn.Module], None] | None = None
    context: ModelContext | None = None

    def __call__(self) -> nn.Module:
        model = build_model(self.build, self.context)
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"the model function returned a {type(model).__name__}. "
                "It must build and return a torch.nn.Module."
            )
        check_shapes(model)
        if self.check is not None:
            self.check(model)
        return model


def _device(able: Capabilities, placement: Placement) -> str:
    if placement.device_type not in able.device_types:
        return (
            f"runs on {_listing(able.device_types)}, and this run is on {placement.device_type}. "
            "Choose another strategy, or set device."
        )
    if able.max_devices is not None and placement.size > able.max_devices:
        return (
            f"takes at most {able.max_devices} device(s), and {placement.size} were asked for. "
            f"Set devices={able.max_devices}, or use strategy='auto'."
        )
    return ""


def _one_of(name: str, value: str, allowed: frozenset[str]) -> str:
    if value in allowed:
        return ""
    return f"{name}={value!r} is not supported. Allowed: {_listing(allowed)}."


def _needs(able: bool, asked: bool, what: str, instead: str) -> str:
    if able or not asked:
        return ""
    return f"{what} is not supported. Use {instead}, or another strategy."


def _offloads(spec: EngineSpec) -> str:
    """Why what is asked for leaves activations on the device, or moves them in vain."""
    if not spec.activation_offload:
        return ""
    if spec.compile is not False:
        return (
            f"{_OFFLOAD} moves what each operation saves, and torch.compile (compile="
            f"{spec.compile!r}) makes operations of its own, which decide for themselves what they "
            "save. Use one of the two."
        )
    if spec.activation_checkpointing == "selective":
        return (
            f"{_OFFLOAD} moves what autograd saves, and activation_checkpointing='selective' keeps "
            "outputs where it does not see them: they would stay on the device. Use 'full', whose "
            "kept inputs are moved, or 'off'."
        )
    return ""


def _compiles_dropout(spec: EngineSpec) -> str:
    """Why what is asked for would compile masks of one step into all."""
    if spec.dropout_seed == "rank" or spec.compile is False:
        return ""
    return (
        "dropout_seed='sample' puts functions of its own in the place of torch's dropout, which "
        f"torch.compile (compile={spec.compile!r}) would take for constants of each step. Use one "
        "of the two."
    )


def _compiles(setting: bool | dict[str, Any]) -> str:
    """Why torch.compile does not take these arguments; it looks at them before it compiles."""
    if not isinstance(setting, dict):
        return ""
    import torch

    try:
        torch.compile(lambda: None, **setting)
    except Exception as error:
        # Of its own, of a backend's, or of Python's call.
        said = textwrap.shorten(str(error), 300, placeholder=" …")
        return (
            f"torch.compile does not take compile={setting!r}: {type(error).__name__}: {said} "
            f"Its backends: {', '.join(torch.compiler.list_backends())}. Give its own keyword "
            "arguments, or compile=True."
        )
    return ""


def _check_device_supports(spec: EngineSpec, placement: Placement) -> None:
    if spec.precision == "fp8":
        check_float8(placement)
    if spec.precision == "bf16" and placement.device_type == "cuda":
        import torch

        if not torch.cuda.is_bf16_supported():
            raise ConfigError(
                f"precision='bf16' is not supported by {torch.cuda.get_device_name()}. "
                "Use precision='fp16' or 'fp32'."
            )


def _listing(values: frozenset[str]) -> str:
    return ", ".join(sorted(values))
