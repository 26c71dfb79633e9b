"""Which layers are divided over the tensor-parallel ranks, and how: a plan, made before any process
starts.

It is the user's; or the model's own (``_tp_plan`` of transformers); or found by tracing repeated
blocks (:mod:`unipar_torch.plan_tracing`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import nn

from unipar.engine import repeated_blocks
from unipar.engine.trials import own_attributes
from unipar.errors import ConfigError, did_you_mean, first_few


class Style(NamedTuple):
    """A way to divide a layer.

    Attributes:
        layer: the class that it is for.
        dims: of each parameter that is divided, the dimension.
        takes_parts: whether its input is divided, by the last dimension.
        gives_parts: whether its output is, likewise.
    """

    layer: type[nn.Module]
    dims: Mapping[str, int]
    takes_parts: bool = False
    gives_parts: bool = False

    @property
    def is_closed(self) -> bool:
        """Whether the rest of the model sees no difference, whatever it is."""
        return not self.takes_parts and not self.gives_parts


STYLES: dict[str, Style] = {
    "colwise": Style(nn.Linear, {"weight": 0, "bias": 0}, gives_parts=True),
    "rowwise": Style(nn.Linear, {"weight": 1}, takes_parts=True),
    "colwise_gather_output": Style(nn.Linear, {"weight": 0, "bias": 0}),
    "rowwise_split_input": Style(nn.Linear, {"weight": 1}),
    "embedding_rowwise": Style(nn.Embedding, {"weight": 0}),
    "embedding_colwise": Style(nn.Embedding, {"weight": 1}),
    "replicated_with_grad_allreduce": Style(nn.Module, {}, takes_parts=True, gives_parts=True),
}
"""By the names that transformers has for them."""

_TIED = {
    (nn.Embedding, 0): "embedding_rowwise",
    (nn.Embedding, 1): "embedding_colwise",
    (nn.Linear, 0): "colwise_gather_output",
    (nn.Linear, 1): "rowwise_split_input",
}
"""How a layer is divided whose weight another one has divided along a dimension."""


@dataclass(frozen=True)
class TensorPlan:
    """How the layers of a model are divided.

    Attributes:
        source: who says so.
        styles: of each layer that is divided, by its name.
        counts: numbers of attention heads that modules keep as attributes, and that are divided
            with their layers: module name, then attribute names.
        notes: what is left whole that one might expect to be divided, and why.
    """

    source: str
    styles: Mapping[str, str]
    counts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def dim(self, layer: str, parameter: str) -> int | None:
        """The dimension that a layer's own parameter is divided along; ``None``: it is whole."""
        style = self.styles.get(layer)
        return None if style is None else STYLES[style].dims.get(parameter)


def make_plan(model: nn.Module, tp: int, given: Mapping[str, str] | None = None) -> TensorPlan:
    """Find how a model's layers are divided.

    Args:
        model: as the user has built it; on the meta device, too.
        tp: ranks that divide each layer.
        given: the user's own plan: patterns of layer names, in which ``*`` stands for any one
            part between dots, to names of :data:`STYLES`.

    Raises:
        ConfigError: a plan names nothing, or sizes do not divide; or there is none to be found.
    """
    # It goes by what is defined here.
    from unipar_torch.plan_tracing import counts_needed, traced_plan

    if given is not None:
        plan = TensorPlan("option plan", _matched(model, given, "mesh: plan", must_match=True))
        plan = _with_tied(model, plan, strict=True)
    elif own := _own_plan(model):
        plan = TensorPlan("the model's own plan (_tp_plan)", own)
        plan = _with_tied(model, plan, strict=False)
        plan = _without_indivisible(model, plan, tp)
    else:
        with own_attributes(model):
            plan = traced_plan(model, tp)
        # Of blocks of one class, one is traced.
        _check_layers(model, plan)
        _check_ties(model, plan)
        check_sizes(model, plan, tp)
        return plan
    _check_layers(model, plan)
    _check_ties(model, plan)
    check_sizes(model, plan, tp)
    with own_attributes(model):
        plan = replace(plan, counts=counts_needed(model, plan, tp))
    check_sizes(model, plan, tp)
    return plan


def _own_plan(model: nn.Module) -> dict[str, str]:
    """What a model of transformers says itself. (Its instances have the whole of it.)"""
    # transformers 5.23, modeling_utils.py, PreTrainedModel.post_init.
    own = getattr(model, "_tp_plan", None)
    if not isinstance(own, Mapping) or not own:
        return {}
    return _matched(model, own, f"mesh: the plan of {type(model).__name__}", must_match=False)


