"""``dropout_seed="sample"``: dropout draws for each sample, whatever rank and micro-batch has it.

While a micro-batch is computed, the functions of ``torch.nn.functional`` that drop elements are
others, whose masks :mod:`unipar.engine.sample_masks` makes. Each call draws its number from torch's
generator on the host, which is seeded by the step and the same everywhere. So what winds generators
back to compute activations again (``torch.utils.checkpoint`` does, whoever calls it) has the same
masks again. Whatever else draws from torch's generators moves them, too, and that is refused: its
numbers would depend on ranks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.nn import functional

from unipar.data.batch import MicroBatch
from unipar.data.order import mixed_seed
from unipar.engine.sample_masks import Words, dropped, sample_words, signs, words_of
from unipar.errors import ConfigError
from unipar.state import is_dtensor

OPTION = "dropout_seed='sample'"
REMEDY = "or set dropout_seed='rank', by which masks depend on the number of ranks."
_ALPHA = 1.7580993408473766
"""The negative limit of SELU, negated: ``scale * alpha`` of Klambauer et al., arXiv:1706.02515."""

Drop = Callable[[torch.Tensor, float, Sequence[int]], torch.Tensor]


def refuse_recurrent(model: nn.Module) -> None:
    """Refuse layers whose dropout is inside of torch's own kernels.

    Raises:
        ConfigError: the model has one.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1:
            raise ConfigError(
                f"{OPTION} cannot reach the dropout of '{name}' ({type(module).__name__}), which "
                "is inside of torch's kernel. Use layers of num_layers=1 with nn.Dropout between "
                f"them, {REMEDY}"
            )


