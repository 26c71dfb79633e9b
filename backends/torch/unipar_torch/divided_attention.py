"""Attention over sequences that ranks hold in parts: no rank ever builds the scores of the whole.

Softmax over keys in blocks: each block's output and the logarithm of its sum of exponentials are
merged exactly (Dao et al., https://arxiv.org/abs/2205.14135, section 3.1). The keys and values of
other ranks come round a ring (Liu et al., https://arxiv.org/abs/2310.01889), or all at once; or
ranks exchange positions for heads (Jacobs et al., https://arxiv.org/abs/2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from unipar_torch.sequence_parts import Parts

_ROWS = 512
"""Queries whose scores are held at once where no kernel of torch's applies."""


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    parts: Parts,
    group: dist.ProcessGroup,
    *,
    causal: bool,
    scale: float,
    gathers: bool = False,
) -> torch.Tensor:
    """Attention of this rank's queries over all ranks' keys. Collective, forward and backward.

    Args:
        q: of shape (batch, heads, own length, width).
        k: of shape (batch, kv heads, own length, width); the heads are a multiple of these.
        v: of shape (batch, kv heads, own length, value width).
        parts: which positions each rank holds, in zigzag order.
        group: the ranks.
        causal: whether a position sees none after it.
        scale: of the scores.
        gathers: whether keys and values are gathered at once, and not passed on rank by rank.

    Returns:
        Of shape (batch, heads, own length, value width).
    """
    return _Divided.apply(q, k, v, parts, group, causal, scale, gathers)  # type: ignore[no-any-return]


class _Divided(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        parts: Parts,
        group: dist.ProcessGroup,
        causal: bool,
        scale: float,
        gathers: bool,
    ) -> torch.Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        wide = _wide(q[..., :0]).dtype
        total = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=wide, device=q.device)
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=wide, device=q.device)
        came = _gathered if gathers else _passed_on
        for rank, (keys, values) in came((k, v), parts, group):
            rows, columns = _block(parts, rank, causal=causal)
            out, own = _attend(
                rows.of(q),
                columns.of(keys),
                columns.of(values),
                scale,
                causal and rank == parts.rank,
            )
            merged = torch.logaddexp(rows.of(lse[..., None]), own[..., None])
            rows.of(total).mul_((rows.of(lse[..., None]) - merged).exp())
            rows.of(total).addcmul_(_wide(out), (own[..., None] - merged).exp())
            rows.of(lse[..., None]).copy_(merged)
        out = total.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.given = parts, group, causal, scale, gathers
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        parts, group, causal, scale, gathers = ctx.given
        (grad,) = gradients
        grad = grad.to(out.dtype).contiguous()
        dq = torch.zeros_like(q, dtype=lse.dtype)

        def of_block(rank: int, keys: torch.Tensor, values: torch.Tensor) -> _KeyGradients:
            rows, columns = _block(parts, rank, causal=causal)
            own_q, dk, dv = _attend_backward(
                rows.of(grad),
                rows.of(q),
                columns.of(keys),
                columns.of(values),
                rows.of(out),
                rows.of(lse[..., None])[..., 0],
                scale,
                causal and rank == parts.rank,
            )
            rows.of(dq).add_(own_q)
            return columns, dk, dv

        backward = _gathered_backward if gathers else _passed_on_backward
        dk, dv = backward((k, v), parts, group, of_block)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *[None] * 5


class _Span(NamedTuple):
    """Positions of a rank's part that follow one another in it."""

    start: int
    length: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of a tensor of shape (…, positions, width)."""
        return tensor.narrow(-2, self.start, self.length)


def _block(parts: Parts, rank: int, *, causal: bool) -> tuple[_Span, _Span]:
    """The queries that see keys of a rank, and the keys that they see: each of them all of these.

    In zigzag order all positions of a rank come after the first chunk of an earlier one and before
    its second; so for the part of this rank alone a mask is left, which is the usual one.
    """
    rows, columns = _Span(0, parts.own_length), _Span(0, parts.length_of(rank))
    if causal and rank < parts.rank:
        columns = _Span(0, parts.chunks(rank)[0][1])
    elif causal and rank > parts.rank:
        (_, before), (_, length) = parts.chunks(parts.rank)
        rows = _Span(before, length)
    return rows, columns


# -- keys and values of other ranks ---------------------------------------------------------------

_Pair = tuple[torch.Tensor, torch.Tensor]
_KeyGradients = tuple[_Span, torch.Tensor, torch.Tensor]
_OfBlock = Callable[[int, torch.Tensor, torch.Tensor], _KeyGradients]


def _passed_on(own: _Pair, parts: Parts, group: dist.ProcessGroup) -> Iterator[tuple[int, _Pair]]:
    """Keys and values of each rank, this one's first; the next ones come while these are used."""
    size, rank = parts.size, parts.rank
    here = own
    for step in range(size):
        of = (rank - step) % size
        coming, works = here, []
        if step < size - 1:
            length = parts.length_of((of - 1) % size)
            coming, works = _pass_on(here, length, parts, group)
        yield of, (here[0], here[1])
        for work in works:
            work.wait()
        here = coming


