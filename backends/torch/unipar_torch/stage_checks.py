"""A cut held against numbers: in the first pass of training, and in the first one of evaluation,
nothing that counts may depend on what stands in for other stages' tensors, and neighbors have to
agree on what their blocks are given.

A stage is run twice on its first micro-batch, with the same random numbers in its own blocks, and
others before them: what is missing is a half in one, and not a number in the other. A result that
differs was computed from something that another stage has, or draws for itself. And beside the
hidden state, which is sent, the next stage's first block is given tensors (masks, rotary tables)
that this stage and the next one both make: those are compared. So each stage by itself computes
what the whole model does, and no rank ever needs the whole.

What blocks give besides the hidden state is seen on the last stage, where the loss depends on it.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_map

from unipar.errors import ConfigError, first_few
from unipar_torch.sequences import hidden_of
from unipar_torch.stage_modules import Stage, local_part

TOLERANCE = 1e-3
"""The largest difference that is rounding, relative to the largest element of a tensor."""
NUM_COMPARED = 24
"""Tensors beside the hidden state that neighbors compare."""
_WITHOUT_NUMBERS = str | bytes | None | type | torch.dtype | torch.device | nn.Module
_REMEDY = (
    "Name the parts of each stage by stages=[[…], […]]; what two stages need is named in both, and "
    "is kept equal. Or use dp_shard, which divides any model."
)


def run_checked(
    stage: Stage, args: tuple[Any, ...], kwargs: dict[str, Any], received: torch.Tensor | None
) -> Any:
    """The stage's first pass, after another one that it has to agree with.

    Returns:
        What the first pass gives.

    Raises:
        ConfigError: the stage cannot run without the others' tensors, depends on them or on random
            numbers that they draw for themselves, or changes its weights.
    """
    weights = _Weights(stage)
    again = _Again(stage)
    # The model may change what it is given.
    copied_args, copied_kwargs = tree_map(_copied, (args, kwargs))
    # It comes before the pass that counts, which is the one that modules remember things of.
    given = _copy(received)
    with torch.no_grad(), again.recording(), stage.standing_in(0.5):
        expected = _run(stage, copied_args, copied_kwargs, given)
    # Casts of weights that were made without a graph would take their gradients away.
    torch.clear_autocast_cache()
    with again.repeating(), _ends(stage), stage.standing_in(math.nan):
        in_place = given is not None and given._version > 0
        output = _run(stage, args, kwargs, received, in_place=in_place)
    if weights.changed():
        raise ConfigError(
            f"mesh: {stage.name} changes weights in its forward pass, which pp runs twice for its "
            "first micro-batch. Change them after a step, or use strategy='ddp'."
        )
    if _differ(output, expected):
        raise ConfigError(_culprits(stage, args, kwargs, received, output, again))
    return output


def check_loss(stage: Stage, loss: torch.Tensor, received: torch.Tensor | None) -> None:
    """Hold that the loss depends on blocks by what the last one gives, and in no other way.

    What blocks give besides (costs of routers), and their weights (a penalty over all of them), are
    known here of the last stage's blocks alone.

    Args:
        stage: the last one, after :func:`run_checked`.
        loss: computed from what it gave.
        received: what the stage was given.

    Raises:
        ConfigError: it does.
    """
    ends, stage.ends = stage.ends, ()
    outside = [name for name in stage.plan.owners if not _in_blocks(stage, name)]
    named = dict(stage.module.named_parameters(remove_duplicate=False))
    # A weight that is the head's too is all here.
    allowed = {id(named[name]) for name in outside if name in named}
    found: dict[int, str] = {
        id(parameter): f"'{name}'"
        for name, parameter in named.items()
        if _in_blocks(stage, name) and id(parameter) not in allowed
    }
    found.update({id(copy): found[id(p)] for p, copy in stage.copies() if id(p) in found})
    found[id(received)] = "what the stage before has sent"
    seen, left = set(ends), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [after for after, _ in node.next_functions]
        what = found.get(id(getattr(node, "variable", None)))
        if what is not None and type(node).__name__ == "AccumulateGrad":
            raise ConfigError(
                f"mesh: the loss depends on {what} other than by what the last block, "
                f"'{stage.plan.chain[-1]}', gives. With pp, a term that is made from all blocks "
                "(costs of routers, a penalty over the weights) would count those of the last "
                "stage alone. Leave it out (output_router_logits=False, the optimizer's "
                "weight_decay), or use dp_shard, which divides any model."
            )


def digest(others: Any) -> list[float]:
    """Numbers by which neighbors compare what a block is given beside the hidden state.

    Of lists and mappings their structure; of each tensor two numbers, which its order shows in.
    Objects of other classes (caches) are left out.
    """
    leaves, structure = tree_flatten(others)
    kinds = "".join("f" if _tensor(leaf).is_floating_point() else "i" for leaf in _compared(leaves))
    numbers = [float(zlib.crc32(f"{structure} {kinds}".encode()))]
    for leaf in _compared(leaves):
        values = _tensor(leaf).flatten()
        if not values.is_floating_point():
            numbers += [float(zlib.crc32(values.cpu().numpy().tobytes())), float(len(values))]
            continue
        # On a scale where the -1e9 of a mask hides nothing, and what is infinite is a number.
        values = values.double().nan_to_num(0.5, 1e30, -1e30)
        values = values.sign() * values.abs().log1p()
        # Steps by the golden ratio, which begin again nowhere and come out even.
        places = torch.arange(len(values), dtype=torch.float64, device=values.device)
        weights = (places * 0.6180339887498949).frac() - 0.5
        numbers += [(values * weights).sum().item(), values.abs().sum().item()]
    return numbers


def compare(stage: Stage, sent: list[float]) -> None:
    """Hold what the stage before has given a block against what this one has.

    Args:
        stage: after a pass.
        sent: the digest of the stage before.

    Raises:
        ConfigError: they differ.
    """
    own = digest(stage.entered)
    places = [
        keystr(path)
        for path, leaf in tree_flatten_with_path(stage.entered)[0]
        if isinstance(leaf, torch.Tensor | float | int)
    ]
    values = _compared(tree_leaves(stage.entered))
    block = stage.plan.blocks(stage.index)[0]
    same = own[0] == sent[0] and len(own) == len(sent)
    apart = "arguments of another structure"
    for number, place in enumerate(places[:NUM_COMPARED] if same else []):
        pairs = zip(own[1 + 2 * number :][:2], sent[1 + 2 * number :][:2], strict=True)
        # Integers are not rounded.
        bound = TOLERANCE if _tensor(values[number]).is_floating_point() else 0.0
        if not all(a == b or math.isclose(a, b, rel_tol=bound) for a, b in pairs):
            same, apart = False, f"another {place} (of its args, kwargs)"
            break
    if not same:
        raise ConfigError(
            f"mesh: {stage.name} cannot begin before '{block}': beside the hidden state, which is "
            f"sent, that block is given {apart} on this stage than on the one before. So it is "
            f"made from what earlier layers have computed, and pp hands on one tensor. {_REMEDY}"
        )


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _compared(leaves: list[Any]) -> list[Any]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor | float | int)][:NUM_COMPARED]


def _tensor(leaf: Any) -> torch.Tensor:
    values = torch.as_tensor(leaf).detach()
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def _in_blocks(stage: Stage, name: str) -> bool:
    return any(name.startswith(f"{block}.") for block in stage.plan.chain)


def _copy(received: torch.Tensor | None) -> torch.Tensor | None:
    """A copy that a block may change in place."""
    return None if received is None else received.detach().clone()


def _run(
    stage: Stage,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    received: torch.Tensor | None,
    *,
    in_place: bool = False,
) -> Any:
    try:
        return stage.run(args, kwargs, received)
    except ConfigError:
        raise
    except Exception as error:
        if stage.is_first:
            raise
        # torch 2.13, csrc/autograd/VariableTypeUtils.h, check_inplace.
        if in_place and "leaf Variable that requires grad" in str(error):
            raise ConfigError(
                f"mesh: {stage.name} changes in place what its first block is given (x += …), "
                "which is where the gradients of a stage end, and autograd takes no such change "
                "there. Write x = x + … in the block."
            ) from error
        raise ConfigError(
            f"mesh: {stage.name} of the model cannot run by itself: with the other stages' layers "
            f"passed by it raises {type(error).__name__} ({error}). {_REMEDY}"
        ) from error


class _Weights:
    """Says whether weights have been changed, which some do behind autograd's back."""

    def __init__(self, stage: Stage) -> None:
        self._weights = [local_part(weight) for weight in stage.module.parameters()]
        self._before = self._now()

    def changed(self) -> bool:
        return self._now() != self._before

    def _now(self) -> list[tuple[int, str]]:
        # As text, in which what is not a number is equal to itself.
        return [(one._version, repr(one.detach().sum().item())) for one in self._weights]