class SampleDropout:
    """Makes the masks of an engine's dropout.

    Args:
        seed: of the run.
        name: of the engine, whose masks are its own.
        model: whose modules messages name.
        device: where the model computes.

    Attributes:
        num_calls: how often a forward pass drops elements; ``None`` before the first.
        draws: how often it has drawn from the host's generator.
        seen: while a list, what each call is given is noted there: a number for each sample, its
            norm, the shape, and the words for it in a message.
    """

    def __init__(self, seed: int, name: str, model: nn.Module, device: torch.device) -> None:
        self._seed, self._name, self._model, self._device = seed, name, model, device
        self.num_calls: int | None = None
        self.draws = 0
        self.seen: list[tuple[torch.Tensor, torch.Tensor, str]] | None = None
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])
        self._samples = Words(0, 0)
        self._num_samples = self._calls = 0
        self._forward: tuple[int, list[torch.Tensor]] | None = None

    @contextlib.contextmanager
    def drawing(self, step: int, microbatch: MicroBatch, *, shift: int = 0) -> Iterator[None]:
        """Surround the forward pass of a micro-batch, its loss, and its backward pass.

        Args:
            step: of training, from 0.
            microbatch: what is computed.
            shift: how far the samples have been rolled.

        Raises:
            ConfigError: something draws random numbers otherwise.
        """
        if microbatch.first is None:
            raise ConfigError(
                f"{OPTION} needs to know which samples a micro-batch has. Take batches from "
                "session.loader(…), or say it: MicroBatch(data, num_samples, first=place of its "
                "first sample in the global batch)."
            )
        before = self.generators()
        seed = mixed_seed(self._seed, self._name, step)
        torch.default_generator.manual_seed(seed)
        self._num_samples = max(microbatch.num_samples, 1)
        steps = self._draw(), self._draw()
        words = sample_words(microbatch.first, self._num_samples, steps, self._device)
        self._samples = Words(*(one.roll(shift) for one in words)) if shift else words  # pyright: ignore[reportAttributeAccessIssue]
        self._calls, self._forward = 0, None
        try:
            with self._in_place_of_torch():
                yield
            self._refuse_drawn(seed, before[1:])
        finally:
            self._samples, self._num_samples = Words(0, 0), 0
            for generator, state in zip(self._generators, before, strict=True):
                generator.set_state(state)

    def end_forward(self) -> None:
        """Note that the loss is known; what is computed from here on is computed again."""
        self._forward = self._calls, self.generators()

    def generators(self) -> list[torch.Tensor]:
        """The states of the host's generator and the device's own, which are on the host too."""
        return [one.get_state() for one in self._generators]

    def _refuse_drawn(self, seed: int, on_device: list[torch.Tensor]) -> None:
        """Refuse random numbers that are not this class's own."""
        if self._forward is None:
            self.end_forward()
        assert self._forward is not None
        num_calls, states = self._forward
        expected = torch.Generator().manual_seed(seed)
        torch.empty(2 + num_calls, dtype=torch.int64, device="cpu").random_(generator=expected)
        if not all(map(torch.equal, states, [expected.get_state(), *on_device])):
            raise ConfigError(drawn_otherwise("the forward pass or the loss"))
        if not all(map(torch.equal, self.generators(), states)):
            raise ConfigError(
                f"{OPTION}: the backward pass draws random numbers that the forward pass has not "
                "drawn, in a hook, or where activations are computed again without the random "
                "numbers of the first time. Leave preserve_rng_state of torch.utils.checkpoint at "
                f"True, {REMEDY}"
            )
        if self.num_calls not in (None, num_calls):
            raise ConfigError(
                f"{OPTION} numbers the calls of dropout in a forward pass, and this one has "
                f"{num_calls}, where there have been {self.num_calls}: a layer was passed by, or a "
                "loop is as long as the samples of the micro-batch, so that numbers mean other "
                f"calls on other ranks. Call dropout equally often in each pass, {REMEDY}"
            )
        self.num_calls = num_calls

    @contextlib.contextmanager
    def _in_place_of_torch(self) -> Iterator[None]:
        # Attributes, and not a mode of torch: a mode would cost each operation of the model, and is
        # not there in the thread in which a GPU's backward pass computes activations again.
        originals = {name: getattr(functional, name) for name in WITH_MASKS}
        for name, original in originals.items():
            made = functools.partial(WITH_MASKS[name], original, self._dropped)
            setattr(functional, name, functools.wraps(original)(made))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(functional, name, original)

    def _dropped(self, x: torch.Tensor, p: float, sizes: Sequence[int]) -> torch.Tensor:
        """Which elements of ``x`` go, of shape ``sizes``, as long as that of ``x``.

        Raises:
            ConfigError: its first dim is not that of the samples.
        """
        rows, samples = x.shape[0] if x.ndim else 0, self._num_samples
        if is_dtensor(x) or x.is_nested or not rows or rows % samples:
            raise ConfigError(self.refusal(x.shape))
        own = [rows // samples, *sizes[1:]]
        if self.seen is not None:
            self._see(x.detach().reshape(samples, own[0], *x.shape[1:]))
        self._calls += 1
        return dropped(self._samples, self._draw(), own, p).view(list(sizes))

    def _draw(self) -> Words:
        self.draws += 1
        return words_of(int(torch.empty((), dtype=torch.int64, device="cpu").random_()))

    def _see(self, x: torch.Tensor) -> None:
        assert self.seen is not None
        x = x.float()
        dims = list(range(1, x.ndim))
        told = (x * signs(x.shape[1:], x.device)).sum(dims)
        shape = [x.shape[0] * x.shape[1], *x.shape[2:]]
        self.seen.append((told, x.square().sum(dims).sqrt(), self.refusal(shape)))

    def refusal(self, shape: Sequence[int]) -> str:
        """Say of a call of dropout that its rows are not those of samples."""
        samples, plural = self._num_samples, "s" * (self._num_samples != 1)
        return (
            f"{OPTION} draws for each sample by its rows, along the first dim. Dropout in "
            f"{calling_module(self._model)} is given a tensor of shape {tuple(shape)} in a "
            f"micro-batch of {samples} sample{plural}, whose first dim is not that of the samples, "
            "or of samples one after the other. Put samples first (batch_first=True; no dropout of "
            f"what all samples share, nor of rows picked from them), {REMEDY}"
        )


def drawn_otherwise(where: str, whose: str = "torch's") -> str:
    """Say that random numbers were drawn that no sample has for itself."""
    return (
        f"{OPTION} gives each sample dropout of its own, and {where} draws other random numbers "
        f"from {whose} generators, which would be others on another number of ranks: noise "
        "(torch.rand), a layer passed by at random, or dropout that is not called as "
        "torch.nn.functional.dropout (by its name alone, after `from torch.nn.functional import "
        f"dropout`; torch.dropout). Draw them in the dataset, call it so, {REMEDY}"
    )


def calling_module(model: nn.Module) -> str:
    """The name and class of the innermost module whose method is running."""
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            names = [name for name, one in model.named_modules() if one is module]
            return f"'{(names or [''])[0] or 'the model'}' ({type(module).__name__})"
        frame = frame.f_back
    return "the loss function"


# -- the functions of torch.nn.functional --------------------------------------------------------


def _dropout(
    original: Callable[..., torch.Tensor],
    drop: Drop,
    input: torch.Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> torch.Tensor:
    if not _drops(input, p, training):
        return original(input, p, training, inplace)
    return _without(input, drop(input, p, input.shape), p, inplace)


def _channels(
    own_ndim: int | None,
    original: Callable[..., torch.Tensor],
    drop: Drop,
    input: torch.Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> torch.Tensor:
    if not _drops(input, p, training):
        return original(input, p, training, inplace)
    # One sample without a dim for it has its channels first.
    batch = input.unsqueeze(0) if input.ndim == own_ndim else input
    mask = drop(batch, p, _of_channels(batch))
    return _without(input, mask.view(mask.shape[1:]) if batch is not input else mask, p, inplace)


def _alpha(
    by_channel: bool,
    original: Callable[..., torch.Tensor],
    drop: Drop,
    input: torch.Tensor,
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
) -> torch.Tensor:
    if not _drops(input, p, training):
        return original(input, p, training, inplace)
    mask = drop(input, p, _of_channels(input) if by_channel else input.shape)
    scale = ((_ALPHA**2 * p + 1) * (1 - p)) ** -0.5
    scaled = input.mul_(scale) if inplace else input * scale
    return scaled.masked_fill_(mask, -_ALPHA * scale).add_(_ALPHA * scale * p)


def _attention(
    original: Callable[..., torch.Tensor],
    drop: Drop,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention whose weights are written out, for no fused kernel takes a mask of its dropout."""
    if not _drops(query, dropout_p, True):
        return original(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    weights = (query * factor) @ key.transpose(-2, -1)
    if is_causal:
        if attn_mask is not None:
            raise ConfigError("scaled_dot_product_attention takes attn_mask or is_causal=True.")
        attn_mask = torch.ones(weights.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is None:
        weights = weights.softmax(-1)
    else:
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=weights.dtype).masked_fill_(
                attn_mask.logical_not(), -torch.inf
            )
        # Queries that see no key attend to nothing, as in torch's own.
        blind = (attn_mask == -torch.inf).all(-1, keepdim=True)
        weights = (weights + attn_mask.masked_fill(blind, 0.0)).softmax(-1).masked_fill(blind, 0.0)
    mask = drop(weights, dropout_p, weights.shape)
    return _without(weights, mask, dropout_p, False).to(value.dtype) @ value


WITH_MASKS: dict[str, Callable[..., torch.Tensor]] = {
    "dropout": _dropout,
    "dropout1d": functools.partial(_channels, 2),
    "dropout2d": functools.partial(_channels, None),
    "dropout3d": functools.partial(_channels, 4),
    "alpha_dropout": functools.partial(_alpha, False),
    "feature_alpha_dropout": functools.partial(_alpha, True),
    "scaled_dot_product_attention": _attention,
}
"""Functions of ``torch.nn.functional`` that drop elements, made of the function itself, of what
gives a mask, and of its own arguments."""


def _drops(input: torch.Tensor, p: float, training: bool) -> bool:
    return training and 0 < p < 1 and input.numel() > 0


def _without(x: torch.Tensor, mask: torch.Tensor, p: float, inplace: bool) -> torch.Tensor:
    scaled = x.mul_(1 / (1 - p)) if inplace else x * (1 / (1 - p))
    return scaled.masked_fill_(mask, 0.0)


def _of_channels(x: torch.Tensor) -> list[int]:
    return [*x.shape[:2], *[1] * (x.ndim - 2)]
