"""A model held against itself before it trains: whole sequences, and their parts on several ranks.

On a few samples and positions, in fp32, without dropout and gradients: what attention gives, the
outputs of the model's blocks and of what stands beside them, and the loss; then the loss alone,
where parts have unequal numbers of labels, and of one longer sample, for some models do otherwise
with more positions. Parameters that begin at nothing have other values meanwhile, for behind them
nothing is seen. Later micro-batches, ever more rarely, are compared by their loss, as they are:
what depends on rare tokens shows in those that have some.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils import _pytree

from unipar.data import move_to
from unipar.data.randomness import OwnRandomness
from unipar.engine import PrecisionPolicy, repeated_blocks
from unipar.engine.losses import check_loss_of_rank
from unipar.engine.trials import ATTENTION, trial
from unipar.errors import ConfigError
from unipar.loss import IGNORE_INDEX, LossFn, LossSum
from unipar.objective import Objective
from unipar.state import local_part
from unipar.utils.torch_versions import exact_products, precisions_kept, sharded_groups
from unipar.world import World
from unipar_torch.layer_checks import visible
from unipar_torch.sequence_parts import (
    MASK,
    BatchParts,
    Parts,
    is_integer,
    map_named,
    named_tensors,
)
from unipar_torch.sharding import reshard

_SAMPLES, _POSITIONS = 2, 8
"""How many samples are compared, and positions for each rank."""
MOST_POSITIONS = 2048
"""The most positions of the one longer sample."""
_COUNT_TOLERANCE = 1e-6
"""Counts may be sums of weights of positions, in fp32."""
_TOLERANCES = {True: (1e-4, 1e-5), False: (3e-2, 2e-3)}
"""The largest differences that are rounding in fp32, and in less: of a tensor, relative to its
largest element, and of the loss of an item, relative to it or to 1."""
_LATER_TOLERANCE = 3e-3
"""That of the loss in later micro-batches, which may have few labels and large weights."""

Attending = Callable[[int], AbstractContextManager[None]]


class _Seen(NamedTuple):
    """The tensors of one call."""

    name: str
    kind: str
    tensors: list[torch.Tensor]


_NOTHING = _Seen("", "", [])


def _numbered(calls: list[_Seen]) -> dict[tuple[tuple[str, str], int], _Seen]:
    """Calls by what was called, and how often it had been."""
    found: dict[tuple[tuple[str, str], int], _Seen] = {}
    times: dict[tuple[str, str], int] = {}
    for call in calls:
        what = call.name, call.kind
        times[what] = times.get(what, 0) + 1
        found[what, times[what]] = call
    return found


@dataclass(frozen=True)
class _Run:
    calls: list[_Seen]
    total: float
    count: float


def compare(
    model: nn.Module,
    data: Any,
    loss_fn: LossFn,
    batches: BatchParts,
    attending: Attending,
    precision: PrecisionPolicy,
    world: World,
    group: dist.ProcessGroup,
    *,
    only_length: bool = False,
) -> bool:
    """Compare a model on a piece of a micro-batch with its parts on ``cp`` ranks. Collective.

    Args:
        model: as a loss function is given it, in the mode in which it is to run.
        data: the micro-batch's, whole.
        loss_fn: the user's.
        batches: divides it.
        attending: has attention see all ranks.
        precision: surrounds forward passes; fp32, unless the run's cannot be left.
        world: the joined processes.
        group: the ranks along ``cp``.
        only_length: whether shorter sequences have been compared, and only these are new.

    Returns:
        Whether the loss of any rank counted something, and that where chunks meet; otherwise it is
        to be asked again.

    Raises:
        ConfigError: they differ, on any rank.
    """
    check = _Check(model, loss_fn, batches, attending, precision, world, group)
    length, dims = batches.dims_of(data)
    short = _POSITIONS * group.size()
    found = world.gather((length, _has_ignored(data, dims)))
    long = min(max(length for length, _ in found), MOST_POSITIONS)
    # Outputs of more positions take memory.
    tries = [] if only_length else [_Try(short, _SAMPLES, outputs=True)]
    if not only_length and any(ignored for _, ignored in found):
        tries.append(_Try(short, _SAMPLES, uneven=True))
    tries += [_Try(long, 1)] if only_length or long > short else []
    decided = False
    with _in_fp32(model, precision), exact_products(), _visible_parameters(model):
        for one in tries:
            piece = _piece(data, min(length, one.positions), dims, one.samples)
            labeled = _meet_labels(piece, batches)
            if one.uneven:
                piece = _without_some(piece, data, batches)
            problem, counted = check.run(piece, outputs=one.outputs, uneven=one.uneven)
            # Where parts meet has been looked at when only the length is new.
            counted = counted and (only_length or labeled)
            at_length = "" if one.outputs or one.uneven else ", where shorter sequences agree"
            decided |= _agreed(problem, counted, world, group, f"{one}{at_length}")
    return decided


def compare_again(
    model: nn.Module,
    data: Any,
    loss_fn: LossFn,
    batches: BatchParts,
    attending: Attending,
    precision: PrecisionPolicy,
    world: World,
    group: dist.ProcessGroup,
    *,
    number: int,
) -> None:
    """Compare the loss of a later micro-batch, with its own labels and the weights of now.

    It takes no more positions than this rank's part has, so less memory than the pass to come. For
    arguments, see :func:`compare`. Collective.

    Args:
        number: of the micro-batch, for the message.

    Raises:
        ConfigError: they differ, on any rank.
    """
    length, dims = batches.dims_of(data)
    name, dim = next(iter(dims.items()))
    tensor = named_tensors(data)[name]
    samples = tensor.shape[0] if dim % tensor.ndim else 1
    most = min(samples * batches.parts_of(length).longest, MOST_POSITIONS)
    most = max(most, _POSITIONS * group.size())
    one = _Try(min(length, most), max(1, min(samples, most // length)))
    piece = _piece(data, one.positions, dims, one.samples, as_it_is=True)
    check = _Check(model, loss_fn, batches, attending, precision, world, group)
    check.loss_tolerance = _LATER_TOLERANCE
    with _in_fp32(model, precision), exact_products():
        problem, counted = check.run(piece, outputs=False)
    where = f"{one} of micro-batch {number}, where the first one agrees"
    _agreed(problem, counted, world, group, where)


@dataclass(frozen=True)
class _Try:
    """A piece to compare.

    Attributes:
        positions: the most of each sample.
        samples: how many.
        outputs: whether to compare what modules and attention give, and not only the loss.
        uneven: whether to take labels away from one rank's part.
    """

    positions: int
    samples: int
    outputs: bool = False
    uneven: bool = False

    def __str__(self) -> str:
        plural = "s" if self.samples > 1 else ""
        return f"{self.samples} sample{plural} of at most {self.positions} positions"


def _agreed(
    problem: str, counted: bool, world: World, group: dist.ProcessGroup, where: str
) -> bool:
    """Raise on all ranks what one has found, or return whether any rank's loss counted."""
    found = world.gather((problem, counted))
    if said := next((said for said, _ in found if said), ""):
        raise ConfigError(
            f"mesh: cp={group.size()} divides each sequence among {group.size()} ranks, and that "
            f"changes what the model computes: {said}. Tried on {where}."
        )
    return any(counted for _, counted in found)


