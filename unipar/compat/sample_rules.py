"""What operations do to the samples of a batch, by the dimension along which these lie.

Names of operations are those of torch 2.13, aten/src/ATen/native/native_functions.yaml. One that
is not known here is told of, and not taken for harmless.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from unipar.compat import reading
from unipar.engine.outputs import tensors_of


class Samples(NamedTuple):
    """Lies in samples, each computed by itself.

    Attributes:
        dim: the dimension along which they lie.
        sets: how far along it each batch reaches, of those that were set one after the other.
    """

    dim: int
    sets: tuple[int, ...]


class Reduced(NamedTuple):
    """Is a sum or a mean over samples, or what is linear in several."""

    kind: str


class Coupled(NamedTuple):
    """Sets samples of a part in relation, or may do so.

    Attributes:
        how: the operation, and the line that calls it.
        known: whether it is known to.
    """

    how: str
    known: bool


class Some(NamedTuple):
    """Is computed of one sample, or is a sum of what is computed of some, each by itself.

    Attributes:
        places: theirs in the batch.
        size: how many there are.
        how: as of ``Coupled``.
    """

    places: frozenset[int]
    size: int
    how: str


class Drawn(NamedTuple):
    """Is drawn at random, of which a script is told in other ways, or tells where samples lie."""

    kind: str = "random"


Flow = Samples | Reduced | Coupled | Some | Drawn


class NotTold(Exception):
    """An operation is not known to keep samples apart, or is known not to."""

    def __init__(self, known: bool = False) -> None:
        self.known = known


_FORGET = ("like", "new_empty", "new_zeros", "new_ones", "new_full", "empty", "zero")
"""Operations of which only the shape, or nothing, of what they are given counts."""
_SAME = {
    *("clone", "detach", "_to_copy", "to", "lift_fresh", "copy", "native_dropout", "tril"),
    *("contiguous", "masked_fill", "fill", "floor_divide", "bernoulli", "glu", "triu", "where"),
    *("_pin_memory", "_conj", "resolve_conj", "resolve_neg", "requires_grad", "hardswish"),
    *("log_sigmoid_forward", "rrelu_with_noise", "normal", "poisson", "multinomial", "binomial"),
    *("_standard_gamma", "_sample_dirichlet", "_prelu_kernel"),
}
"""These keep shapes but for dimensions that samples do not lie along."""
_LINEAR = {
    *("add", "sub", "rsub", "neg", "mul", "div", "clone", "detach", "_to_copy", "to"),
    *("view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "stack", "cat", "sum", "mean"),
    *("select", "slice", "expand", "copy", "lift_fresh", "clamp", "clamp_min", "permute", "t"),
    *("unbind", "index", "transpose", "maximum", "true_divide", "dot", "mv", "mm"),
}
"""Of sums and means these make such again; what clamps keeps a count from being 0."""
_TOTALS = {"sum", "nansum", "mean", "count_nonzero", "bincount", "histc"}
_OVER_DIMS = {
    *_TOTALS,
    *("amax", "amin", "max", "min", "argmax", "argmin", "var", "std", "var_mean", "std_mean"),
    *("logsumexp", "norm", "linalg_vector_norm", "prod", "any", "all", "median", "nanmedian"),
    *("mode", "kthvalue", "aminmax"),
}
_ALONG_DIM = {
    *("_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax", "cumsum", "cumprod"),
    *("sort", "argsort", "flip", "roll", "cummax", "cummin", "topk", "diff", "unfold", "rot90"),
    *("_fft_r2c", "_fft_c2c", "_fft_c2r", "renorm", "_weight_norm_interface", "logcumsumexp"),
    *("unfold_backward",),
}
_LOOKED_UP = {"isin": "elements", "bucketize": "self", "searchsorted": "self"}
"""Each element of this argument is looked up by itself in others."""
_LOSSES = {
    *("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss"),
    *("multi_margin_loss", "multilabel_margin_loss_forward", "nll_loss_forward", "l1_loss"),
    *("nll_loss2d_forward", "binary_cross_entropy_with_logits", "kl_div"),
}
_FIRST = (
    *("convolution", "native_layer_norm", "native_group_norm", "max_pool", "avg_pool", "_adaptive"),
    *("upsample", "_upsample", "grid_sampler", "im2col", "col2im", "pixel_", "reflection_pad"),
    *("replication_pad", "_fused_rms_norm", "_scaled_dot_product", "adaptive", "mkldnn_linear"),
    *("mkldnn_convolution", "channel_shuffle", "rms_norm", "affine_grid", "linalg_", "_linalg_"),
)  # fmt: skip
"""Each sample along the first dimension by itself."""

_OPEN = (None, sys.maxsize)
"""Ends of slices that a script leaves out."""


class Call:
    """One operation on tensors of which some lie in samples."""

    def __init__(
        self, func: Any, args: Any, kwargs: Any, made: list[torch.Tensor], given: dict[int, Flow]
    ) -> None:
        # torch 2.13, torch/_ops.py.
        schema = func._schema
        name, self.mutates = schema.name.partition("::")[2], schema.is_mutable
        self.name = name[:-1] if name.endswith("_") and not name.endswith("__") else name
        named = [one.name for one in schema.arguments]
        self.bound: dict[str, Any] = {
            **{one.name: one.default_value for one in schema.arguments},
            **dict(zip(named, args, strict=False)),
            **kwargs,
        }
        self.pointwise = torch.Tag.pointwise in func.tags
        self.seeded = torch.Tag.nondeterministic_seeded in func.tags
        self.made = made
        self._given = {one: flow for one, flow in given.items() if not isinstance(flow, Drawn)}
        self._drawn = given.keys() - self._given.keys()
        self.inputs = list(tensors_of((args, kwargs)))

    def told(self) -> str:
        """Its name, and the line that calls it."""
        line = reading.line(through_torch=True)
        return f"{self.name} in {line}" if line else self.name

    def of(self, tensor: Any) -> Flow | None:
        return self._given.get(id(tensor))

    def flows(self) -> Sequence[Flow | None]:
        """Of each tensor that is made.

        Raises:
            NotTold: samples are set in relation, or the operation is not known.
        """
        flows = self._flows()
        if isinstance(first := flows[0], Samples):
            held = self.made[0].shape[first.dim : first.dim + 1]
            if held and held[0] != sum(first.sets):
                raise NotTold(known=True)
        return flows

    def _flows(self) -> Sequence[Flow | None]:
        if self.name.endswith(_FORGET[0]) or self.name.startswith(_FORGET[1:]):
            return [Drawn() if self.seeded else None] * len(self.made)
        found = list(self._given.values())
        coupled = [flow for flow in found if isinstance(flow, Coupled)]
        if coupled:
            return [max(coupled, key=lambda one: one.known)] * len(self.made)
        if not found:
            return [Drawn()] * len(self.made)
        if any(isinstance(one, Some) for one in found):
            return [self._of_some()] * len(self.made)
        if not any(isinstance(one, Samples) for one in found):
            return [self._of_reduced()] * len(self.made)
        if self.pointwise or self.name in _SAME:
            return [self._elementwise(self.made[0].dim())] * len(self.made)
        special: Any = getattr(self, f"_do_{self.name}", None)
        if special is not None:
            return special()
        if self.name in _OVER_DIMS:
            return [self._over_dims()] * len(self.made)
        if self.name in _ALONG_DIM:
            return [self._along_dim()] * len(self.made)
        if (
            self.name in _LOOKED_UP
            and len(found) == 1
            and self.of(self.bound[_LOOKED_UP[self.name]])
        ):
            return found
        if self.name in _LOSSES:
            return self._loss()
        if self.name.startswith(_FIRST) or "batch_norm" in self.name:
            return [self._first()] * len(self.made)
        raise NotTold

    # -- by elements ---------------------------------------------------------------------------

    def _of_reduced(self) -> Flow:
        kinds = {one.kind for one in self._given.values() if isinstance(one, Reduced)}
        divisor = self.of(self.bound.get("other")) if self.name.endswith("div") else None
        by_mean = isinstance(divisor, Reduced) and divisor.kind == "mean"
        several = sum(isinstance(one, Reduced) for one in map(self.of, self.inputs)) > 1
        product = self.name in ("mul", "dot", "mv", "mm")
        if self.name not in _LINEAR or by_mean or (product and several):
            raise NotTold(known=True)
        if self.name == "mean" and kinds == {"sum"}:
            return Reduced("sum")
        if divisor is not None:
            return Reduced("mean")
        return Reduced("mean" if "mean" in kinds else "sum")

    def _of_some(self) -> Flow:
        """Samples one by one, until all are put together."""
        flows = [flow for one in self.inputs if (flow := self.of(one)) is not None]
        some = [one for one in flows if isinstance(one, Some)]
        first, places = some[0], [place for one in some for place in one.places]
        if len(some) == len(flows) and all(one.places == first.places for one in some):
            # Of one sample, all may be computed; sums of several stay such.
            product = self.name in ("mul", "div") and len(some) > 1
            if len(first.places) == 1 or (self.name in _LINEAR and not product):
                return first
        joined = self.name in ("stack", "cat") and len(some) == len(self.inputs)
        if joined and places == list(range(first.size)):
            dim = self.bound.get("dim", 0) % self.made[0].dim()
            return Samples(dim, (self.made[0].shape[dim],))
        whole = any(isinstance(one, Samples) for one in flows)
        if self.name in ("add", "sub") and not whole and len(set(places)) == len(places):
            if len(places) == first.size:
                return Reduced("sum")
            return first._replace(places=frozenset(places))
        raise NotTold(known=True)

    def _elementwise(self, ndim: int) -> Flow:
        dims: set[int] = set()
        sets: list[tuple[int, ...]] = []
        for tensor in self.inputs:
            flow = self.of(tensor)
            if isinstance(flow, Reduced):
                raise NotTold(known=True)
            if isinstance(flow, Samples):
                dims.add(flow.dim + ndim - tensor.dim())
                sets.append(flow.sets)
        if len(dims) > 1 or len({sum(one) for one in sets}) > 1:
            raise NotTold(known=True)
        return Samples(dims.pop(), max(sets, key=len))

    # -- along dimensions ------------------------------------------------------------------------

    def _self(self) -> tuple[torch.Tensor, Samples]:
        """The first argument, which the others say what to do with."""
        tensor = next(
            (self.bound[n] for n in ("self", "input", "grad_in") if n in self.bound), None
        )
        flow = self.of(tensor)
        if not isinstance(tensor, torch.Tensor) or not isinstance(flow, Samples):
            raise NotTold
        return tensor, flow

    def _dims(self, tensor: torch.Tensor) -> list[int]:
        names = ("dim", "dims", "axis", "dimension")
        given = next((self.bound[one] for one in names if one in self.bound), None)
        if given is None or given == []:
            return list(range(tensor.dim()))
        return [one % tensor.dim() for one in ([given] if isinstance(given, int) else given)]

    def _over_dims(self) -> Flow:
        tensor, flow = self._self()
        dims = self._dims(tensor)
        if flow.dim in dims:
            if self.name not in _TOTALS:
                raise NotTold(known=True)
            return Reduced("mean" if self.name == "mean" else "sum")
        if self.bound.get("keepdim"):
            return flow
        return Samples(flow.dim - sum(one < flow.dim for one in dims), flow.sets)

    def _along_dim(self) -> Flow:
        tensor, flow = self._self()
        if flow.dim in self._dims(tensor):
            raise NotTold(known=True)
        return flow

    def _loss(self) -> Sequence[Flow]:
        if any(self.of(self.bound.get(one)) for one in ("weight", "pos_weight")):
            weight = self.of(self.bound.get("weight"))
            if not isinstance(weight, Samples):
                raise NotTold(known=True)
        reduction = self.bound.get("reduction", 1)
        if self.name.startswith(("nll_loss", "multi_margin")):
            # Targets have no dimension of classes.
            found = self._first()
        else:
            found = self._elementwise(max(one.dim() for one in self.inputs))
        if reduction:
            found = Reduced("mean" if reduction == 1 else "sum")
        return [found] * len(self.made)

    def _first(self) -> Flow:
        trains = self.bound.get("training", self.bound.get("train", False))
        if "batch_norm" in self.name and trains and "no_training" not in self.name:
            tensor, flow = self._self()
            if flow.dim != 1 or len(self._given) > 1:
                raise NotTold(known=True)
            return flow
        if self.name.startswith(("reflection_pad", "replication_pad")):
            tensor, flow = self._self()
            if flow.dim < tensor.dim() - int(self.name[-2]):
                return flow
        flows = [one for one in self._given.values() if isinstance(one, Samples)]
        if "linalg_" in self.name and self.name != "linalg_cross":
            matrices = max(one.dim() for one in self.inputs) - 2
            if any(one.dim >= matrices for one in flows):
                raise NotTold(known=True)
        if any(one.dim for one in flows) or len(flows) < len(self._given):
            raise NotTold
        return flows[0]

    # -- shapes ----------------------------------------------------------------------------------

    def _do_view(self) -> Sequence[Flow]:
        tensor, flow = self._self()
        new, old = self.made[0].shape, tensor.shape
        before, length, sets = math.prod(old[: flow.dim]), old[flow.dim], flow.sets
        outer = 1
        for dim, size in enumerate(new):
            # Where as many elements lie before, the dimension begins; ones may lie between.
            if outer == before and (size > 1 or length == 1):
                if size % length == 0:
                    return [Samples(dim, tuple(one * size // length for one in sets))]
                if length % size == 0:
                    inner = length // size
                    some = sets[: len(sets) // size]
                    if sets == some * size:
                        # As many times the same batches, one after the other.
                        before, length, sets = before * size, inner, some
                        outer *= size
                        continue
                    # Divided in two, of which samples lie along the first.
                    if any(one % inner for one in sets):
                        raise NotTold(known=True)
                    return [Samples(dim, tuple(one // inner for one in sets))]
            if outer * size > before:
                # Put together with dimensions before it, and maybe with some after it.
                times, rest = divmod(before, outer)
                after, more = divmod(size, times * length) if not rest else (0, 1)
                return [
                    Samples(dim, (size,) if more else tuple(one * after for one in sets) * times)
                ]
            outer *= size
        raise NotTold

    _do__unsafe_view = _do_reshape = _do__reshape_alias = _do_view

    def _do_constant_pad_nd(self) -> Sequence[Flow]:
        tensor, flow = self._self()
        if any(self.bound["pad"][2 * (tensor.dim() - 1 - flow.dim) :][:2]):
            raise NotTold(known=True)
        return [flow]

    def _do_unsqueeze(self) -> Sequence[Flow]:
        tensor, flow = self._self()
        dim = self.bound["dim"] % (tensor.dim() + 1)
        return [Samples(flow.dim + (dim <= flow.dim), flow.sets)]

    def _do_squeeze(self) -> Sequence[Flow]:
        tensor, flow = self._self()
        gone = sum(tensor.shape[one] == 1 for one in self._dims(tensor) if one < flow.dim)
        return [Samples(flow.dim - gone, flow.sets)]

    def _do_transpose(self) -> Sequence[Flow]:
        tensor, flow = self._self()
        pair = [self.bound[one] % tensor.dim() for one in ("dim0", "dim1")]
        dim = pair[1 - pair.index(flow.dim)] if flow.dim in pair else flow.dim
        return [Samples(dim, flow.sets)]

    def _do_t(self) -> Sequence[Flow]:
        tensor, flow = self._self()
        return [Samples(tensor.dim() - 1 - flow.dim, flow.sets)]

    def _do_permute(self) -> Sequence[Flow]:
        tensor, flow = self._self()
        return [Samples(self._dims(tensor).index(flow.dim), flow.sets)]

    def _do_expand(self) -> Sequence[Flow]:
        tensor, flow = self._self()
        return [Samples(flow.dim + self.made[0].dim() - tensor.dim(), flow.sets)]

    def _do_as_strided(self) -> Sequence[Flow]:
        tensor, flow = self._self()
        own = (tensor.shape[flow.dim], tensor.stride(flow.dim))
        every = list(zip(self.bound["size"], self.bound["stride"], strict=True))
        if own not in every:
            raise NotTold
        return [Samples(every.index(own), flow.sets)]

    def _do_view_as_real(self) -> Sequence[Flow]:
        return [self._self()[1]]

    _do_view_as_complex = _do_view_as_real

    def _do_repeat(self) -> Sequence[Flow]:
        tensor, flow = self._self()
        dim = flow.dim + self.made[0].dim() - tensor.dim()
        return [Samples(dim, flow.sets * self.bound["repeats"][dim])]

    def _do_select(self) -> Sequence[Flow]:
        tensor, flow = self._self()
        (dim,) = self._dims(tensor)
        if dim == flow.dim:
            return self._one_by_one(self.bound["index"] % tensor.shape[dim])
        return [Samples(flow.dim - (dim < flow.dim), flow.sets)]

    def _do_unbind(self) -> Sequence[Flow]:
        tensor, flow = self._self()
        (dim,) = self._dims(tensor)
        if dim == flow.dim:
            return self._one_by_one(0)
        return [Samples(flow.dim - (dim < flow.dim), flow.sets)] * len(self.made)

    def _one_by_one(self, begin: int) -> Sequence[Flow]:
        tensor, flow = self._self()
        size, told = tensor.shape[flow.dim], self.told()
        return [Some(frozenset([begin + one]), size, told) for one in range(len(self.made))]

    def _do_slice(self) -> Sequence[Flow]:
        tensor, flow = self._self()
        (dim,) = self._dims(tensor)
        if dim != flow.dim:
            return [flow]
        size = tensor.shape[dim]
        begin, end = self.bound.get("start") or 0, self.bound.get("end")
        begin = max(begin + size, 0) if begin < 0 else min(begin, size)
        end = size if end is None else min(end + size if end < 0 else end, size)
        if self.bound.get("step", 1) != 1:
            raise NotTold(known=True)
        if (begin, end) == (0, size) and len(flow.sets) == 1 and self.bound["end"] not in _OPEN:
            # As many as a part has, or more; of a whole batch it may be some.
            raise NotTold
        if end - begin == 1 and flow.sets != (1,) * len(flow.sets):
            return self._one_by_one(begin)
        return [self._between(flow, begin, end)]

    @staticmethod
    def _between(flow: Samples, begin: int, end: int) -> Flow:
        """Whole batches of those that were set one after the other."""
        at, sets = 0, []
        for one in flow.sets:
            if begin <= at and at + one <= end:
                sets.append(one)
            at += one
        if not sets or sum(sets) != end - begin:
            # Pieces as a loop over micro-batches takes them, which may be some alone.
            raise NotTold(known=end <= begin or begin % (end - begin) > 0)
        return Samples(flow.dim, tuple(sets))

    def _do_split(self) -> Sequence[Flow]:
        tensor, flow = self._self()
        (dim,) = self._dims(tensor)
        if dim != flow.dim:
            return [flow] * len(self.made)
        found, at = [], 0
        for one in self.made:
            found.append(self._between(flow, at, at + one.shape[dim]))
            at += one.shape[dim]
        return found

    _do_split_with_sizes = _do_unsafe_split = _do_unsafe_chunk = _do_chunk = _do_split

    def _do_cat(self) -> Sequence[Flow]:
        tensors = self.bound["tensors"]
        dim = self.bound.get("dim", 0) % self.made[0].dim()
        flows = [self.of(one) for one in tensors]
        inner = {one.dim for one in flows if isinstance(one, Samples)}
        if len(inner) > 1 or any(isinstance(one, Reduced) for one in flows):
            raise NotTold(known=True)
        if inner != {dim}:
            return [next(one for one in flows if isinstance(one, Samples))]
        whole = [one for one in flows if isinstance(one, Samples)]
        if len(whole) < len(flows):
            raise NotTold
        return [Samples(dim, tuple(size for one in whole for size in one.sets))]

    def _do_stack(self) -> Sequence[Flow]:
        found = self._elementwise(self.made[0].dim() - 1)
        assert isinstance(found, Samples)
        dim = self.bound.get("dim", 0) % self.made[0].dim()
        return [Samples(found.dim + (dim <= found.dim), found.sets)]

    def _do_sort(self) -> Sequence[Flow]:
        tensor, flow = self._self()
        if flow.dim not in self._dims(tensor):
            return [flow] * len(self.made)
        if tensor.is_floating_point() or tensor.dim() > 1:
            raise NotTold(known=True)
        # Samples are put in an order of lengths.
        order = [flow] * (len(self.made) - 1)
        return [*order, Drawn()]

    _do_argsort = _do_sort

    def _do__pack_padded_sequence(self) -> Sequence[Flow | None]:
        flow = self.of(self.bound["input"])
        if not isinstance(flow, Samples) or flow.dim != (0 if self.bound["batch_first"] else 1):
            raise NotTold(known=True)
        return [Samples(0, (self.made[0].shape[0],)), None]

    def _do_mkldnn_rnn_layer(self) -> Sequence[Flow | None]:
        _, flow = self._self()
        # The other is given what is transposed.
        if flow.dim != (0 if self.bound["batch_first"] and "cudnn" in self.name else 1):
            raise NotTold(known=True)
        return [flow, *[Samples(1, flow.sets)] * 2, *[None] * (len(self.made) - 3)]

    _do__cudnn_rnn = _do_mkldnn_rnn_layer

    def _do__ctc_loss(self) -> Sequence[Flow]:
        flow = self.of(self.bound["log_probs"])
        if not isinstance(flow, Samples) or flow.dim != 1:
            raise NotTold
        return [Samples(0, flow.sets)] * len(self.made)

    _do__cudnn_ctc_loss = _do__use_cudnn_ctc_loss = _do__ctc_loss

    def _do_diagonal(self) -> Sequence[Flow]:
        tensor, flow = self._self()
        dims = [self.bound[one] % tensor.dim() for one in ("dim1", "dim2")]
        if flow.dim in dims:
            raise NotTold(known=True)
        return [Samples(flow.dim - sum(one < flow.dim for one in dims), flow.sets)]

    def _do_diag_embed(self) -> Sequence[Flow]:
        tensor, flow = self._self()
        if flow.dim == tensor.dim() - 1 or (self.bound["dim1"], self.bound["dim2"]) != (-2, -1):
            raise NotTold
        return [flow]

    def _do_linalg_solve_triangular(self) -> Sequence[Flow]:
        """Each column by itself, of equations that all have."""
        tensor = self.bound["B"]
        flow = self.of(tensor)
        if self.of(self.bound["self"]) or not isinstance(flow, Samples):
            return [self._first()]
        if flow.dim == tensor.dim() - 2:
            raise NotTold(known=True)
        return [flow]

    # -- products --------------------------------------------------------------------------------

    def _product(self, a: torch.Tensor, b: torch.Tensor, *more: torch.Tensor) -> Sequence[Flow]:
        left, right = self.of(a), self.of(b)
        others = [self.of(one) for one in more]
        for one in (left, right, *others):
            if one is not None and not isinstance(one, Samples):
                raise NotTold(known=isinstance(one, Reduced))
        ndim = self.made[0].dim()
        rows = left.dim - a.dim() if isinstance(left, Samples) else None
        columns = right.dim - b.dim() if isinstance(right, Samples) else None
        # Counted from the right: -2 are rows, -1 columns.
        inner_left, inner_right = rows == -1, columns == (-2 if b.dim() > 1 else -1)
        if inner_left and inner_right and not any(others):
            return [Reduced("sum")]
        if inner_left or inner_right:
            # A weighted sum over samples, by weights that go by their place in the batch.
            raise NotTold(known=True)
        if rows is not None and columns is not None and rows != columns:
            raise NotTold(known=True)
        if rows == -2 and columns == -2:
            raise NotTold(known=True)
        dim, flow = (rows, left) if rows is not None else (columns, right)
        assert dim is not None
        assert isinstance(flow, Samples)
        found = Samples(ndim + dim + (b.dim() == 1), flow.sets)
        for one, added in zip(others, more, strict=True):
            if isinstance(one, Samples) and one.dim + ndim - added.dim() != found.dim:
                raise NotTold(known=True)
        return [found]

    def _do_mm(self) -> Sequence[Flow]:
        return self._product(self.bound["self"], self.bound["vec" if self.name == "mv" else "mat2"])

    _do_bmm = _do_mv = _do_mm

    def _do_dot(self) -> Sequence[Flow]:
        return self._product(self.bound["self"], self.bound["tensor"])

    def _do_addmm(self) -> Sequence[Flow]:
        return self._product(self.bound["mat1"], self.bound["mat2"], self.bound["self"])

    def _do_baddbmm(self) -> Sequence[Flow]:
        return self._product(self.bound["batch1"], self.bound["batch2"], self.bound["self"])

    def _do_linear(self) -> Sequence[Flow]:
        tensor, flow = self._self()
        if flow.dim == tensor.dim() - 1 or self.of(self.bound["weight"]):
            raise NotTold(known=True)
        return [flow]

    def _do__cdist_forward(self) -> Sequence[Flow]:
        a, b = self.bound["x1"], self.bound["x2"]
        left, right = self.of(a), self.of(b)
        if left and right:
            if not (isinstance(left, Samples) and left == right and left.dim < a.dim() - 2):
                raise NotTold(known=True)
            return [left]
        if isinstance(left, Samples):
            return [left]
        assert isinstance(right, Samples)
        return [Samples(b.dim() - 1 if right.dim == b.dim() - 2 else right.dim, right.sets)]

    def _do__pdist_forward(self) -> Sequence[Flow]:
        raise NotTold(known=True)
