"""Small models and data sets that are awkward in one way each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from unipar.testing import masks

FEATURES, CLASSES, VOCABULARY, LENGTH = 6, 3, 11, 7
EVEN_LENGTH, LONG_LENGTH = 8, 10


class Samples(Dataset):
    """Tensors of one length; an item is a dict of their rows and its own ``index``."""

    def __init__(self, **columns: torch.Tensor) -> None:
        self.columns = {"index": torch.arange(len(next(iter(columns.values())))), **columns}

    def __len__(self) -> int:
        return len(self.columns["index"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: column[index] for name, column in self.columns.items()}

    def batch(self, indices: list[int]) -> dict[str, torch.Tensor]:
        """These samples, collated."""
        return {name: column[indices] for name, column in self.columns.items()}


def points(num_samples: int) -> Samples:
    """Points with labels that a linear model cannot tell."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, FEATURES, generator=generator)
    y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()
    return Samples(x=x, y=y)


def in_sequences(make: Callable[[], Samples]) -> Samples:
    """Samples whose points became sequences, each of one point at several distances, alike labeled.

    Args:
        make: gives samples with points ``x`` and labels ``y``.
    """
    data = make()
    x, y = data.columns["x"], data.columns["y"]
    distances = torch.linspace(0.6, 1.5, EVEN_LENGTH)
    data.columns["x"] = x[:, None] * distances[:, None]
    data.columns["y"] = y[:, None].repeat(1, EVEN_LENGTH)
    return data


def poisoned_points(num_samples: int, poisoned: int) -> Samples:
    """:func:`points`, of which one is not a number."""
    data = points(num_samples)
    data.columns["x"][poisoned] = math.nan
    return data


def sentences(num_samples: int, length: int = LENGTH) -> Samples:
    """Token rows of unequal length: labels after the end are -100, and some rows are all -100."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (num_samples, length), generator=generator)
    labels = (tokens * 3 + 1) % VOCABULARY
    lengths = torch.randint(0, length + 1, (num_samples,), generator=generator)
    labels[torch.arange(length)[None] >= lengths[:, None]] = -100
    return Samples(tokens=tokens, labels=labels)


def faces(num_samples: int) -> Samples:
    """Two-dimensional points on a ring, and the noise to make some from."""
    generator = torch.Generator().manual_seed(3)
    angle = torch.rand(num_samples, generator=generator) * 2 * math.pi
    real = torch.stack([angle.cos(), angle.sin()], dim=1)
    return Samples(real=real, noise=torch.randn(num_samples, 4, generator=generator))


def with_infinite_gradient(loss: torch.Tensor) -> torch.Tensor:
    """``loss`` as it is, and so finite, with a gradient that is not."""
    return _InfiniteGradient.apply(loss)  # pyright: ignore[reportReturnType]


class _InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * math.inf


class Block(nn.Module):
    """A residual block, so that there is something to wrap."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Network(nn.Module):
    """Blocks between two linear layers; its widths divide by no number of ranks."""

    def __init__(self, inputs: int = FEATURES, outputs: int = CLASSES, width: int = 9) -> None:
        super().__init__()
        self.inward = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.outward = nn.Linear(width, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inward(x)
        for block in self.blocks:
            x = block(x)
        return self.outward(x)


class Recurrent(Network):
    """Reads a point's coordinates one after the other, by layers that want their weights together.

    One of them asks for it before each pass, as many models do; PyTorch does for the other.
    """

    def __init__(self) -> None:
        super().__init__(inputs=8)
        self.first = nn.GRU(1, 5, batch_first=True)
        self.second = nn.LSTM(5, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first.flatten_parameters()
        states, _ = self.second(self.first(x[..., None])[0])
        return super().forward(states[:, -1])


class DroppingBlock(Block):
    """Drops hidden units, and some of what it adds."""

    drop: Callable[[torch.Tensor, float], torch.Tensor]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(torch.tanh(self.up(self.norm(x))), 0.3)
        return x + self.drop(self.down(hidden), 0.1)


class Dropping(Network):
    """Blocks with dropout, and one before them."""

    def __init__(self) -> None:
        super().__init__()
        width = self.outward.in_features
        self.blocks = nn.ModuleList(DroppingBlock(width) for _ in range(2))
        for block in self.blocks:
            assert isinstance(block, DroppingBlock)
            block.drop = self.drop

    def drop(self, x: torch.Tensor, p: float) -> torch.Tensor:
        return nn.functional.dropout(x, p, self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.inward(x), 0.5)
        for block in self.blocks:
            x = block(x)
        return self.outward(x)


class DroppingByHand(Dropping):
    """The same on whole global batches, one a step, with masks by hand."""

    step, call = -1, 0

    def drop(self, x: torch.Tensor, p: float) -> torch.Tensor:
        shape = len(x), 1, *x.shape[1:]
        gone = masks.dropped(0, "model", self.step, self.call, shape, p).view_as(x)
        self.call += 1
        return torch.where(gone, 0.0, x / (1 - p))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step, self.call = self.step + 1, 0
        return super().forward(x)


class Clamped(Network):
    """Changes weights of its own before it computes with them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.outward.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class PartlyUsed(Network):
    """Has a layer that a batch may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor, extra: bool = True) -> torch.Tensor:
        logits = super().forward(x)
        return logits + self.extra(x) if extra else logits


class ScaledBlock(Block):
    """A block that has a parameter of its own beside its layers', as low-rank adapters have."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


class Frozen(Network):
    """Trains nothing of its first layer and of half a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ScaledBlock(self.outward.in_features) for _ in range(2))
        self.inward.requires_grad_(False)
        self.blocks[0].get_submodule("up").requires_grad_(False)


