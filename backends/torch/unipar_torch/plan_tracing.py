"""A tensor-parallel plan for models that carry none: pairs of linear layers in repeated blocks.

A block is run on the meta device, and every tensor remembers which linear layers it comes from. A
layer whose input comes from linear layers alone, and takes all that these give, can be divided by
rows, and they by columns: attention's output after its queries, keys and values, the second layer
of an MLP after the first. Whether what lies between bears it is tried in numbers, in one process.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from unipar.engine.trials import trial
from unipar.errors import ConfigError, first_few
from unipar_torch.tensor_plan import TensorPlan, blocks_by_name, check_sizes, head_counts

TOLERANCE = 1e-4
"""The largest difference that is rounding in fp32, relative to the largest element."""

_ROWS, _LENGTH = 2, 6


class Pair(NamedTuple):
    """Layers of a block, by their names in it.

    Attributes:
        columns: those whose outputs are divided.
        rows: the one that takes these outputs.
    """

    columns: tuple[str, ...]
    rows: str

    @property
    def styles(self) -> dict[str, str]:
        """How its layers are divided."""
        return {**dict.fromkeys(self.columns, "colwise"), self.rows: "rowwise"}


class Found(NamedTuple):
    """The divisions that the blocks of a model were found to bear.

    Attributes:
        styles: of the layers of each block, by their names in the model.
        counts: attributes with numbers of heads that have to be divided with them.
        notes: what was left whole, and why.
    """

    styles: dict[str, str]
    counts: dict[str, tuple[str, ...]]
    notes: tuple[str, ...]


def traced_plan(model: nn.Module, tp: int) -> TensorPlan:
    """Find pairs of linear layers in the model's repeated blocks.

    Args:
        model: as the user has built it.
        tp: ranks that divide each layer.

    Raises:
        ConfigError: there is none, or sizes do not divide.
    """
    if not blocks_by_name(model):
        raise ConfigError(
            "mesh: the model has no plan of its own, and no repeated blocks (an nn.ModuleList or "
            "nn.Sequential of modules of one class) in which to look for layers to divide. "
            + _REMEDY
        )
    styles: dict[str, str] = {}
    counts: dict[str, tuple[str, ...]] = {}
    notes: dict[str, None] = {}
    found: list[tuple[str, Pair, dict[str, tuple[str, ...]]]] = []
    for name, block, shape, pairs, problem in _traced_blocks(model):
        kind = type(block).__name__
        if shape is None:
            notes[f"{kind}: it could not be run on a tensor of its width alone{problem}"] = None
        elif not pairs:
            notes[f"{kind}: no linear layer takes what others give, and nothing else"] = None
        for pair in pairs:
            problem, needed = _hold(block, pair, tp, shape)
            if problem:
                layers = f"{' + '.join(pair.columns)} and {pair.rows}"
                notes[f"{kind}: {layers} are left whole: {problem}"] = None
                continue
            found.append((name, pair, needed))
    whole = _with_other_uses(model, found)
    for number, (name, pair, needed) in enumerate(found):
        if number in whole:
            layers = f"{' + '.join(pair.columns)} and {pair.rows}"
            notes[f"{name}: {layers} are left whole: {whole[number]}"] = None
            continue
        styles |= {f"{name}.{layer}": style for layer, style in pair.styles.items()}
        counts |= {f"{name}.{holder}".rstrip("."): keys for holder, keys in needed.items()}
    if not styles:
        raise ConfigError(
            "mesh: the model has no plan of its own, and none was found in its repeated blocks "
            f"({first_few(list(notes), 4)}). " + _REMEDY
        )
    return TensorPlan("found by tracing", styles, counts, tuple(notes))


def counts_needed(model: nn.Module, plan: TensorPlan, tp: int) -> dict[str, tuple[str, ...]]:
    """Find which numbers of heads have to be divided with the layers of a plan.

    Where a block cannot be traced, all that its divided layers' modules have; the first pass of
    training shows whether that is right.

    Raises:
        ConfigError: layers that the plan divides do not bear it.
    """
    counts = head_counts(model, plan)
    if not counts:
        return counts
    for name, block, shape, pairs, _ in _traced_blocks(model):
        within = f"{name}." if name else ""
        for pair in pairs:
            if any(plan.styles.get(within + k) != style for k, style in pair.styles.items()):
                continue
            problem, needed = _hold(block, pair, tp, shape)
            if problem:
                raise ConfigError(
                    f"mesh: {plan.source} divides {', '.join(within + k for k in pair.styles)}, "
                    f"which would change what the model computes: {problem}. Leave them out of "
                    "plan={…}."
                )
            for holder in {(within + k).rpartition(".")[0] for k in pair.columns}:
                short = holder.removeprefix(name).removeprefix(".")
                if short in needed:
                    counts[holder] = needed[short]
                else:
                    counts.pop(holder, None)
    return counts


def _with_other_uses(model: nn.Module, found: Sequence[tuple[str, Pair, Any]]) -> dict[int, str]:
    """Pairs, by number, of which a weight is also that of a layer that is divided otherwise."""
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            if parameter is not None and key == "weight":
                users.setdefault(id(parameter), []).append(name)
    whole: dict[int, str] = {}
    known = -1
    while len(whole) != known:
        known = len(whole)
        divided = {
            f"{name}.{layer}": (style, number)
            for number, (name, pair, _) in enumerate(found)
            if number not in whole
            for layer, style in pair.styles.items()
        }
        for names in users.values():
            if len({divided[name][0] if name in divided else "" for name in names}) > 1:
                for name in names:
                    if name in divided:
                        whole[divided[name][1]] = f"{' and '.join(names)} have one weight"
    return whole


def _traced_blocks(
    model: nn.Module,
) -> Iterator[tuple[str, nn.Module, tuple[int, ...] | None, list[Pair], str]]:
    known: dict[Any, tuple[tuple[int, ...] | None, list[Pair], str]] = {}
    for name, block in blocks_by_name(model).items():
        shapes = tuple((key, tuple(p.shape)) for key, p in block.named_parameters())
        kind = (type(block), shapes)
        if kind not in known:
            known[kind] = trace(block)
        yield name, block, *known[kind]


_REMEDY = (
    "Say which layers are divided: plan={'blocks.*.attn.q': 'colwise', 'blocks.*.attn.out': "
    "'rowwise', …}; or use dp_shard in place of tp, which divides any model."
)


# -- tracing -------------------------------------------------------------------------------------


class _Origins(TorchFunctionMode):
    """Remembers of each tensor which layers it comes from; ``""`` is the block's input."""

    def __init__(self) -> None:
        super().__init__()
        # Kept alive, so that no other tensor has its number.
        self._seen: dict[int, tuple[torch.Tensor, frozenset[str]]] = {}
        self.inputs: dict[str, frozenset[str]] = {}
        self.users: dict[str, set[str]] = {}

    def of(self, values: Any) -> frozenset[str]:
        found = [self._seen[id(t)][1] for t in tree_leaves(values) if id(t) in self._seen]
        return frozenset().union(*found)

    def mark(self, values: Any, origins: frozenset[str]) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, torch.Tensor):
                self._seen[id(tensor)] = (tensor, origins)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if origins := self.of((args, kwargs)):
            self.mark(result, origins)
        return result


