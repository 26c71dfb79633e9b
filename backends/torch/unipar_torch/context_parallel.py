"""Context parallelism: each rank along ``cp`` has a part of each sequence, and attention sees all.

What goes through ``torch.nn.functional.scaled_dot_product_attention`` is computed over all ranks;
whatever else a model does has to be done by position, which a check in the first pass finds out.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from types import FunctionType
from typing import Any, Literal, NoReturn

import torch
from torch import nn
from torch.nn import functional

from unipar.data.batch import MicroBatch
from unipar.engine import PrecisionPolicy
from unipar.engine.divider import PartOf
from unipar.errors import ConfigError
from unipar.loss import IGNORE_INDEX, LossFn
from unipar.objective import Objective
from unipar.world import World
from unipar_torch.divided_attention import ring_attention, to_heads, to_positions
from unipar_torch.divided_dropout import dropping_apart, own_stream
from unipar_torch.sequence_checks import MOST_POSITIONS, compare, compare_again
from unipar_torch.sequence_parts import (
    MASK,
    POSITIONS,
    BatchParts,
    Parts,
    is_integer,
    named_tensors,
)

_ALIKE = contextlib.nullcontext()
Undo = Callable[[], None]
Kind = Literal["ring", "all_gather", "ulysses"]


class ContextParallel:
    """Divides micro-batches by sequence, and has attention see all of it.

    Args:
        world: the joined processes.
        kind: how attention sees what other ranks have.
        dims: the sequence's dimension of tensors of a batch, or ``None`` to find them.
    """

    def __init__(self, world: World, kind: Kind, dims: dict[str, int] | None) -> None:
        mesh = world.mesh("cp")
        self._world, self._kind, self._group = world, kind, mesh.get_group()
        self._rank = rank = mesh.get_local_rank()
        self._batches = BatchParts(mesh.size(), rank, zigzag=kind != "ulysses", dims=dims)
        self._precision = PrecisionPolicy("fp32", world.device)
        # By mode, loss function and names of tensors: the greatest length compared, and the
        # function, so that ids of what it has are not another's later.
        self._checked: dict[Any, tuple[int, LossFn]] = {}
        # Micro-batches of training, and of evaluation.
        self._passes = {True: 0, False: 0}
        self._now: Parts | None = None
        self._drops = False
        self._masks: str | None = None

    def install(self, module: nn.Module) -> list[Undo]:
        """Have a model given the positions of its part, before anything else is done to it."""
        refuse_other_attention(module)
        refuse_lengths(module)
        self._of_transformers = _of_transformers(module)
        self._signature = inspect.signature(module.forward)
        handle = module.register_forward_pre_hook(self._give_positions, with_kwargs=True)
        return [handle.remove]

    def check_by(self, precision: PrecisionPolicy) -> None:
        """Check the model in a precision that cannot be left, and not in fp32."""
        self._precision = precision

    @contextlib.contextmanager
    def dividing(
        self, model: nn.Module, microbatch: MicroBatch, loss_fn: LossFn
    ) -> Iterator[PartOf]:
        """See :class:`unipar.engine.divider.Divider`."""

        def aligned(data: Any) -> Any:
            return loss_fn.aligned(data) if isinstance(loss_fn, Objective) else data

        length, dims = self._batches.dims_of(aligned(microbatch.data))
        self._look_at_masks(microbatch.data)
        self._check(model, aligned(microbatch.data), loss_fn, length)
        # Not in the check, which drops nothing and draws the same numbers whole and in parts.
        with self.attending(length), dropping_apart(self._world.device, self._rank):
            self._drops = True
            try:
                yield lambda data: self._batches.divided(aligned(data), length, dims)
            finally:
                self._drops = False

    def _check(self, model: nn.Module, data: Any, loss_fn: LossFn, length: int) -> None:
        """Compare what has not been compared: modes, losses, tensors, lengths. Collective.

        And some later micro-batches, those whose number is a power of two: the first few, and ever
        more rarely, for what depends on values that the first one does not have.
        """
        self._passes[model.training] += 1
        number = self._passes[model.training]
        # Recomputation and evaluation may take other ways through a model, so may other tensors.
        key = model.training, _identity(loss_fn), frozenset(named_tensors(data))
        longest, _ = self._checked.get(key, (0, loss_fn))
        own = not longest, min(length, MOST_POSITIONS)
        # Ranks with other samples may have others, and all have to come along.
        all_own = self._world.gather(own) if self._world.data_size > 1 else [own]
        new, now = any(new for new, _ in all_own), max(at for _, at in all_own)
        given: Any = (
            model,
            data,
            loss_fn,
            self._batches,
            self.attending,
            self._precision,
            self._world,
            self._group,
        )
        if new or now > longest:
            if compare(*given, only_length=not new):
                self._checked[key] = max(now, longest), loss_fn
        elif number & (number - 1) == 0:
            compare_again(*given, number=number)

    @contextlib.contextmanager
    def attending(self, length: int) -> Iterator[None]:
        """Have attention see sequences of ``length``, of which the model is given a part."""
        before, self._now = self._now, self._batches.parts_of(length)
        original = functional.scaled_dot_product_attention
        fast = torch.backends.mha.get_fastpath_enabled()

        def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
            return self._attention(original, *args, **kwargs)

        functional.scaled_dot_product_attention = attention
        # Its attention goes past that function.
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with self._masks_of_transformers():
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            functional.scaled_dot_product_attention = original
            self._now = before

    # -- attention -------------------------------------------------------------------------------

    def _attention(
        self,
        original: Callable[..., torch.Tensor],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        parts = self._now
        assert parts is not None
        self._refuse_unknown(parts, query, key, attn_mask, dropout_p)
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = (t.to(dtype) for t in (query, key, value))
        shape = query.shape
        q, k, v = (_four_dimensional(t, shape) for t in (query, key, value))
        if q.shape[1] % k.shape[1] or (not enable_gqa and k.shape[1] not in (1, q.shape[1])):
            raise ConfigError(
                f"attention has {q.shape[1]} heads of queries and {k.shape[1]} of keys. Give as "
                "many of both, or a divisor and enable_gqa=True."
            )
        scale = 1 / math.sqrt(shape[-1]) if scale is None else scale
        if self._kind != "ulysses":
            gathers = self._kind == "all_gather"
            out = ring_attention(
                q, k, v, parts, self._group, causal=is_causal, scale=scale, gathers=gathers
            )
        else:
            self._refuse_heads(q.shape[1], k.shape[1], parts.size)
            q, k, v = (to_heads(t, parts, self._group) for t in (q, k, v))
            # Of the heads, of which each rank has others, too.
            apart = own_stream(q.device, self._rank) if dropout_p and self._drops else _ALIKE
            with apart:
                out = original(
                    q, k, v, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=True
                )
            out = to_positions(out, parts, self._group)
        return out.reshape(*shape[:-1], value.shape[-1])

    def _refuse_unknown(
        self,
        parts: Parts,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
    ) -> None:
        own, asked = parts.own_length, (query.shape[-2], key.shape[-2])
        if asked != (own, own):
            self._refuse(
                f"attention was called with {asked[0]} queries and {asked[1]} keys, and this rank "
                f"has {own} of the {parts.length} positions of each sequence. Attention to "
                "anything else (another sequence, a window of this one) is not divided: leave cp "
                "out"
            )
        if mask is not None:
            self._refuse(
                f"attention was called with a mask of shape {list(mask.shape)}, and what it says "
                "of the positions of other ranks is not known. Use is_causal=True, or no mask; of "
                "padding at the end nothing is seen under a causal mask, if its labels are left out"
            )
        if dropout and self._kind != "ulysses":
            self._refuse(
                f"attention drops weights (dropout_p={dropout:g}), which cp_kind='{self._kind}' "
                "cannot. Set the model's attention dropout to 0, or cp_kind=ulysses"
            )

    def _refuse_heads(self, heads: int, kv_heads: int, size: int) -> None:
        if heads % size or kv_heads % size:
            own = f"{heads} heads of queries and {kv_heads} of keys and values"
            allowed = [n for n in range(1, heads + 1) if not (heads % n or kv_heads % n)]
            self._refuse(
                f"cp_kind='ulysses' gives each rank some of the heads, and a rank has {own}, which "
                f"{size} does not divide. Set cp to one of {allowed}, or cp_kind=ring"
            )

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigError(f"mesh: cp={self._batches.size} divides each sequence, and {what}.")

    # -- positions, and masks of transformers ----------------------------------------------------

    def _give_positions(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give a model that takes positions those of its part, unless it is given some."""
        if self._now is None:
            return args, kwargs
        given = self._signature.bind_partial(*args, **kwargs).arguments
        self._refuse_cut(given.values())
        device = self._world.device
        if POSITIONS in self._signature.parameters and given.get(POSITIONS) is None:
            kwargs = {**kwargs, POSITIONS: self._now.positions(device)[None]}
        if _of_transformers(module) and MASK in self._signature.parameters:
            if given.get(MASK) is None:
                # Without a mask it would take a gap in the positions for the end of a sequence.
                tensors = [t for t in given.values() if isinstance(t, torch.Tensor) and t.ndim > 1]
                rows = tensors[0].shape[0] if tensors else 1
                ones = torch.ones(rows, self._now.own_length, dtype=torch.bool, device=device)
                kwargs, self._masks = {**kwargs, MASK: ones}, "whole"
            elif self._masks is None:
                self._refuse(
                    f"the model is given an {MASK} that the batch does not have, so what it hides "
                    f"of other ranks' positions is not known. Put '{MASK}' into the batch, or "
                    "leave it out: of padding at the end nothing is seen under a causal mask"
                )
        return args, kwargs

    def _refuse_cut(self, given: Iterable[Any]) -> None:
        """Refuse token ids that are not those of this rank's part."""
        assert self._now is not None
        own = self._now.own_length
        ids = [t for t in given if isinstance(t, torch.Tensor) and t.ndim > 1 and is_integer(t)]
        if ids and not any(own in t.shape for t in ids):
            self._refuse(
                f"the model was given inputs of shape {list(ids[0].shape)}, and of the batch this "
                f"rank has {own} of {self._now.length} positions. The loss function must give the "
                "model all positions that the batch has: shift labels in the data set, so that "
                "inputs and labels have one length"
            )

    def _look_at_masks(self, data: Any) -> None:
        """Refuse padding before the end of a sequence, and several sequences in one."""
        self._masks = None
        tensors = named_tensors(data)
        for name, tensor in tensors.items():
            last = name.rpartition(".")[2]
            if last == MASK and tensor.ndim == 2:
                there = tensor != 0
                if not bool((there[:, 1:] <= there[:, :-1]).all()):
                    self._refuse(
                        f"'{name}' hides positions before the end of a sequence. Pad on the right "
                        "(padding_side='right' of a tokenizer)"
                    )
                self._masks = "whole" if bool(there.all()) else "padded"
                self._refuse_labels_of_padding(name, ~there, tensors)
            if last == POSITIONS and tensor.ndim == 2:
                usual = torch.arange(tensor.shape[1], device=tensor.device)
                if not torch.equal(tensor, usual.expand_as(tensor).to(tensor)):
                    self._refuse(
                        f"'{name}' has other positions than 0, 1, 2, … in each row: several "
                        "sequences packed into one, say, between which attention would not be "
                        "masked. Give each a row of its own, or leave cp out"
                    )

    def _refuse_labels_of_padding(
        self, mask: str, padding: torch.Tensor, tensors: dict[str, torch.Tensor]
    ) -> None:
        """Refuse padding that counts: without a mask it sees other padding."""
        for name, labels in tensors.items():
            if name.rpartition(".")[2] not in ("labels", "shift_labels"):
                continue
            if not self._of_transformers or labels.shape != padding.shape:
                continue
            if bool((labels[padding] != IGNORE_INDEX).any()):
                self._refuse(
                    f"'{name}' has labels where '{mask}' says padding, whose outputs are others "
                    f"when attention has no mask. Set these labels to {IGNORE_INDEX} in the data "
                    "set"
                )

    @contextlib.contextmanager
    def _masks_of_transformers(self) -> Iterator[None]:
        """Let models of transformers build no masks, where those would be the usual ones.

        ``AttentionMaskInterface`` is theirs to be changed (transformers 5.23, masking_utils.py).
        """
        masking = sys.modules.get("transformers.masking_utils")
        known: Any = getattr(masking, "ALL_MASK_ATTENTION_FUNCTIONS", None)
        if known is None:
            yield
            return
        assert masking is not None
        bidirectional = masking.bidirectional_mask_function
        before = known["sdpa"]

        def mask(*, mask_function: Any, **kwargs: Any) -> None:
            parts = self._now
            assert parts is not None
            window = kwargs.get("local_size")
            sees_all = kwargs.get("allow_is_bidirectional_skip", False)
            skips = sees_all or kwargs.get("allow_is_causal_skip", True)
            usual = mask_function in (masking.causal_mask_function, bidirectional)
            if not (usual or (window is not None and window >= parts.length)) or not skips:
                self._refuse(
                    f"the model's attention has a mask of its own ({mask_function.__qualname__}"
                    f"{'' if window is None else f', a window of {window}'}), which is not known "
                    "for the positions of other ranks. Only causal attention, or attention to "
                    "all, can be divided"
                )
            if (sees_all or mask_function is bidirectional) and self._masks == "padded":
                self._refuse(
                    f"'{MASK}' hides padding in a model whose attention sees all positions. Give "
                    "batches without padding, or leave cp out"
                )

        known["sdpa"] = mask
        try:
            yield
        finally:
            known["sdpa"] = before