def _pass_on(
    here: tuple[torch.Tensor, ...], length: int, parts: Parts, group: dist.ProcessGroup
) -> tuple[Any, list[Any]]:
    """Begin to send tensors to the next rank, and to receive the previous one's."""
    after, before = (dist.get_global_rank(group, (parts.rank + by) % parts.size) for by in (1, -1))
    coming = tuple(t.new_empty(*t.shape[:-2], length, t.shape[-1]) for t in here)
    sends = [dist.P2POp(dist.isend, t, after, group) for t in here]
    receives = [dist.P2POp(dist.irecv, t, before, group) for t in coming]
    return coming, dist.batch_isend_irecv([*sends, *receives])


def _passed_on_backward(
    own: _Pair, parts: Parts, group: dist.ProcessGroup, of_block: _OfBlock
) -> _Pair:
    """Gradients go round behind the keys and values that they are of, and come home last."""
    size, rank = parts.size, parts.rank
    gradients: Any = None
    for of, (keys, values) in _passed_on(own, parts, group):
        columns, dk, dv = of_block(of, keys, values)
        if gradients is None:
            gradients = tuple(torch.zeros_like(_wide(t)) for t in own)
        else:
            gradients, works = _pass_on(gradients, parts.length_of(of), parts, group)
            for work in works:
                work.wait()
        columns.of(gradients[0]).add_(dk)
        columns.of(gradients[1]).add_(dv)
    if size > 1:
        gradients, works = _pass_on(gradients, parts.length_of(rank), parts, group)
        for work in works:
            work.wait()
    return gradients


def _gathered(own: _Pair, parts: Parts, group: dist.ProcessGroup) -> Iterator[tuple[int, _Pair]]:
    """Keys and values of each rank, which come all at once."""
    of_ranks = []
    for tensor in own:
        room = tensor.new_zeros(*tensor.shape[:-2], parts.longest, tensor.shape[-1])
        room.narrow(-2, 0, parts.own_length).copy_(tensor)
        every = room.new_empty(parts.size, *room.shape)
        dist.all_gather(list(every), room, group=group)
        of_ranks.append(every)
    for rank in range(parts.size):
        length = parts.length_of(rank)
        keys, values = (every[rank].narrow(-2, 0, length) for every in of_ranks)
        yield rank, (keys, values)


def _gathered_backward(
    own: _Pair, parts: Parts, group: dist.ProcessGroup, of_block: _OfBlock
) -> _Pair:
    sums = tuple(
        torch.zeros(
            (parts.size, *t.shape[:-2], parts.longest, t.shape[-1]),
            dtype=_wide(t[..., :0]).dtype,
            device=t.device,
        )
        for t in own
    )
    for rank, (keys, values) in _gathered(own, parts, group):
        columns, dk, dv = of_block(rank, keys, values)
        columns.of(sums[0][rank]).add_(dk)
        columns.of(sums[1][rank]).add_(dv)
    found = []
    for every in sums:
        mine = torch.empty_like(every)
        dist.all_to_all_single(mine, every, group=group)
        found.append(mine.sum(0).narrow(-2, 0, parts.own_length))
    return found[0], found[1]


# -- one block -------------------------------------------------------------------------------------


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries over keys, and the logarithms of the sums of exponentials of scores.

    Args:
        q: of shape (batch, heads, queries, width).
        k: of shape (batch, kv heads, keys, width).
        v: of shape (batch, kv heads, keys, value width).
        scale: of the scores.
        causal: whether query ``i`` sees the keys up to ``i`` only; there are as many of both.

    Returns:
        The output, and (batch, heads, queries) in fp32 or wider.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = _repeated(k, groups), _repeated(v, groups)
    kernel = _kernel(q, v)
    if kernel == "cpu":
        # torch 2.13, aten/src/ATen/native/transformers/attention.cpp.
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
        return out, lse
    if kernel == "cuda":
        # torch 2.13, aten/src/ATen/native/transformers/cuda/attention.cu.
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, scale=scale
        )
        return out, lse
    outs, sums = [], []
    for scores, _, _ in _scores(q, k, scale, causal):
        lse = scores.logsumexp(-1)
        outs.append((scores - lse[..., None]).exp() @ _wide(v))
        sums.append(lse)
    return torch.cat(outs, -2).to(q.dtype), torch.cat(sums, -1)