def _matched(
    model: nn.Module, patterns: Mapping[str, str], where: str, *, must_match: bool
) -> dict[str, str]:
    names = [name for name, _ in model.named_modules() if name]
    parameters = {name for name, _ in model.named_parameters()}
    styles: dict[str, str] = {}
    for pattern, style in patterns.items():
        parts = (r"[^.]+" if part == "*" else re.escape(part) for part in pattern.split("."))
        matcher = re.compile(r"\.".join(parts))
        found = [name for name in names if matcher.fullmatch(name)]
        if not found and any(map(matcher.fullmatch, parameters)):
            raise ConfigError(
                f"{where}: '{pattern}' names a parameter, and what is divided is a layer. Name "
                "the module that holds it."
            )
        if not found and must_match:
            raise ConfigError(
                f"{where}: '{pattern}' names no layer of the model."
                f"{did_you_mean(pattern, _layers(model))} Layers that can be divided: "
                f"{first_few(_layers(model), 8)}. A * stands for one part of a name."
            )
        if found and style not in STYLES:
            raise ConfigError(
                f"{where}: '{pattern}' is to be divided as '{style}', which is not built. "
                f"Allowed: {', '.join(STYLES)}."
                + ("" if must_match else " Pass plan={…} with the layers that are to be divided.")
            )
        for name in found:
            if styles.setdefault(name, style) != style:
                raise ConfigError(
                    f"{where}: '{name}' is to be divided as '{styles[name]}' and, by '{pattern}', "
                    f"as '{style}'. Leave one of them out."
                )
    if must_match and not styles:
        raise ConfigError(f"{where} is empty. Name layers, or leave the option out.")
    return styles


def _layers(model: nn.Module) -> list[str]:
    """The layers that can be divided, with ``*`` for numbers."""
    found = {
        re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name): None
        for name, module in model.named_modules()
        if name and isinstance(module, (nn.Linear, nn.Embedding))
    }
    return list(found)


def _with_tied(model: nn.Module, plan: TensorPlan, *, strict: bool) -> TensorPlan:
    """The plan, in which layers with a weight in common are divided alike."""
    # A layer that has two names is divided once.
    modules = dict(model.named_modules())
    owners: dict[int, list[str]] = {}
    for name, module in modules.items():
        for key, parameter in module.named_parameters(recurse=False):
            if key == "weight":
                owners.setdefault(id(parameter), []).append(name)
    styles, notes = dict(plan.styles), list(plan.notes)
    for names in owners.values():
        dims = {name: plan.dim(name, "weight") for name in names if name in styles}
        divided = {dim for dim in dims.values() if dim is not None}
        if len(names) < 2 or not divided:
            continue
        if len(divided) > 1:
            said = ", ".join(f"'{name}' as '{styles[name]}'" for name in dims)
            raise ConfigError(
                f"mesh: {' and '.join(names)} have one weight, and it cannot be divided in two "
                f"ways: {said}. Divide both by rows (embedding_rowwise, colwise_gather_output), or "
                "neither."
            )
        (dim,) = divided
        for name in set(names) - set(dims):
            for kind in (nn.Embedding, nn.Linear):
                if isinstance(modules[name], kind):
                    styles[name] = _TIED[kind, dim]
        odd = [name for name in names if (said := _unusual(modules[name], styles.get(name)))]
        if odd and strict:
            raise ConfigError(
                f"mesh: {' and '.join(names)} have one weight, and '{odd[0]}' "
                f"({type(modules[odd[0]]).__name__}) cannot be divided: "
                f"{_unusual(modules[odd[0]], styles.get(odd[0]))}. Leave them out of the plan."
            )
        if odd:
            for name in names:
                styles.pop(name, None)
            kind = type(modules[odd[0]]).__name__
            notes.append(f"{', '.join(names)}: one weight, and a {kind} cannot be divided")
    return replace(plan, styles=styles, notes=tuple(notes))


def _without_indivisible(model: nn.Module, plan: TensorPlan, tp: int) -> TensorPlan:
    """The plan without vocabularies that do not divide: nothing else depends on them."""
    styles, notes = dict(plan.styles), list(plan.notes)
    for name, style in plan.styles.items():
        for _, size in _sizes(model.get_submodule(name), style):
            if STYLES[style].is_closed and size % tp and name in styles:
                del styles[name]
                notes.append(f"{name}: {size} does not divide by tp={tp}")
    return replace(plan, styles=styles, notes=tuple(notes))