class Buffered(nn.Module):
    """BatchNorm whose statistics are fixed, and a buffer of its own."""

    scale: torch.Tensor
    scratch: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = Network(outputs=9)
        self.norm = nn.BatchNorm1d(9).eval()
        self.head = nn.Linear(9, CLASSES)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 9))
        self.register_buffer("scratch", torch.full((9,), 0.25), persistent=False)
        assert self.norm.running_mean is not None
        self.norm.running_mean.copy_(torch.linspace(-0.2, 0.2, 9))

    def train(self, mode: bool = True) -> Buffered:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.net(x)
        x = self.norm(x.flatten(0, -2)).view(x.shape)
        return self.head(torch.tanh(x * self.scale + self.scratch))


class Normalized(nn.Module):
    """BatchNorm whose statistics follow the batches."""

    def __init__(self) -> None:
        super().__init__()
        # No bias: its gradient would be rounding error, which AdamW makes a step of.
        self.inward = nn.Linear(FEATURES, 9, bias=False)
        self.norm = nn.BatchNorm1d(9)
        self.outward = nn.Linear(9, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outward(torch.tanh(self.norm(self.inward(x))))


class Tied(nn.Module):
    """A language model whose embedding is its output layer too."""

    def __init__(self, width: int = 9) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Attention(nn.Module):
    """Grouped queries: two heads of them share each head of keys and values.

    Queries and keys are turned by their positions where these are given.
    """

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = heads, kv_heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width // heads * kv_heads, bias=False)
        self.v = nn.Linear(width, width // heads * kv_heads)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, cos: Any = None, sin: Any = None) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k = self.k(x).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
        v = self.v(x).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
        if cos is not None:
            q, k = (_turned(t, cos, sin) for t in (q, k))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class DecoderBlock(nn.Module):
    """Attention and a gated feed-forward layer, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.norm_attention = nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(width, heads, kv_heads)
        self.norm_feed = nn.LayerNorm(width)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, cos: Any = None, sin: Any = None) -> torch.Tensor:
        x = x + self.attention(self.norm_attention(x), cos, sin)
        normed = self.norm_feed(x)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    """A decoder of the usual kind, whose layers divide among two ranks; its embeddings are tied.

    So do its sequences, of :data:`EVEN_LENGTH`.
    """

    def __init__(self, width: int = 16, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY + 1, width)
        self.positions = nn.Embedding(EVEN_LENGTH, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads, kv_heads) for _ in range(2))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, VOCABULARY + 1, bias=False)
        self.head.weight = self.tokens.weight

    def forward(
        self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        if position_ids is None:
            x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        else:
            x = self.tokens(tokens) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LongDecoder(nn.Module):
    """A decoder of sequences of any length, that may be told where in them its tokens stand.

    It computes its own loss, of each output with the label after it, as models of transformers do.
    """

    def __init__(self, width: int = 16, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY + 1, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads, kv_heads) for _ in range(2))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, VOCABULARY + 1, bias=False)
        self.frequencies = [0.5 ** (4 * i) for i in range(width // heads // 2)]

    def forward(
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
    ) -> Any:
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
        frequencies = torch.tensor(self.frequencies, device=tokens.device)
        angles = position_ids[:, None, :, None] * frequencies
        x, cos, sin = self.tokens(tokens), angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), shift_labels.flatten())
        return {"loss": loss, "logits": logits}


class Experts(nn.Module):
    """Small layers, each parameter with a row for each of them."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.num_experts = number
        self.up = nn.Parameter(torch.randn(number, 6, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(number, width, 6) / width**0.5)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        # All experts for each token, so that no shape depends on what the router says.
        chosen = nn.functional.one_hot(top_k_index, self.num_experts).to(top_k_weights.dtype)
        weights = (chosen * top_k_weights.unsqueeze(-1)).sum(1)
        inner = torch.tanh(torch.einsum("tw,eiw->tei", hidden_states, self.up))
        made = torch.einsum("tei,ewi->tew", inner, self.down)
        return (made * weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


class Mixture(nn.Module):
    """Experts, of which a router gives each token to two. Most tokens go to the first of them."""

    def __init__(self, width: int, number: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, number)
        self.experts = Experts(width, number)
        with torch.no_grad():
            self.router.bias.copy_(torch.linspace(1.0, -1.0, number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        weights, index = self.router(tokens).float().softmax(-1).topk(2, dim=-1)
        return self.experts(tokens, index, weights).view_as(x)


class MixedBlock(nn.Module):
    """A mixture of experts after a norm, added to its input; and how large its router's logits are.

    That is the square of their log-sum-exp, for each token, which a loss may keep small (Zoph et
    al., arXiv:2202.08906).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mixture = Mixture(width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.norm(x)
        return x + self.mixture(normed), self.mixture.router(normed).logsumexp(-1).square()


class Mixed(nn.Module):
    """A language model of mixtures; gives logits, and for each token what its routers cost."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(MixedBlock(width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        x, costs = self.embedding(tokens), torch.zeros((), device=tokens.device)
        for block in self.blocks:
            x, cost = block(x)
            costs = costs + cost
        return {"logits": self.head(x), "router": costs}


def with_experts(model: nn.Module) -> nn.Module:
    """Add a mixture to what a layer in the middle of a model gives, unless the model has experts.

    Returns:
        the model itself.
    """
    if any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules()):
        return model
    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Embedding))]
    layer = layers[len(layers) // 2]
    embeds = isinstance(layer, nn.Embedding)
    layer.add_module("mixture", Mixture(layer.weight.shape[1 if embeds else 0]))
    # No hook: of those, torch.compile has no guards, and blocks are compiled once for all.
    with_mixture: Any = _EmbeddingAndMixture if embeds else _LinearAndMixture
    layer.__class__ = with_mixture
    return model


class _LinearAndMixture(nn.Linear):
    mixture: Mixture

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = super().forward(input)
        return output + self.mixture(output)


class _EmbeddingAndMixture(nn.Embedding):
    mixture: Mixture

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = super().forward(input)
        return output + self.mixture(output)


class Sparse(nn.Module):
    """A language model whose embedding has sparse gradients."""

    def __init__(self, width: int = 9) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width, sparse=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embedding(tokens)))


class TakesDict(Network):
    def forward(self, inputs: dict[str, Any]) -> torch.Tensor:  # pyright: ignore
        return super().forward(inputs["x"]) * inputs["factors"][0]


class TakesTuple(Network):
    def forward(self, inputs: tuple[torch.Tensor, float]) -> torch.Tensor:  # pyright: ignore
        x, factor = inputs
        return super().forward(x) * factor


class TakesKeywords(Network):
    def forward(self, *, x: torch.Tensor, factor: float = 1.0) -> dict[str, Any]:  # pyright: ignore
        return {"logits": super().forward(x) * factor}
