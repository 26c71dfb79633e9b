"""What becomes of the samples of a batch where masks and indices are looked up by."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unipar.compat.sample_rules import Call, Drawn, Flow, NotTold, Reduced, Samples


class AnyCall(Call):
    """One operation, which may look things up."""

    def _do_index(self) -> Sequence[Flow]:
        tensor = self.bound["self"]
        flow, at = self.of(tensor), self.bound["indices"]
        places = [dim for dim, one in enumerate(at) if one is not None]
        if len(places) == 1 and at[places[0]].dtype in (torch.bool, torch.uint8):
            return self._masked(at[places[0]], places[0])
        if places != list(range(places[0], places[-1] + 1)):
            raise NotTold
        indices = [at[one] for one in places]
        if flow is None:
            dims = {self._from_right(one) for one in indices if self.of(one)}
            if len(dims) > 1 or not all(isinstance(self.of(one), (Samples, type(None)))
                                        for one in indices):  # fmt: skip
                raise NotTold
            return [self._at(indices, places[0], dims.pop())]
        if not isinstance(flow, Samples):
            raise NotTold
        if flow.dim not in places:
            if any(self.of(one) for one in indices):
                raise NotTold
            width = max(one.dim() for one in indices)
            dim = flow.dim + (width - len(places) if places[0] < flow.dim else 0)
            return [Samples(dim, flow.sets)]
        own = at[flow.dim]
        width = max(one.dim() for one in indices)
        if id(own) in self._drawn:
            count = self.made[0].shape[places[0]]
            return [Samples(places[0], flow.sets if count == sum(flow.sets) else (count,))]
        if len(places) > 1 and own.dim() == 1 and own[-1] > own[0] and (own.diff() >= 0).all():
            # Some of each, sample by sample.
            return [Samples(places[0], (self.made[0].shape[places[0]],))]
        dim, times = _repeated(own, tensor.shape[flow.dim])
        if not times:
            raise NotTold(known=True)
        sets = tuple(one * times for one in flow.sets)
        return [Samples(places[0] + width - own.dim() + dim, sets)]

    def _masked(self, mask: torch.Tensor, place: int) -> Sequence[Flow]:
        """What a mask at a place takes."""
        flow, of_mask = self.of(self.bound["self"]), self.of(mask)
        along = place + of_mask.dim if isinstance(of_mask, Samples) else None
        dim = flow.dim if isinstance(flow, Samples) else along
        if dim is None or along not in (None, dim):
            raise NotTold(known=True)
        if dim < place:
            assert isinstance(flow, Samples)
            return [flow]
        if dim >= place + mask.dim():
            dim -= mask.dim() - 1
        elif along is None and id(mask) not in self._drawn:
            raise NotTold(known=True)
        else:
            return [Samples(place, (self.made[0].shape[place],))]
        assert isinstance(flow, Samples)
        return [Samples(dim, flow.sets)]

    def _from_right(self, index: torch.Tensor) -> int:
        flow = self.of(index)
        return flow.dim - index.dim() if isinstance(flow, Samples) else 0

    def _at(self, indices: list[torch.Tensor], place: int, from_right: int) -> Flow:
        width = max(one.dim() for one in indices)
        sets = next(f.sets for one in indices if isinstance(f := self.of(one), Samples))
        return Samples(place + width + from_right, sets)

    def _do_index_select(self) -> Sequence[Flow]:
        tensor, index = self.bound["self"], self.bound["index"]
        (dim,) = self._dims(tensor)
        flow, of_index = self.of(tensor), self.of(index)
        if flow is None and isinstance(of_index, Samples):
            return [Samples(dim, of_index.sets)]
        if not isinstance(flow, Samples):
            raise NotTold
        if dim != flow.dim:
            if of_index is not None:
                raise NotTold
            return [flow]
        if id(index) in self._drawn:
            same = index.numel() == sum(flow.sets)
            return [Samples(dim, flow.sets if same else (index.numel(),))]
        _, times = _repeated(index, tensor.shape[dim])
        if not times:
            raise NotTold(known=True)
        return [Samples(dim, tuple(one * times for one in flow.sets))]

    def _do_index_put(self) -> Sequence[Flow]:
        """What is written goes by its own sample, or by none."""
        tensor, at, values = self.bound["self"], self.bound["indices"], self.bound["values"]
        flow, places = self.of(tensor), [dim for dim, one in enumerate(at) if one is not None]
        indices = [at[one] for one in places]
        of_values, sizes = self.of(values), tensor.shape
        if isinstance(of_values, Reduced) or (values.numel() > 1 and of_values is None):
            raise NotTold(known=of_values is not None)
        if len(places) == 1 and indices[0].dtype in (torch.bool, torch.uint8):
            mask, place = self.of(indices[0]), places[0]
            found = Samples(place + mask.dim, mask.sets) if isinstance(mask, Samples) else flow
            drawn = id(indices[0]) in self._drawn
            if not isinstance(found, Samples) or flow not in (None, found):
                raise NotTold(known=flow is not None)
            covers = place <= found.dim < place + indices[0].dim()
            if covers and mask is None and not drawn:
                raise NotTold
            return [found]
        ordered = [one for one in places if _repeated(at[one], sizes[one])[1] == 1]
        if isinstance(flow, Samples):
            if flow.dim not in places or id(at[flow.dim]) in self._drawn or flow.dim in ordered:
                return [flow]
            raise NotTold
        lengths = {
            sum(f.sets) for one in (*indices, values) if isinstance(f := self.of(one), Samples)
        }
        ordered = [one for one in ordered if not self.of(at[one]) and lengths == {sizes[one]}]
        if flow is not None or len(ordered) != 1:
            raise NotTold
        return [Samples(ordered[0], (sizes[ordered[0]],))]

    def _do_index_fill(self) -> Sequence[Flow]:
        tensor, flow = self._self()
        index = self.bound["index"]
        if id(index) not in self._drawn and (self.of(index) or flow.dim in self._dims(tensor)):
            raise NotTold
        return [flow]

    def _do_nonzero(self) -> Sequence[Flow]:
        return [Drawn()] * len(self.made)

    def _do_masked_select(self) -> Sequence[Flow]:
        ndim = max(one.dim() for one in self.inputs)
        found, mask = self._elementwise(ndim), self.bound["mask"]
        assert isinstance(found, Samples)
        dim = found.dim - ndim + mask.dim()
        if self.of(mask) is None and id(mask) not in self._drawn and dim >= 0 < mask.shape[dim] - 1:
            raise NotTold
        return [Samples(0, (self.made[0].numel(),))]

    def _do_embedding(self) -> Sequence[Flow]:
        flow = self.of(self.bound["indices"])
        if not isinstance(flow, Samples) or self.of(self.bound["weight"]):
            raise NotTold
        return [flow]

    def _do_gather(self) -> Sequence[Flow]:
        (dim,) = self._dims(self.bound["self"])
        found = self._elementwise(self.made[0].dim())
        assert isinstance(found, Samples)
        if dim == found.dim and self.of(self.bound["self"]):
            raise NotTold(known=True)
        return [found]

    def _do_scatter(self) -> Sequence[Flow]:
        (dim,) = self._dims(self.bound["self"])
        found = self._elementwise(self.made[0].dim())
        assert isinstance(found, Samples)
        if dim == found.dim:
            raise NotTold
        return [found]

    _do_scatter_add = _do_scatter_reduce = _do_scatter


def _repeated(index: torch.Tensor, size: int) -> tuple[int, int]:
    """Along which dimension an index takes each of so many in order, and how often (0: not)."""
    if index.dtype not in (torch.int32, torch.int64):
        return 0, 0
    every = torch.arange(size, device=index.device, dtype=index.dtype)
    times, rest = divmod(index.numel(), size)
    if index.dim() == 1:
        same = times and not rest and torch.equal(index, every.repeat_interleave(times))
        return 0, times if same else 0
    for dim, length in enumerate(index.shape):
        along = every.view(-1, *[1] * (index.dim() - dim - 1))
        if length == size and torch.equal(index, along.expand_as(index)):
            return dim, 1
    return 0, 0