def trace(block: nn.Module) -> tuple[tuple[int, ...] | None, list[Pair], str]:
    """Find pairs of layers, on the meta device.

    Returns:
        The shape of the input that the block was run on, ``None`` if it takes none; the pairs; and
        why it takes none, in brackets.
    """
    width = _width(block)
    if width is None:
        return None, [], ""
    problem = ""
    meta = copy.deepcopy(block).to("meta")
    for shape in ((_ROWS, _LENGTH, width), (_ROWS, width)):
        origins = _Origins()
        try:
            _run_traced(meta, torch.empty(shape, device="meta"), origins)
        except Exception as error:
            # A user's module may raise anything on what it was not written for.
            said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            problem = problem or f" ({said[:200]}, on the meta device)"
            continue
        return shape, _pairs(meta, origins), ""
    return None, [], problem


def _width(block: nn.Module) -> int | None:
    """Of what goes into the first layer that has parameters."""
    for module in block.modules():
        if isinstance(module, nn.Linear):
            return module.in_features
        first = next(iter(module.parameters(recurse=False)), None)
        if first is not None and not list(module.children()):
            return first.shape[-1]
    return None


def _run_traced(block: nn.Module, x: torch.Tensor, origins: _Origins) -> None:
    def leave(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            came = origins.of(args)
            origins.inputs[name] = origins.inputs.get(name, frozenset()) | came
            for layer in came:
                origins.users.setdefault(layer, set()).add(name)
            origins.mark(output, frozenset({name}))

        return hook

    for name, module in _linears(block):
        module.register_forward_hook(leave(name))
    with torch.no_grad(), origins:
        origins.mark(x, frozenset({""}))
        output = block(x)
    for layer in origins.of(output):
        origins.users.setdefault(layer, set()).add("the block's output")


def _linears(block: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in block.named_modules():
        if not isinstance(module, nn.Linear) or "forward" in vars(module):
            continue
        if type(module).forward is nn.Linear.forward:
            yield name, module


def _pairs(block: nn.Module, origins: _Origins) -> list[Pair]:
    pairs: list[Pair] = []
    taken: set[str] = set()
    for name, _ in _linears(block):
        came = origins.inputs.get(name, frozenset())
        alone = came and "" not in came and all(origins.users[layer] == {name} for layer in came)
        if alone and name not in taken and not came & taken:
            # In the order in which the block has them.
            columns = tuple(layer for layer, _ in _linears(block) if layer in came)
            pairs.append(Pair(columns, name))
            taken |= {*columns, name}
    return pairs


# -- trying --------------------------------------------------------------------------------------


def _hold(
    block: nn.Module, pair: Pair, tp: int, shape: tuple[int, ...] | None
) -> tuple[str, dict[str, tuple[str, ...]]]:
    """Why a pair cannot be divided, empty if it can; and the numbers of heads to divide with it."""
    assert shape is not None
    plan = TensorPlan("found by tracing", pair.styles)
    check_sizes(block, plan, tp)
    problem = _try(block, pair, plan, tp, shape)
    if not problem:
        return "", {}
    found = head_counts(block, plan)
    for counts in _choices(block, found, tp):
        if not _try(block, pair, replace(plan, counts=counts), tp, shape):
            return "", counts
    if found:
        plan = replace(plan, counts=found)
        check_sizes(block, plan, tp)
        problem = _try(block, pair, plan, tp, shape)
    return problem, {}


def _choices(
    block: nn.Module, found: dict[str, tuple[str, ...]], tp: int
) -> Iterator[dict[str, tuple[str, ...]]]:
    """All that may be numbers of heads, and then fewer: one may be the width of a head.

    Names (``d_head``) do not tell, and sizes may be equal. Numbers do: heads of a part of their
    width attend otherwise.
    """
    keys = [(holder, key) for holder, keys in found.items() for key in keys]
    divide = [(h, key) for h, key in keys if getattr(block.get_submodule(h), key) % tp == 0]
    for size in range(len(divide), 0, -1):
        for chosen in combinations(divide, size):
            counts: dict[str, tuple[str, ...]] = {}
            for holder, key in chosen:
                counts[holder] = (*counts.get(holder, ()), key)
            yield counts


def _try(block: nn.Module, pair: Pair, plan: TensorPlan, tp: int, shape: tuple[int, ...]) -> str:
    """Run each rank's part of a pair in turn; why the sum is not the whole, or an empty string."""
    # Masks on the meta device have no values, and may be told either way: with one of them nothing
    # is left to attend to.
    for below in (1, 0):
        # Of its own: torch.manual_seed would seed GPUs, too.
        generator = torch.Generator().manual_seed(0)
        tried = _filled(block, generator, below)
        x = torch.randn(shape, device="cpu", generator=generator)
        with torch.no_grad():
            try:
                whole = _given_by(tried, pair.rows, x)
                if not whole.isfinite().all():
                    continue
                parts = [_part(tried, pair, plan, tp, rank, x) for rank in range(tp)]
            except Exception as error:
                return f"a part of them raises {type(error).__name__} ({str(error)[:120]})"
        return _apart(whole, parts, tried.get_submodule(pair.rows).bias)
    return "what it gives for random weights is no number"


def _apart(whole: torch.Tensor, parts: list[torch.Tensor], bias: Any) -> str:
    if any(part.shape != whole.shape for part in parts):
        return "a part of them gives another shape"
    total = torch.stack(parts).sum(0)
    if isinstance(bias, torch.Tensor):
        total = total - (len(parts) - 1) * bias
    apart = ((total - whole).abs().max() / whole.abs().max()).item()
    return "" if apart <= TOLERANCE else f"the sum of parts is {apart:.0%} off from the whole"


def _filled(block: nn.Module, generator: torch.Generator, below: int) -> nn.Module:
    """A copy on the host in fp32, in the same mode, with weights that hide nothing.

    Args:
        block: the original.
        generator: of its values.
        below: of masks without values, the value on and below the diagonal; above it, the other.
    """
    filled = copy.deepcopy(block).to("meta").to(torch.float32).to_empty(device="cpu")
    _tie(filled, block)
    own = {**dict(block.named_parameters()), **dict(block.named_buffers(remove_duplicate=False))}
    for name, tensor in {
        **dict(filled.named_parameters()),
        **dict(filled.named_buffers()),
    }.items():
        with torch.no_grad():
            if not own[name].is_meta and isinstance(tensor, nn.Parameter) is False:
                tensor.copy_(own[name])
            elif tensor.ndim > 1 and not tensor.is_floating_point():
                lower = torch.ones(tensor.shape, device="cpu").tril()
                tensor.copy_(lower if below else 1 - lower)
            elif tensor.ndim > 1:
                tensor.normal_(std=tensor.shape[-1] ** -0.5, generator=generator)
            elif tensor.is_floating_point():
                tensor.normal_(mean=1.0, std=0.2, generator=generator)
            else:
                tensor.zero_()
    return filled


def _tie(filled: nn.Module, block: nn.Module) -> None:
    """Let layers of a copy that was moved share the parameters that those of a block share."""
    moved = dict(filled.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    for name, parameter in block.named_parameters(remove_duplicate=False):
        holder, _, key = name.rpartition(".")
        one = moved[first.setdefault(id(parameter), name)]
        filled.get_submodule(holder)._parameters[key] = one  # pyright: ignore


def _given_by(block: nn.Module, layer: str, x: torch.Tensor) -> torch.Tensor:
    """What a layer of a block gives."""
    given: list[torch.Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        given.append(output)

    handle = block.get_submodule(layer).register_forward_hook(keep)
    try:
        with trial(block, x.device):
            block(x)
    except Exception:
        if not given:
            raise
    finally:
        handle.remove()
    return given[0]


def _part(
    block: nn.Module, pair: Pair, plan: TensorPlan, tp: int, rank: int, x: torch.Tensor
) -> torch.Tensor:
    with ExitStack() as stack:
        for name in pair.columns:
            layer = block.get_submodule(name)
            stack.enter_context(_narrowed(layer, {"weight": 0, "bias": 0}, tp, rank))
        rows = block.get_submodule(pair.rows)
        stack.enter_context(_narrowed(rows, {"weight": 1}, tp, rank))
        stack.enter_context(divided_counts(block, plan, tp))
        return _given_by(block, pair.rows, x)


@contextmanager
def _narrowed(layer: nn.Module, dims: dict[str, int], tp: int, rank: int) -> Iterator[None]:
    whole = {
        name: layer._parameters[name] for name in dims if layer._parameters.get(name) is not None
    }
    for name, parameter in whole.items():
        assert parameter is not None
        layer._parameters[name] = nn.Parameter(parameter.chunk(tp, dims[name])[rank])
    try:
        yield
    finally:
        layer._parameters.update(whole)


@contextmanager
def divided_counts(block: nn.Module, plan: TensorPlan, tp: int) -> Iterator[None]:
    """Let modules have a rank's share of the heads that they count."""
    kept: list[tuple[nn.Module, str, int]] = []
    try:
        for holder, keys in plan.counts.items():
            module = block.get_submodule(holder)
            for key in keys:
                kept.append((module, key, getattr(module, key)))
                setattr(module, key, getattr(module, key) // tp)
        yield
    finally:
        for module, key, value in kept:
            setattr(module, key, value)
