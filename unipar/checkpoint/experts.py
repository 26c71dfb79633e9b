"""Experts of a mixture in the two forms that they have: one tensor of all, and a tensor of each.

transformers 5 holds a layer's experts in ``mlp.experts.gate_up_proj``, ``(experts, 2 * inner,
width)``, and ``mlp.experts.down_proj``, ``(experts, width, inner)``. The hub, and older versions,
have three matrices of each expert under names of their own (transformers 5.23,
conversion_mapping.py). Only names and places change here: what is read is the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from unipar.checkpoint.boxes import whole
from unipar.checkpoint.division import Chunk
from unipar.checkpoint.manifest import TensorIndex
from unipar.errors import CheckpointError, first_few
from unipar.state import Box


class _Hub(NamedTuple):
    """The hub's names of one family of models."""

    holder: str
    gate: str
    up: str
    down: str


HUB = {
    "mixtral": _Hub("block_sparse_moe", "w1", "w3", "w2"),
    "qwen": _Hub("mlp", "gate_proj", "up_proj", "down_proj"),
}
HubForm = Literal["mixtral", "qwen"]

_FUSED = re.compile(r"(.*\.|)mlp\.experts\.(gate_up_proj|down_proj)")
_EXPERTS = re.compile(r"((?:.*\.|)mlp\.experts)\.(.+)")
_OF_ONE = re.compile(
    r"(.*\.|)(?:"
    r"block_sparse_moe\.experts\.(?P<m>\d+)\.(?P<mixtral>w[123])|"
    r"mlp\.experts\.(?P<q>\d+)\.(?P<qwen>gate_proj|up_proj|down_proj)"
    r")\.weight"
)


class Part(NamedTuple):
    """A tensor to write: part of a stored one, and the shape that it has by itself."""

    stored: str
    box: Box
    shape: tuple[int, ...]


def holds_fused(weights: Mapping[str, TensorIndex]) -> bool:
    """Whether some tensor holds all experts of a layer."""
    return any(_FUSED.fullmatch(n) and len(index.shape) == 3 for n, index in weights.items())


def holds_separate(weights: Mapping[str, TensorIndex]) -> bool:
    """Whether some tensor is one expert's, by the hub's names."""
    return any(map(_OF_ONE.fullmatch, weights))


def separated(weights: Mapping[str, TensorIndex], form: HubForm) -> dict[str, Part]:
    """Each tensor under the hub's names, as a part of what is stored.

    Args:
        weights: as stored.
        form: the family of models whose names they are given.

    Raises:
        CheckpointError: a layer's experts are not those two tensors, in the shapes that the hub's
            names stand for.
    """
    _refuse_others(weights, form)
    hub, found = HUB[form], {}
    for name, index in weights.items():
        match = _FUSED.fullmatch(name)
        if match is None:
            renamed = re.sub(r"(^|\.)mlp\.", rf"\g<1>{hub.holder}.", name)
            found[renamed] = Part(name, whole(index.shape), index.shape)
            continue
        number, rows, columns = index.shape
        halves = [hub.down] if match[2] == "down_proj" else [hub.gate, hub.up]
        rows //= len(halves)
        for expert in range(number):
            for at, key in enumerate(halves):
                own = f"{match[1]}{hub.holder}.experts.{expert}.{key}.weight"
                box = Box((expert, at * rows, 0), (1, rows, columns))
                found[own] = Part(name, box, (rows, columns))
    return found


def _refuse_others(weights: Mapping[str, TensorIndex], form: str) -> None:
    """Refuse experts that have the same names, and mean something else by them.

    GPT-OSS has biases, and columns in which gates alternate with what they gate; others have no
    gates.
    """
    remedy = (
        f"Experts '{form}' are written from gate_up_proj (experts, 2 * inner, width), gates first, "
        "and down_proj (experts, width, inner), and nothing else. Write these by experts fused, "
        "under the names that the model itself has."
    )
    layers: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, index in weights.items():
        if match := _EXPERTS.fullmatch(name):
            layers.setdefault(match[1], {})[match[2]] = index.shape
    for layer, shapes in layers.items():
        if shapes.keys() != {"gate_up_proj", "down_proj"}:
            raise CheckpointError(f"'{layer}' holds {first_few(sorted(shapes))}. {remedy}")
        gates, down = shapes["gate_up_proj"], shapes["down_proj"]
        if len(down) != 3 or gates != (down[0], 2 * down[2], down[1]):
            raise CheckpointError(
                f"'{layer}' holds gate_up_proj {list(gates)} and down_proj {list(down)}. {remedy}"
            )


def fused(weights: Mapping[str, TensorIndex]) -> dict[str, TensorIndex]:
    """The same bytes as tensors of all experts, by transformers 5's names.

    Raises:
        CheckpointError: experts are missing, or differ in shape or dtype.
    """
    found: dict[str, TensorIndex] = {}
    layers: dict[str, dict[str, dict[int, TensorIndex]]] = {}
    for name, index in weights.items():
        match = _OF_ONE.fullmatch(name)
        if match is None:
            found[re.sub(r"(^|\.)block_sparse_moe\.", r"\1mlp.", name)] = index
            continue
        hub = HUB["mixtral" if match["m"] else "qwen"]
        key = match["mixtral"] or match["qwen"]
        part = next(p for p in ("gate", "up", "down") if getattr(hub, p) == key)
        layer = layers.setdefault(f"{match[1]}mlp.experts", {})
        layer.setdefault(part, {})[int(match["m"] or match["q"])] = index
    for layer, parts in layers.items():
        for name, keys in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            found[f"{layer}.{name}"] = _stacked(f"{layer}.{name}", [parts.get(k, {}) for k in keys])
    return found


def _stacked(name: str, parts: list[dict[int, TensorIndex]]) -> TensorIndex:
    number = 1 + max(max(part, default=-1) for part in parts)
    missing = [e for e in range(number) if any(e not in part for part in parts)]
    kinds = {(index.shape, index.dtype) for part in parts for index in part.values()}
    if missing or not number:
        raise CheckpointError(
            f"'{name}' is made of what each of {number} experts has, and there is not all of it of "
            f"expert {first_few(list(map(str, missing)))}."
        )
    if len(kinds) > 1 or any(len(shape) != 2 for shape, _ in kinds):
        raise CheckpointError(
            f"'{name}' is made of what each expert has, and that differs in shape or dtype: "
            f"{first_few(sorted(f'{list(shape)} {dtype}' for shape, dtype in kinds))}."
        )
    (((rows, columns), dtype),) = kinds
    chunks: list[Chunk] = []
    for at, part in enumerate(parts):
        for expert in range(number):
            for chunk in part[expert].chunks:
                (first, left), sizes = chunk.box
                box = Box((expert, at * rows + first, left), (1, *sizes))
                chunks.append(Chunk(box, chunk.file, chunk.key, chunk.place))
    return TensorIndex((number, len(parts) * rows, columns), dtype, tuple(chunks))