def _unusual(module: nn.Module, style: str | None) -> str:
    """Why a layer cannot be divided as planned; empty if it can."""
    if style is None:
        return "its class is none that can be"
    expected = STYLES[style].layer
    if expected is nn.Module:
        return ""
    if not isinstance(module, expected):
        return f"'{style}' is for nn.{expected.__name__}"
    if type(module).forward is not expected.forward or "forward" in vars(module):
        return f"it computes otherwise than nn.{expected.__name__}"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "max_norm changes rows in the forward pass"
    if isinstance(module, nn.Embedding) and module.scale_grad_by_freq:
        return "scale_grad_by_freq counts tokens over the whole vocabulary"
    return ""


def _check_layers(model: nn.Module, plan: TensorPlan) -> None:
    for name, style in plan.styles.items():
        module = model.get_submodule(name)
        if said := _unusual(module, style):
            raise ConfigError(
                f"mesh: '{name}' ({type(module).__name__}) cannot be divided as '{style}' "
                f"({plan.source}): {said}. Leave it out: plan={{…}} with the other layers."
            )


def _check_ties(model: nn.Module, plan: TensorPlan) -> None:
    """Refuse a plan that divides a parameter by one of its names, and not by another one."""
    known: dict[nn.Parameter, tuple[str, int | None]] = {}
    for holder, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            name, dim = f"{holder}.{key}".removeprefix("."), plan.dim(holder, key)
            first, other = known.setdefault(parameter, (name, dim))
            if dim != other:
                raise ConfigError(
                    f"mesh: '{first}' and '{name}' are one parameter of the model, and the plan "
                    f"({plan.source}) divides it as one of them only. Leave the layer out: "
                    "plan={…} with the other layers."
                )


# -- arithmetic ----------------------------------------------------------------------------------


def _sizes(module: nn.Module, style: str) -> Iterator[tuple[str, int]]:
    for parameter, dim in STYLES[style].dims.items():
        tensor = getattr(module, parameter, None)
        if tensor is not None:
            yield f"{parameter}, dimension {dim}", tensor.shape[dim]


def head_counts(model: nn.Module, plan: TensorPlan) -> dict[str, tuple[str, ...]]:
    """Attributes that hold numbers of heads, of the modules that hold divided layers."""
    holders = {
        name.rpartition(".")[0] for name, style in plan.styles.items() if STYLES[style].gives_parts
    }
    found = {
        holder: tuple(
            key for key, value in vars(model.get_submodule(holder)).items() if _is_count(key, value)
        )
        for holder in sorted(holders)
    }
    return {holder: keys for holder, keys in found.items() if keys}


def _is_count(key: str, value: object) -> bool:
    if not isinstance(value, int) or isinstance(value, bool) or key.startswith("_"):
        return False
    return "head" in key and not any(word in key for word in ("dim", "size", "group", "mask"))


def check_sizes(model: nn.Module, plan: TensorPlan, tp: int) -> None:
    """Hold every size that is divided against the number of ranks.

    Raises:
        ConfigError: one does not divide; it says which numbers of ranks would do.
    """
    found: dict[str, int] = {}
    for name, style in plan.styles.items():
        module = model.get_submodule(name)
        for what, size in _sizes(module, style):
            found[f"'{name}' ({what})"] = size
        if STYLES[style].gives_parts and STYLES[style].dims:
            holder = model.get_submodule(name.rpartition(".")[0])
            config = getattr(holder, "config", None)
            for key in ("num_attention_heads", "num_key_value_heads"):
                if isinstance(count := getattr(config, key, None), int) and _attends(name):
                    found[f"the config's {key}"] = count
    for holder, keys in plan.counts.items():
        for key in keys:
            found[f"{key} of '{holder}'"] = getattr(model.get_submodule(holder), key)
    if odd := {what: size for what, size in found.items() if size % tp}:
        common = math.gcd(*found.values())
        allowed = [str(n) for n in range(1, common + 1) if common % n == 0]
        listed = first_few([f"{what} is {size}" for what, size in odd.items()], 4)
        raise ConfigError(
            f"mesh: tp={tp} does not divide the model ({plan.source}): {listed}. "
            f"Sizes that would work for all layers: tp={' or '.join(allowed)}; or leave these "
            "layers whole by plan={…} with the others."
        )


def _attends(name: str) -> bool:
    """Whether a layer of transformers belongs to an attention, whose heads are divided."""
    return "attn" in name or "attention" in name


def blocks_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """The model's repeated blocks, in order."""
    names = {id(module): name for name, module in model.named_modules()}
    return {names[id(block)]: block for block in repeated_blocks(model)}