def _identity(loss_fn: LossFn) -> Any:
    """What tells loss functions apart, and not one that a loop makes anew in each step."""
    if isinstance(loss_fn, FunctionType):
        cells, defaults = loss_fn.__closure__ or (), loss_fn.__defaults__ or ()
        parts = tuple(id(part) for part in (loss_fn.__globals__, *cells, *defaults))
        return loss_fn.__code__, parts
    return loss_fn if isinstance(loss_fn, Hashable) else id(loss_fn)


def refuse_other_attention(module: nn.Module) -> None:
    """Refuse models of transformers whose attention is none of torch's.

    Raises:
        ConfigError: it is another.
    """
    for name, part in module.named_modules():
        kind = getattr(getattr(part, "config", None), "_attn_implementation", "sdpa")
        if isinstance(kind, str) and kind != "sdpa":
            raise ConfigError(
                f"mesh: cp divides attention that goes through torch's "
                f"scaled_dot_product_attention, and '{name or type(part).__name__}' has "
                f"attn_implementation='{kind}'. Build it with attn_implementation='sdpa'."
            )


def refuse_lengths(module: nn.Module) -> None:
    """Refuse models of transformers that compute by the length of what they are given.

    A rank has a part of the sequence, and would take its length for the whole's; a short sequence
    does not show it.

    Raises:
        ConfigError: one does.
    """
    for name, part in module.named_modules():
        config, named = getattr(part, "config", None), name or type(part).__name__
        for kind in _rope_types(config):
            if "dynamic" in kind or kind == "longrope":
                raise ConfigError(
                    f"mesh: cp divides each sequence, and '{named}' has rope_type='{kind}', whose "
                    "frequencies depend on the greatest position that a rank has. Set another "
                    "rope_type in the model's config ('default', 'linear', 'yarn', 'llama3'), or "
                    "leave cp out."
                )
        if getattr(config, "attn_temperature_tuning", False):
            raise ConfigError(
                f"mesh: cp divides each sequence, and '{named}' has attn_temperature_tuning=True, "
                "which numbers positions by itself. Set attn_temperature_tuning=False in the "
                "model's config, or leave cp out."
            )


def _rope_types(config: Any) -> list[str]:
    """The kinds of rotary embeddings that a config names, of each kind of layer."""
    # The second is its name until transformers 5.
    found = [getattr(config, key, None) for key in ("rope_parameters", "rope_scaling")]
    found += [layer for one in found if isinstance(one, dict) for layer in one.values()]
    kinds = [one.get(k) for one in found if isinstance(one, dict) for k in ("rope_type", "type")]
    return [kind for kind in kinds if isinstance(kind, str)]


def _of_transformers(module: nn.Module) -> bool:
    return hasattr(getattr(module, "config", None), "_attn_implementation")


def _four_dimensional(tensor: torch.Tensor, like: torch.Size) -> torch.Tensor:
    """(batch, heads, positions, width) of what has one dimension for both, or several for one."""
    if tensor.ndim == 3:
        return tensor.expand(like[0], -1, -1)[:, None]
    return tensor.expand(*like[:-3], *tensor.shape[-3:]).flatten(0, -4)