def _has_ignored(data: Any, dims: dict[str, int]) -> bool:
    return any(_ignores(name, tensor, dims) for name, tensor in named_tensors(data).items())


def _ignores(name: str, tensor: torch.Tensor, dims: dict[str, int]) -> bool:
    return name in dims and is_integer(tensor) and bool((tensor == IGNORE_INDEX).any())


def _without_some(piece: Any, data: Any, batches: BatchParts) -> Any:
    """Leave the first rank along ``cp`` one label a sample, where a batch may lack labels at all.

    A mean over positions, times the number of labels, then differs between whole and parts.
    """
    length, dims = batches.dims_of(piece)
    chunks = batches.parts_of(length).chunks(0)
    places = torch.cat([torch.arange(at, at + size) for at, size in chunks])[1:]
    tensors = named_tensors(data)

    def without(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name not in tensors or not _ignores(name, tensors[name], dims):
            return tensor
        return tensor.index_fill(dims[name], places.to(tensor.device), IGNORE_INDEX)

    return map_named(piece, without)


def _piece(
    data: Any, length: int, dims: dict[str, int], samples: int, *, as_it_is: bool = False
) -> Any:
    """The first samples, and their first positions, with labels where these have none.

    A prompt without labels would hide what a loss does where chunks meet.
    """
    tensors = named_tensors(data)
    rows = {tensors[name].shape[0] for name, dim in dims.items() if dim % tensors[name].ndim}

    def cut(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name in dims:
            tensor = tensor.narrow(dims[name], 0, length)
        of_samples = name not in dims or dims[name] % tensor.ndim
        if len(rows) == 1 and tensor.ndim and tensor.shape[0] in rows and of_samples:
            tensor = tensor[:samples]
        # As a loader gives it; losses take views of labels, and may change what they are given.
        return tensor.clone(memory_format=torch.contiguous_format)

    piece = map_named(data, cut)
    if as_it_is:
        return piece
    padding = _padding(piece)

    def label(name: str, tensor: torch.Tensor) -> torch.Tensor:
        # Elsewhere each place of a last dimension may have numbers of its own.
        if name not in dims or tensor.ndim != 2 or not is_integer(tensor):
            return tensor
        missing = tensor == IGNORE_INDEX
        if padding is not None and padding.shape == missing.shape:
            # Without a mask its outputs are others.
            missing &= ~padding
        found = tensors[name][tensors[name] != IGNORE_INDEX]
        if not found.numel() or not bool(missing.any()):
            return tensor
        count = int(missing.sum())
        # Different ones, so that a label at another place shows.
        return tensor.masked_scatter(missing, found.repeat(-(-count // found.numel()))[:count])

    return map_named(piece, label)


def _meet_labels(piece: Any, batches: BatchParts) -> bool:
    """Whether labels stand wherever a chunk begins, so that a shift between chunks is seen."""
    length, dims = batches.dims_of(piece)
    parts = batches.parts_of(length)
    starts = [at for rank in range(parts.size) for at, _ in parts.chunks(rank)]
    for name, tensor in named_tensors(piece).items():
        if name in dims and is_integer(tensor) and bool((tensor == IGNORE_INDEX).any()):
            first = (tensor != IGNORE_INDEX).movedim(dims[name], 0)[starts]
            if not bool(first.flatten(1).any(1).all()):
                return False
    return True


def _padding(piece: Any) -> torch.Tensor | None:
    """Which positions are padding, of shape (batch, positions), if the batch says so."""
    for name, tensor in named_tensors(piece).items():
        if name.rpartition(".")[2] == MASK and tensor.ndim == 2:
            return tensor == 0
    return None


class _Check:
    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        batches: BatchParts,
        attending: Attending,
        precision: PrecisionPolicy,
        world: World,
        group: dist.ProcessGroup,
    ) -> None:
        self._model, self._loss_fn, self._batches = model, loss_fn, batches
        self._attending, self._precision = attending, precision
        self._world, self._group = world, group
        self._names = {module: name for name, module in model.named_modules()}
        self._exact = precision.dtype is torch.float32
        self._tolerance, self.loss_tolerance = _TOLERANCES[self._exact]
        self._padding: torch.Tensor | None = None

    def run(self, piece: Any, *, outputs: bool, uneven: bool = False) -> tuple[str, bool]:
        """What differs, and whether the loss counted anything.

        Args:
            piece: of a micro-batch.
            outputs: whether to compare what modules and attention give, and not only the loss.
            uneven: whether parts have unequal numbers of labels.
        """
        length, _ = self._batches.dims_of(piece)
        parts = self._batches.parts_of(length)
        self._padding = _padding(piece)
        blocks = repeated_blocks(self._model)
        inside = {part for block in blocks for part in block.modules()}
        outer = [m for m in self._model.modules() if m not in inside] + blocks
        if outputs and self._world.layout.tp > 1:
            # The first pass runs blocks more often, to compare divided layers with whole ones.
            self._both(piece, parts, [])
        whole, divided = self._both(piece, parts, outer if outputs else [])
        said = self._difference(whole, divided, parts)
        of_loss = self._loss_difference(whole, divided, uneven=uneven)
        if any(self._world.gather(bool(said or (of_loss and not outputs)))):
            # Of the modules within a block another may be the first.
            again = self._both(piece, parts, list(self._model.modules()))
            said = self._difference(*again, parts) or said
        return said or of_loss, whole.count > 0 and math.isfinite(whole.total)

    def _both(self, piece: Any, parts: Parts, watched: list[nn.Module]) -> tuple[_Run, _Run]:
        length, dims = self._batches.dims_of(piece)
        part = self._batches.divided(piece, length, dims)
        device = self._world.device
        with torch.no_grad():
            # Each pass draws the same numbers on a CPU.
            with OwnRandomness(0), trial(self._model, device):
                whole = self._seen(piece, watched)
            with OwnRandomness(0), trial(self._model, device), self._attending(length):
                divided = self._seen(part, watched)
        return whole, divided

    def _seen(self, data: Any, watched: list[nn.Module]) -> _Run:
        """Run the model, and keep what modules and attention give."""
        calls: list[_Seen] = []

        def note(module: nn.Module, _: Any, output: Any) -> None:
            name, kind = self._names[module], type(module).__name__
            calls.append(_Seen(name, kind, _floats(output)))

        handles = [module.register_forward_hook(note) for module in watched]
        attention = functional.scaled_dot_product_attention

        def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
            out = attention(*args, **kwargs)
            if watched:
                calls.append(_Seen("", ATTENTION, [out]))
            return out

        functional.scaled_dot_product_attention = noted
        try:
            loss_fn = self._loss_fn
            if isinstance(loss_fn, Objective):
                loss_fn = loss_fn.counted(data)
            with self._precision.forward():
                loss = loss_fn(self._model, move_to(data, self._world.device))
        except RuntimeError as error:
            if self._exact and any(word in str(error) for word in ("dtype", "scalar type")):
                raise ConfigError(
                    "mesh: cp compares the model with itself in fp32, without autocast, and there "
                    f"it raises: {str(error)[:200]}. Have the model cast to the dtype of its "
                    "weights (x.to(layer.weight.dtype)), not to one that is written down, or leave "
                    "cp out."
                ) from error
            if "does not require grad" not in str(error):
                raise
            raise ConfigError(
                "mesh: cp divides each sequence, and the loss function takes a gradient of its own "
                "(torch.autograd.grad), which reaches the positions of other ranks. Compute the "
                "loss without it, or leave cp out."
            ) from error
        finally:
            functional.scaled_dot_product_attention = attention
            for handle in handles:
                handle.remove()
        check_loss_of_rank(loss, self._world, training=False)
        assert isinstance(loss, LossSum)
        return _Run(calls, float(loss.total), float(loss.count))

    def _difference(self, whole: _Run, divided: _Run, parts: Parts) -> str:
        """What differs first."""
        found = _numbered(divided.calls)
        attends = [sum(call.kind == ATTENTION for call in run.calls) for run in (whole, divided)]
        if attends[0] != attends[1]:
            return (
                f"{ATTENTION} is called {attends[0]} times for whole sequences, and {attends[1]} "
                "times for a part"
            )
        for (call, number), expected in _numbered(whole.calls).items():
            # Where it is given positions a model may call modules that it does not call otherwise.
            pairs = zip(expected.tensors, found.get((call, number), _NOTHING).tensors, strict=False)
            apart = max((self._apart(a, b, parts) for a, b in pairs), default=0.0)
            if apart <= self._tolerance:
                continue
            if expected.kind == ATTENTION:
                return _said_of_attention(number, apart)
            return _said_of_module(expected, apart)
        return ""

    def _apart(self, whole: torch.Tensor, divided: torch.Tensor, parts: Parts) -> float:
        """How far a part is from that of the whole; 0 of what has no sequence."""
        if whole.ndim != divided.ndim:
            return 0.0
        differ = [d for d in range(whole.ndim) if whole.shape[d] != divided.shape[d]]
        if [(whole.shape[d], divided.shape[d]) for d in differ] != [
            (parts.length, parts.own_length)
        ]:
            return 0.0
        expected = parts.own(whole, differ[0])
        if not expected.numel() or not bool(torch.isfinite(expected).all()):
            # What is no number shows nothing, and is the run's to find.
            return 0.0
        scale = expected.abs().max().clamp(min=1e-30)
        apart = (divided - expected).abs()
        if self._padding is not None and len(self._padding) == len(whole):
            # It may see anything; the loss tells whether it counts.
            hidden = parts.own(self._padding, 1).to(apart.device)
            shape = [len(hidden), *[1] * (whole.ndim - 1)]
            shape[differ[0]] = parts.own_length
            apart = apart.masked_fill(hidden.view(shape), 0.0)
        return float(apart.max() / scale)

    def _loss_difference(self, whole: _Run, divided: _Run, *, uneven: bool) -> str:
        """How the losses of the parts together differ from the whole's. Collective."""
        sums = torch.tensor(
            [divided.total, divided.count], dtype=torch.float64, device=self._world.device
        )
        dist.all_reduce(sums, group=self._group)
        total, count = sums.tolist()
        if abs(count - whole.count) > _COUNT_TOLERANCE * abs(whole.count):
            return (
                f"the loss function counts {whole.count:g} items in whole sequences, and {count:g} "
                "in their parts together. It has to count each position by itself: give labels "
                "that are shifted in the data set, not in the loss function, and no item that "
                "belongs to a sequence as a whole"
            )
        rounding = self.loss_tolerance * max(abs(whole.total), count)
        # What is no number shows nothing, and is the run's to find.
        if not math.isfinite(whole.total) or abs(total - whole.total) <= rounding:
            return ""
        items = (
            f"{whole.total / (count or 1):.6g} an item in whole sequences, and "
            f"{total / (count or 1):.6g} in their parts"
        )
        if uneven:
            return (
                f"the loss is another where parts have unequal numbers of labels: {items}. A mean "
                "over positions times the number of labels, say, weighs each part's mean by the "
                "labels of this part. Sum such a term over the positions that have a label: "
                "(values * (labels != -100)).sum()"
            )
        return (
            f"the outputs agree, and the loss does not: {items}. It has to be a sum over positions "
            "(unipar.LossSum), each of its own output and label: shift labels in the data set, and "
            "leave out what is computed over all positions at once"
        )


@contextlib.contextmanager
def _visible_parameters(model: nn.Module) -> Iterator[None]:
    """Give values to shards of parameters that have none to speak of."""
    kept: list[tuple[nn.Parameter, torch.Tensor]] = []
    reshard(model)
    try:
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                own = local_part(parameter)
                if not own.is_floating_point():
                    continue
                value = visible(own, number + 1000 * _place(parameter))
                if value is not own:
                    kept.append((parameter, own.clone()))
                    own.copy_(value)
        yield
    finally:
        with torch.no_grad():
            for parameter, saved in kept:
                # Not the tensor of before: FSDP may take another in its first pass.
                local_part(parameter).copy_(saved)
        # What was gathered is not to be used again.
        reshard(model)


def _place(parameter: Any) -> int:
    """Which of the shards of a parameter this rank has: equal ones would hide their order.

    Ranks along ``tp`` have equal numbers, for what is whole on them is to stay equal.
    """
    if not isinstance(parameter, DTensor):
        return 0
    mesh, place = parameter.device_mesh, 0
    coordinates, names = mesh.get_coordinate() or [], mesh.mesh_dim_names or ()
    for coordinate, name, size in zip(coordinates, names, mesh.shape, strict=True):
        if name != "tp":
            place = place * size + coordinate
    return place


@contextlib.contextmanager
def _in_fp32(model: nn.Module, precision: PrecisionPolicy) -> Iterator[None]:
    """Have FSDP gather in fp32, for half precision hides small differences.

    It has no way to change that (torch 2.13, distributed/fsdp/_fully_shard: _fsdp_param_group.py,
    ``_init_mp_dtypes``; _fsdp_param.py, ``init_unsharded_param``, which keeps what it once made).
    """
    kept: list[tuple[Any, str, Any]] = []
    changed: list[Any] = []
    gathered: list[tuple[Any, dict[str, Any]]] = []
    reshard(model)
    names = ("_unsharded_param", "all_gather_outputs")
    try:
        for module in model.modules():
            if not isinstance(module, FSDPModule) or precision.dtype is not torch.float32:
                continue
            state: Any = module._get_fsdp_state()
            if state._mp_policy.param_dtype in (None, torch.float32):
                continue
            for part, name in precisions_kept(module):
                policy = getattr(part, name)
                kept.append((part, name, policy))
                setattr(part, name, replace(policy, param_dtype=torch.float32))
            for group in sharded_groups(module):
                changed.append(group)
                group._init_mp_dtypes()
                for one in group.fsdp_params:
                    before = {key: vars(one).pop(key) for key in names if key in vars(one)}
                    gathered.append((one, before))
                    one.all_gather_outputs = []
        yield
    finally:
        reshard(model)
        for one, before in gathered:
            for key in names:
                one.__dict__.pop(key, None)
            one.__dict__.update(before)
        for part, name, policy in kept:
            setattr(part, name, policy)
        for group in changed:
            group._init_mp_dtypes()


def _said_of_attention(number: int, apart: float) -> str:
    return (
        f"call {number} of {ATTENTION} gives what is {apart:.1%} off, so its queries and keys are "
        "those of other positions. A model that numbers positions itself takes them as "
        "position_ids, of shape (1, positions), an argument of its forward that it is given here, "
        "or that the batch has"
    )


def _said_of_module(seen: _Seen, apart: float) -> str:
    return (
        f"the output of '{seen.name or 'the model'}' ({seen.kind}) is {apart:.1%} off. It mixes "
        "positions otherwise than by torch.nn.functional.scaled_dot_product_attention (attention "
        "of its own, a convolution, a cumulative sum, statistics over positions), or numbers them "
        "itself. Use that function (nn.MultiheadAttention does with need_weights=False), and take "
        "position_ids, of shape (1, positions), as an argument of the model's forward"
    )


def _floats(output: Any) -> list[torch.Tensor]:
    # Not public in torch 2.13 (torch/utils/_pytree.py); transformers has its outputs known there.
    leaves = _pytree.tree_leaves(output)
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()]