def _attend_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of a block's queries, keys and values; ``out`` and ``lse`` are over all blocks."""
    kv_heads = k.shape[1]
    groups = q.shape[1] // kv_heads
    k, v = _repeated(k, groups), _repeated(v, groups)
    kernel = _kernel(q, v)
    grad, q, out, lse = grad.contiguous(), q.contiguous(), out.contiguous(), lse.contiguous()
    if kernel == "cpu":
        # torch 2.13, aten/src/ATen/native/transformers/attention.cpp.
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    elif kernel == "cuda":
        # Without dropout the two states of the generator are not read (torch 2.13,
        # aten/src/ATen/native/transformers/cuda/attention_backward.cu).
        nothing = torch.zeros((), dtype=torch.int64, device=q.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(grad, q, k, v, out, lse, None, None, q.shape[-2], k.shape[-2], 0.0, causal),
            *(nothing, nothing),
            scale=scale,
        )
    else:
        dq, dk, dv = _plain_backward(_wide(grad), q, k, v, _wide(out), lse, scale, causal)
    return dq, _summed(dk, kv_heads), _summed(dv, kv_heads)


def _plain_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    k, v = _wide(k), _wide(v)
    dq, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
    own = (grad * out).sum(-1, keepdim=True)
    for scores, start, rows in _scores(q, k, scale, causal):
        weights = (scores - lse.narrow(-1, start, rows)[..., None]).exp()
        grad_rows = grad.narrow(-2, start, rows)
        dv += weights.mT @ grad_rows
        dscores = weights * (grad_rows @ v.mT - own.narrow(-2, start, rows)) * scale
        dk += dscores.mT @ _wide(q.narrow(-2, start, rows))
        dq.append(dscores @ k)
    return torch.cat(dq, -2), dk, dv


def _scores(
    q: torch.Tensor, k: torch.Tensor, scale: float, causal: bool
) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Scores of some queries at a time, in fp32 or wider; the first of them, and their number."""
    for start in range(0, q.shape[-2], _ROWS):
        rows = min(_ROWS, q.shape[-2] - start)
        with torch.autocast(q.device.type, enabled=False):
            scores = _wide(q.narrow(-2, start, rows)) @ _wide(k).mT * scale
        if causal:
            hidden = torch.ones(rows, k.shape[-2], dtype=torch.bool, device=q.device)
            scores = scores.masked_fill(hidden.triu(start + 1), -torch.inf)
        yield scores, start, rows


def _kernel(q: torch.Tensor, v: torch.Tensor) -> str:
    """Which of torch's kernels gives the sums of exponentials; ``""``: none."""
    if q.shape[-1] != v.shape[-1]:
        return ""
    if q.device.type == "cpu":
        return "cpu"
    half = q.dtype in (torch.float16, torch.bfloat16)
    fits = half and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return "cuda" if q.device.type == "cuda" and fits else ""


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in fp32, or as it is in what is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _repeated(kv: torch.Tensor, groups: int) -> torch.Tensor:
    return (kv if groups == 1 else kv.repeat_interleave(groups, 1)).contiguous()


def _summed(gradient: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Over the queries' heads that share one of keys and values."""
    if gradient.shape[1] == kv_heads:
        return gradient
    return _wide(gradient).unflatten(1, (kv_heads, -1)).sum(2)


# -- heads for positions ---------------------------------------------------------------------------


def to_heads(x: torch.Tensor, parts: Parts, group: dist.ProcessGroup) -> torch.Tensor:
    """All positions of this rank's share of the heads. Collective, forward and backward.

    Args:
        x: all heads of this rank's positions, of shape (batch, heads, own length, width).
        parts: which positions each rank holds: one chunk.
        group: the ranks.

    Returns:
        Of shape (batch, heads / ranks, length, width).
    """
    return _Exchange.apply(x, parts, group, True)  # type: ignore[no-any-return]


def to_positions(x: torch.Tensor, parts: Parts, group: dist.ProcessGroup) -> torch.Tensor:
    """What :func:`to_heads` does, the other way. Collective, forward and backward."""
    return _Exchange.apply(x, parts, group, False)  # type: ignore[no-any-return]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, parts: Parts, group: dist.ProcessGroup, heads: bool
    ) -> torch.Tensor:
        ctx.given = parts, group, heads
        return _exchange(x, parts, group, heads=heads)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        parts, group, heads = ctx.given
        return _exchange(gradients[0], parts, group, heads=not heads), None, None, None


def _exchange(
    x: torch.Tensor, parts: Parts, group: dist.ProcessGroup, *, heads: bool
) -> torch.Tensor:
    lengths = [parts.length_of(rank) for rank in range(parts.size)]
    batch, width = x.shape[0], x.shape[-1]
    if heads:
        share = x.shape[1] // parts.size
        given = list(x.split(share, 1))
        shapes = [(batch, share, length, width) for length in lengths]
    else:
        share = x.shape[1]
        given = list(x.split(lengths, 2))
        shapes = [(batch, share, parts.own_length, width)] * parts.size
    sent = torch.cat([part.reshape(-1) for part in given])
    sizes = [batch * shape[1] * shape[2] * width for shape in shapes]
    came = sent.new_empty(sum(sizes))
    dist.all_to_all_single(came, sent, sizes, [part.numel() for part in given], group=group)
    whole = [one.view(shape) for one, shape in zip(came.split(sizes), shapes, strict=True)]
    return torch.cat(whole, 2 if heads else 1)