class _Again:
    """Lets a stage run again, with the same buffers.

    Its own blocks, and what comes after them, draw the same random numbers again. What comes before
    them on a stage that is not the first draws others, as it does on each stage of the pipeline.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._buffers = [buffer.clone() for buffer in stage.module.buffers()]
        self._begin = self._numbers()
        self._entry: Any = None

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Surrounds the first pass."""

        def note() -> None:
            self._entry = self._numbers()

        with self._entering(note):
            yield
        if not self._stage.is_first:
            self._begin = self._numbers()

    @contextlib.contextmanager
    def repeating(self) -> Iterator[None]:
        """Surrounds each one that is to be the same."""
        for buffer, value in zip(self._stage.module.buffers(), self._buffers, strict=True):
            # A backward pass to come takes no change of these, which is none in the end.
            buffer.data.copy_(value)
        self._put(self._begin)
        with self._entering(lambda: self._put(self._entry)):
            yield

    def draw_others(self) -> None:
        """Let what comes before the blocks draw other numbers than in the passes until now."""
        self._put(self._begin)
        torch.rand((), device=self._stage.device)
        self._begin = self._numbers()

    @contextlib.contextmanager
    def _entering(self, call: Callable[[], None]) -> Iterator[None]:
        self._stage.at_entry = call
        try:
            yield
        finally:
            self._stage.at_entry = None

    def _numbers(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        device = self._stage.device
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return torch.get_rng_state(), cuda

    def _put(self, numbers: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        torch.set_rng_state(numbers[0])
        if numbers[1] is not None:
            torch.cuda.set_rng_state(numbers[1], self._stage.device)


@contextlib.contextmanager
def _ends(stage: Stage) -> Iterator[None]:
    """Note where the graph of what the last block gives begins."""

    def note(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        tensors = [one for one in _numbers_in(output) if isinstance(one, torch.Tensor)]
        given = getattr(hidden_of(args, kwargs), "shape", None)
        # Beside it there may be weights of attention, and costs.
        alike = [one for one in tensors if one.shape == given] or tensors
        if not alike or not alike[0].requires_grad:
            return None
        hidden, copy = alike[0], alike[0].clone()
        # What the block itself makes of it beside it is none of the copy's.
        output = tree_map(lambda leaf: copy if leaf is hidden else leaf, output)
        handed_on = any(leaf is copy for leaf in tree_leaves(output))
        stage.ends = (get_gradient_edge(copy if handed_on else hidden).node,)
        return output

    if not (stage.is_last and torch.is_grad_enabled()):
        yield
        return
    block = stage.module.get_submodule(stage.plan.chain[-1])
    handle = block.register_forward_hook(note, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _numbers_in(data: Any, seen: set[int] | None = None) -> list[Any]:
    """Tensors and numbers in what a model gives, objects of any class included."""
    # What an object keeps besides (locks, streams) is its own affair.
    whole = seen is None
    seen, found = set() if seen is None else seen, []
    for leaf in tree_leaves(data):
        if isinstance(leaf, torch.Tensor | float | int):
            found.append(leaf)
        elif isinstance(leaf, _WITHOUT_NUMBERS) or id(leaf) in seen:
            continue
        elif hasattr(leaf, "__dict__"):
            seen.add(id(leaf))
            found += _numbers_in(vars(leaf), seen)
        elif whole:
            raise ConfigError(
                f"mesh: the model gives a {type(leaf).__name__}, and pp cannot see whether each "
                "stage computes the numbers in it by itself. Have it give tensors, or lists, "
                "mappings or dataclasses of them."
            )
    return found


def _differ(one: Any, other: Any) -> bool:
    ones, others = _numbers_in(one), _numbers_in(other)
    pairs = zip(ones, others, strict=False)
    return len(ones) != len(others) or any(a is not b and _apart(a, b) for a, b in pairs)


def _apart(one: Any, other: Any) -> bool:
    one, other = _tensor(one).double(), _tensor(other).double()
    if one.shape != other.shape:
        return True
    largest = other[other.isfinite()].abs().amax() if other.isfinite().any() else 1.0
    return not torch.allclose(
        one, other, rtol=TOLERANCE, atol=TOLERANCE * float(largest), equal_nan=True
    )


def _culprits(
    stage: Stage,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    received: torch.Tensor | None,
    output: Any,
    again: _Again,
) -> str:
    """Say which of the missing tensors the stage depends on."""

    def run(missing: str | None = None, given: float = 0.5) -> Any:
        with torch.no_grad(), again.repeating(), stage.standing_in(0.5, given):
            if missing is not None:
                stage.stand_ins[missing].fill_(math.nan)
            return stage.run(args, kwargs, _copy(received))

    expected = run()
    changing = (
        f"mesh: {stage.name} gives something else when it is run again on the same micro-batch, "
        "with the same weights, buffers and random numbers of torch. So the model's forward counts "
        "its calls or keeps something of the last one in an attribute that is no buffer, or draws "
        "random numbers of Python's or NumPy's. pp runs each stage several times on its first "
        "micro-batch. Keep in a buffer what changes from pass to pass (register_buffer), and draw "
        "with torch, or use dp_shard, which divides any model."
    )
    if _differ(run(), expected):
        return changing
    if not _differ(output, expected):
        if stage.is_first:
            return changing
        again.draw_others()
        if not _differ(run(), expected):
            return changing
        return (
            f"mesh: {stage.name} depends on random numbers that the model's forward draws before "
            "its blocks (noise, a mask), and each stage of a pipeline draws others. Draw them in "
            "the dataset, or use dp_shard, which divides any model."
        )
    if _differ(run(given=math.nan), expected):
        return (
            f"mesh: the cut ({stage.plan.source}) changes what the model computes: {stage.name} "
            "needs what blocks of earlier stages give, other than by the hidden state that its "
            "first block is given. Where the model's forward adds to it between the blocks "
            "(x = x + block(x)), do that in the block's own forward. Or use dp_shard, which "
            "divides any model."
        )
    named = [
        name for name, one in stage.stand_ins.items() if one.is_floating_point() or one.is_complex()
    ]
    found = [name for name in named if _differ(run(name), expected)]
    what = first_few(found) if found else "tensors"
    return (
        f"mesh: the cut ({stage.plan.source}) changes what the model computes: {stage.name} needs "
        f"{what}, which other stages have. {_REMEDY}"
    )
