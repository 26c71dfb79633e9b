"""Models that ranks compute in parts, held against plain PyTorch on one process."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from plain_scripts import batches, check, plainly, train
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from unipar.compat.dividing.splitting import Splitting
from unipar.compat.run import current
from unipar.world import Placement

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

UNEVEN = (7, 8, 6, 1, 9)
"""Parts of these are unlike; one sample is all of a batch."""


# -- in parts ------------------------------------------------------------------------------------


class Contrast(nn.Module):
    """Batch norms of both kinds of averages, one of them computed once more in backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.second = nn.Sequential(
            nn.Linear(8, 6), nn.BatchNorm1d(6, momentum=None, affine=False), nn.Linear(6, 4)
        )

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden: Any = checkpoint(self.first, x, use_reentrant=False)
        return {"hidden": hidden, "output": self.second(hidden)}


def contrast() -> list[float]:
    torch.manual_seed(1)

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        one, other = model(x), model(x[torch.randperm(len(x))].flip(1))
        near = one["output"] @ other["output"].T
        return functional.cross_entropy(near, torch.arange(len(x))) + one["hidden"].std()

    return train(Contrast(), loss_of, batches(4, 5, 7, 4))


def between() -> list[float]:
    """Other passes, of which some are of the whole, before that is computed once more."""
    torch.manual_seed(1)

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        output = model(x)["output"]
        few = model(x[:3])["output"].square().mean() if len(x) < 7 else 0.0
        with torch.no_grad():
            target = model(x.flip(1))["output"]
        return (output - target).square().mean() + few

    return train(Contrast(), loss_of, batches(8, 6, 8))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(9, 6), nn.LSTM(6, 5), nn.Linear(5, 9)

    def forward(self, words: torch.Tensor, state: Any = None) -> Any:
        output, state = self.rnn(self.embed(words), state)
        return self.head(output), state


def time_first() -> list[float]:
    """A state that is handed on from piece to piece of long sequences."""
    torch.manual_seed(1)
    text, state = torch.randint(9, (4, 7, 6)), None

    def loss_of(model: nn.Module, index: torch.Tensor) -> torch.Tensor:
        nonlocal state
        words = text[int(index)]
        output, state = model(words) if state is None else model(words, state)
        state = tuple(one.detach() for one in state)
        return functional.cross_entropy(output[:-1].flatten(0, 1), words[1:].flatten())

    return train(Recurrent(), loss_of, [torch.tensor(one) for one in range(4)])


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Tagger(nn.Module):
    """Its loss is a mean over words that are known, of which ranks have unlike numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)

    def forward(self, words: torch.Tensor, *, labels: torch.Tensor, sizes: list[int]) -> Output:
        weights = torch.tensor(sizes).float()[:, None, None]
        logits = self.head(self.embed(words).tanh() / weights)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)
        return Output(loss, logits)


def inner_loss() -> list[float]:
    torch.manual_seed(1)
    text = torch.randint(9, (4, 7, 3))
    text[:, 0] = 0

    def loss_of(model: nn.Module, index: torch.Tensor) -> torch.Tensor:
        words = text[int(index)]
        output = model(words, labels=words, sizes=list(range(1, 1 + len(words))))
        return output.loss + 0.01 * output.logits.square().sum()

    return train(Tagger(), loss_of, [torch.tensor(one) for one in range(4)])


class Random(nn.Module):
    """Dropout of all kinds, noise, and layers left out for samples, and for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.2, batch_first=True)
        self.second = nn.TransformerEncoderLayer(6, 3, 8, dropout=0.1)
        self.channels, self.alpha = nn.Dropout1d(0.3), nn.AlphaDropout(0.1)
        self.late = nn.Dropout(0.4)
        self.weight = nn.Parameter(torch.zeros(6))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.first(x.unsqueeze(1) + torch.linspace(0, 1, 5).view(5, 1))
        x = self.second(x.transpose(0, 1)).transpose(0, 1).contiguous()
        x = self.alpha(self.channels(x)) + 0.1 * torch.randn_like(x)
        kept = x.new_empty(len(x), 1, 1).bernoulli_(0.7)
        steps = torch.randint(1, 5, (len(x), 1, 1)) + torch.rand(len(x), 1, 1)
        x = x * kept / 0.7 + steps * (self.weight + 0.1 * torch.randn(6))
        if torch.rand(()) < 0.5:
            x = x.tanh()
        return self.late(x) if self.calls > 5 else x


def randomly() -> list[float]:
    torch.manual_seed(1)
    return train(Random(), lambda model, x: model(x).square().mean(), batches(7, 8, 8, 6, 9, 8, 7))


def penalties() -> list[float]:
    """A critic's gradient penalty through both networks, and gradients of weights with a graph."""
    torch.manual_seed(1)
    maker = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    making = torch.optim.SGD(maker.parameters(), lr=0.02)
    judging = torch.optim.SGD(critic.parameters(), lr=0.02)
    first, last = list(critic.parameters())[0:3:2]
    found = []
    for x in batches(*UNEVEN):
        made = maker(torch.randn_like(x))
        inputs = (0.5 * x + 0.5 * made.detach()).requires_grad_()
        slope = torch.autograd.grad(critic(inputs).sum(), inputs, create_graph=True)[0]
        loss = critic(made.detach()).mean() - critic(x).mean()
        loss = loss + (slope.norm(dim=1) - 1).pow(2).mean()
        steep = torch.autograd.grad(loss, last, create_graph=True, retain_graph=True)[0]
        judging.zero_grad()
        (loss + steep.square().sum()).backward()
        judging.step()
        making.zero_grad()
        fooled = -critic(made).mean() + 0.1 * first.square().sum()
        fooled.backward()
        making.step()
        found += [loss.item(), fooled.item(), steep.norm().item()]
    weights = [*maker.parameters(), *critic.parameters()]
    return found + [one.double().sum().item() for one in weights]


class Late(nn.Module):
    """It drops weights in a pass that is not tried before, which are as long as a part of six."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(6, 6), nn.Linear(6, 3), 0

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.first(x).tanh(), 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        dropped: Any = checkpoint(self.drop, x, use_reentrant=False)
        weight: torch.Tensor = self.second.weight
        if self.calls > 5:
            weight = functional.dropout(weight, 0.3)
        return functional.linear(dropped, weight, self.second.bias)


def late() -> list[float]:
    torch.manual_seed(1)
    return train(Late(), lambda model, x: model(x).square().mean(), batches(*[6] * 7))


class Doubled(torch.autograd.Function):
    """It learns twice as fast."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * grads[0]


class ByFunctions(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, Doubled.apply(super().forward(input)))


def by_functions() -> list[float]:
    torch.manual_seed(1)
    return train(ByFunctions(6, 3), lambda model, x: model(x).square().mean(), batches(*[6] * 5))


class Deepening(nn.Module):
    """It computes in other ways later on, and drops weights, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.calls = nn.Linear(6, 6), nn.BatchNorm1d(6), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = functional.dropout(self.norm(x).unsqueeze(1).expand(-1, 2, -1), 0.2).flatten(0, 1)
        for _ in range((0, 0, 1, 0, 2, 1, 3)[self.calls - 1]):
            weight = functional.dropout(self.linear.weight, 0.3)
            x = functional.linear(x, weight, self.linear.bias).tanh()
        return x + 0.1 * torch.randn_like(x.t()).t()


def deepening() -> list[float]:
    torch.manual_seed(1)
    return train(Deepening(), lambda model, x: model(x).square().mean(), batches(*[6] * 7))


class Forgetful(nn.Module):
    """It computes activations again in the backward pass, and draws the same as before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = x + torch.randn_like(x)
        for number, layer in enumerate(self.layers):
            x = checkpoint(partial(self.block, layer), x, use_reentrant=number == 1)
        return x

    def block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(layer(x).tanh() * torch.rand_like(x), 0.3)


def forgetful() -> list[float]:
    torch.manual_seed(1)
    return train(Forgetful(), lambda model, x: model(x).square().mean(), batches(*UNEVEN))


class Dropping(nn.Module):
    """What it computes again in the backward pass drops elements, and may normalize."""

    def __init__(self, norm: type[nn.Module], *, reentrant: bool) -> None:
        super().__init__()
        self.linear, self.reentrant = nn.Linear(6, 6), reentrant
        self.block = nn.Sequential(nn.Linear(6, 6), norm(6), nn.Dropout(0.3))

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.block, self.linear(x), use_reentrant=self.reentrant)


def dropping(norm: type[nn.Module], reentrant: bool) -> list[float]:
    """The last pass is tried after it, and before its backward pass."""
    torch.manual_seed(1)

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = (model(x) - x).square().mean()
        with torch.no_grad():
            model.eval()(x[:3])
            model.train()(x[:5])
        return loss

    # Parts of the first are as long as rows, so that the graph of the last is another.
    return train(Dropping(norm, reentrant=reentrant), loss_of, batches(12, 12, 9))


class Unrolled(nn.Module):
    """It drops elements of rows that were flattened with time first, and of samples twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.stack([x, 2 * x, x.cos()])
        rows = functional.dropout(self.linear(steps.flatten(0, 1)), 0.3)
        twice = functional.dropout(self.linear(x.repeat(2, 1)), 0.2).unflatten(0, (2, -1))
        return rows.view(3, -1, 6).mean(0) * (1 + self.gate) + twice.sum(0)


def unrolled() -> list[float]:
    torch.manual_seed(1)
    return train(Unrolled(), lambda model, x: model(x).square().mean(), batches(*UNEVEN))


class Caching(nn.Module):
    """It keeps masks by the length of sequences, and a table that it has made once."""

    table: torch.Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.masks: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(6.0).cos()
        if len(x[0]) not in self.masks:
            self.masks[len(x[0])] = torch.ones(len(x[0]), len(x[0])).tril()
        return self.masks[len(x[0])] @ self.linear(x + self.table)


def caching() -> list[float]:
    torch.manual_seed(1)
    xs = [one.unflatten(0, (-1, size)) for size in (3, 2, 3, 4) for one in batches(6 * size)]
    return train(Caching(), lambda model, x: model(x).square().mean(), xs)


class Chosen(nn.Module):
    """It makes something of samples that are marked alone; so does its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, marked: torch.Tensor) -> torch.Tensor:
        found = self.linear.bias.expand(len(x), 1).clone()
        if marked.any():
            found[marked] = self.linear(x[marked])
        return found


def chosen() -> list[float]:
    torch.manual_seed(1)
    first, second, found = nn.Linear(6, 6), Chosen(), []
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (first, second)]
    for number, x in enumerate(batches(*[8] * 6)):
        marked = torch.arange(8) < 4 if number in (2, 4) else torch.ones(8, dtype=torch.bool)
        marked = ~marked if number == 4 else marked
        for one in optimizers:
            one.zero_grad()
        loss = second(first(x).tanh(), marked).square().mean()
        loss.backward()
        for one in optimizers:
            one.step()
        found.append(loss.item())
    return found + [p.sum().item() for one in (first, second) for p in one.parameters()]


class Layered(nn.Module):
    """Recurrent layers that drop elements between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(6, 6, 3, dropout=0.3, batch_first=True, proj_size=2)
        self.second = nn.GRU(2, 3, 2, dropout=0.2, batch_first=True, bidirectional=True, bias=False)
        self.third = nn.RNN(6, 2, 2, dropout=0.4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, (_, cell) = self.first(x, (torch.zeros(3, len(x), 2), torch.ones(3, len(x), 6)))
        x, hidden = self.second(x)
        kept = cell.mean((0, 2)) + hidden.sum((0, 2))
        return self.third(x)[0] + kept[:, None, None]


def layered() -> list[float]:
    torch.manual_seed(1)
    xs = [one.unflatten(0, (-1, 3)) for one in batches(21, 24, 18, 27)]
    return train(Layered(), lambda model, x: model(x).square().mean(), xs)


class Causal(nn.Module):
    """Attention by an infinite mask in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Linear(6, 6)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.queries(x) @ x.transpose(1, 2) + self.mask
        return scores.softmax(-1) @ x


def causal() -> list[float]:
    torch.manual_seed(3)
    xs = [torch.randn(8, 4, 6) for _ in range(3)]
    return train(Causal(), lambda model, x: model(x).square().mean(), xs)


def replaced() -> list[float]:
    """A model that gets another head, and is thawed: an optimizer for each stage."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    found, xs = [], batches(8, 7, 8, 8)
    for stage in range(3):
        if stage == 1:
            model[0].requires_grad_(False)
            model[2] = nn.Linear(5, 2)
        model[0].requires_grad_(stage != 1)
        optimizer = torch.optim.Adam(model[2 * (stage == 1) :].parameters(), 0.05)
        for x in xs:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        del optimizer
    return found


def masked_words() -> list[float]:
    """A model of transformers, whose outputs are mappings and dataclasses in one."""
    import transformers

    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=12, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config)

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        words = x.mul(4).long().abs() % 9
        output: Any = model(input_ids=words, labels=words)
        return output.loss + 0.1 * output["logits"].square().mean()

    return train(model, loss_of, batches(8, 7, 8))


class Clips(nn.Module):
    """Its rows are frames, four of a clip, of which one learns from the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 3), nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        frames = x.view(-1, 4, 6)
        found = self.norm(self.linear((frames + frames.roll(1, 1)).flatten(0, 1)))
        return found, found.view(-1, 4, 3).mean(1)


def clips() -> list[float]:
    """Parts are of whole clips, also where ranks have unlike numbers of them."""
    torch.manual_seed(1)

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        frames, clips = model(x)
        return frames.square().mean() + (clips - 1).square().mean()

    return train(Clips(), loss_of, batches(16, 16, 12, 12, 16, 12, 16, 12, 24))


def frozen_norm() -> list[float]:
    """A batch norm that evaluates has its statistics in the graph, beside one that learns them."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))

    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.train()
        model[1].eval()
        return (model(x) - x[:, :4]).square().mean()

    return train(model, loss_of, batches(8, 8, 8, 8, 5, 8))


SEEN: list[int] = []
"""How many samples were computed in each pass."""


class Marked(nn.Module):
    """Its loss is a mean over what is marked, which is nothing in some parts."""

    def __init__(self, by: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.by = nn.Linear(6, 3), by

    def forward(self, x: torch.Tensor, marked: torch.Tensor) -> torch.Tensor:
        SEEN.append(len(x))
        return (self.linear(x).square().mean(1) * marked).sum() / self.by(marked)


def by_marks(by: Callable[[torch.Tensor], Any], marks: torch.Tensor) -> list[float]:
    torch.manual_seed(1)
    given = iter(marks)
    return train(Marked(by), lambda model, x: model(x, next(given)), batches(*[8] * len(marks)))


MARKS = torch.tensor([
    [1, 1, 0, 0, 1, 0, 1, 1], [1, 1, 1, 1, 0, 0, 0, 1], [1, 1, 0, 0, 1, 0, 1, 1],
    [1, 0, 1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0, 1, 0],
    [1, 1, 1, 1, 1, 1, 1, 1],
]).float()  # fmt: skip
COUNTS: list[Callable[[torch.Tensor], Any]] = [
    lambda marks: marks.sum(),
    lambda marks: marks.sum().clamp(min=1),
    lambda marks: (marks > 0).sum().clamp(min=1),
    lambda marks: marks.sum() + 1e-8,
    lambda marks: marks.sum() if marks.any() else torch.tensor(8.0),
]


def marked() -> list[float]:
    return [one for count in COUNTS for one in by_marks(count, MARKS)]


def weighted() -> list[float]:
    """By a sum of weights that some parts have less of than one."""
    torch.manual_seed(2)
    weights = torch.rand(9, 8).square()
    weights[0] += 0.5
    return by_marks(COUNTS[1], weights)


ONCE = torch.ones(4, 8)
ONCE[2, 4:] = 0
PARTLY = torch.ones(5, 8)
PARTLY[2, 2:4] = PARTLY[4, 2:4] = 0
"""What one part has less of, or nothing, in passes that are not tried before."""


def counted_by_python() -> list[float]:
    return by_marks(lambda marks: max(marks.sum(), 1), ONCE)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rnn = nn.Linear(6, 6), nn.GRU(2, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = 1 + (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
        steps = self.linear(x).unflatten(1, (3, 2))
        packed = pack_padded_sequence(steps, lengths, batch_first=True, enforce_sorted=False)
        packed, last = self.rnn(packed)
        rows, _ = pad_packed_sequence(packed, batch_first=True, total_length=3)
        return torch.cat((rows.flatten(1), last[0]), 1)


def packed() -> list[float]:
    torch.manual_seed(1)
    return train(Packed(), lambda model, x: model(x).square().mean(), batches(8, 7, 8))


class Laid(nn.Module):
    """What it gives lies in memory in other orders than that of the dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.conv(x)
        rows = found.flatten(1).t().contiguous().t()
        return found, found > 0, rows, torch.fft.fft(rows)


def laid_out() -> list[float]:
    torch.manual_seed(1)

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        images = x.view(-1, 2, 3, 6).to(memory_format=torch.channels_last)
        found, above, rows, waves = model(images)
        pixels = found.permute(0, 2, 3, 1).view(-1, 4)
        pixels[above.permute(0, 2, 3, 1).view(-1, 4)] *= 2
        return pixels.square().mean() + rows.t().view(-1).cos().mean() + waves.abs().mean()

    return train(Laid(), loss_of, batches(48, 54, 48))


def renormed() -> list[float]:
    """Weights that hooks of torch make of others, in attributes, before each pass."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        # Scripts go on with it.
        warnings.simplefilter("ignore", FutureWarning)
        first = nn.utils.weight_norm(nn.Linear(6, 5))
    model = nn.Sequential(first, nn.Tanh(), nn.utils.spectral_norm(nn.Linear(5, 3)))
    return train(model, lambda model, x: model(x).square().mean(), batches(4, 5, 7, 4))


IN_PARTS = [
    contrast, time_first, inner_loss, randomly, penalties, deepening, forgetful, caching, layered,
    unrolled, chosen, replaced, causal, masked_words, clips, frozen_norm,
    marked, weighted, between, laid_out, late, by_functions, packed, renormed,
]  # fmt: skip


def in_parts(act: Callable[[], list[float]]) -> list[float]:
    """Act, and see that a batch is divided at all."""
    made, own = list[None](), Splitting._in_parts

    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append(None)
        return own(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Splitting, "_in_parts", noted)
        found = act()
    assert made
    return found


@pytest.mark.parametrize("act", IN_PARTS, ids=lambda one: one.__name__)
def test_two_ranks_compute_parts_of_what_one_process_does(
    world_pool: Any, act: Callable[[], list[float]]
) -> None:
    check(world_pool(2).run(plainly, "ddp", partial(in_parts, act)), act)


@pytest.mark.parametrize(
    ("norm", "reentrant"),
    [(nn.Identity, True), (nn.Identity, False), (nn.BatchNorm1d, False)],
)
def test_a_trial_between_a_pass_and_its_backward_pass_leaves_what_is_drawn_again(
    world_pool: Any, norm: type[nn.Module], reentrant: bool
) -> None:
    found = world_pool(2).run(plainly, "ddp", dropping, norm, reentrant)
    check(found, partial(dropping, norm, reentrant))


def sizes(marks: torch.Tensor) -> list[float]:
    """How many samples the last pass of each step is of."""
    SEEN.clear()
    by_marks(COUNTS[1], marks)
    return [float(SEEN[-1])]


@pytest.mark.parametrize(("marks", "size"), [(torch.ones(3, 8), 4), (MARKS[:4], 8), (PARTLY, 4)])
def test_a_pass_is_of_the_whole_where_counts_of_parts_may_not_add_up(
    world_pool: Any, marks: torch.Tensor, size: int
) -> None:
    for one in world_pool(2).run(plainly_with, "ddp", sizes, marks):
        assert one == ([size], [])


def test_where_each_part_has_another_kind_of_loss_the_whole_is_computed(world_pool: Any) -> None:
    told = "it gives a loss that is a sum over samples that is divided afterwards"
    check(world_pool(2).run(plainly, "ddp", counted_by_python), counted_by_python, told)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "horovod"])
@pytest.mark.parametrize("act", IN_PARTS[:4], ids=lambda one: one.__name__)
def test_so_do_they_under_other_strategies(
    world_pool: Any, act: Callable[[], list[float]], strategy: str
) -> None:
    # Where weights are divided, what a model gives is tried as it is first called alone.
    told = "it was called otherwise at first, when its weights were whole"
    stated = act is time_first and strategy == "fsdp"
    check(world_pool(2).run(plainly, strategy, act), act, told if stated else "")


@pytest.mark.thorough
@pytest.mark.parametrize("act", IN_PARTS, ids=lambda one: one.__name__)
def test_three_ranks_compute_unlike_parts(world_pool: Any, act: Callable[[], list[float]]) -> None:
    check(world_pool(3).run(plainly, "ddp", partial(in_parts, act)), act)


# -- whole on each rank --------------------------------------------------------------------------


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)


class Keeping(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.activations = self.linear(x)
        return self.activations.relu()


class Moving(Base):
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.linear(x)
        self.mean.lerp_(output.detach().mean(0), 0.1)
        return output


class Renormalized(Base):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 6, max_norm=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.table((x[:, 0] > 0).long())


class Clamped(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.data.clamp_(-0.2, 0.2)
        return self.linear(x)


class Attending(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.linear(x)
        return (output @ output.T).softmax(1) @ output


class Noisy(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + torch.poisson(x.exp())


class Mixing(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * float(np.random.rand()) * random.random()


class InPlace(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.mul_(0.5))


class OddLoss(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean().sqrt()


class Divided(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean(1).sum() / torch.tensor(3.0)


class Normed(Doubled):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] / grads[0].norm()


class Perturbed(Normed):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] + torch.randn_like(grads[0])


class Backwards(Base):
    """It compares samples in its backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, Normed.apply(self.linear(x)))


class DrawsBack(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, Perturbed.apply(self.linear(x)))


class Gated(Base):
    """What compares samples is behind a gate that is zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.linear(x)
        return output + self.gate * (output - output.roll(1, 0)).square()


class Outliers(Base):
    """Samples that are far from the mean of a batch do not count; in no batch here there is one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.linear(x)
        far = output.square().mean(1, keepdim=True)
        return output * (far < 1000 * far.mean())


class Growing(Base):
    """What relates samples has no weight yet, by a buffer that a script fills."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("beta", torch.zeros(()))
        self.rest = nn.Sequential(nn.LazyBatchNorm1d(), nn.Dropout(0.1))
        self.rest(self.linear(torch.randn(4, 6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.rest(self.linear(x))
        return output + self.beta * (output - output.mean(0)).square()


class Cache:
    def __init__(self, keys: torch.Tensor) -> None:
        self.keys = keys


class Caches(Base):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return {"output": self.linear(x), "pairs": [(x, Cache(x))]}


GENERATOR = torch.Generator()


class ByItself(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + torch.randn(x.shape, generator=GENERATOR)


class Logging(Base):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.linear(x)
        self.seen.append(output.max().item())
        return output * (1 + self.seen[-1])


class Hooked(Base):
    def __init__(self) -> None:
        super().__init__()
        self.linear.register_forward_hook(lambda module, args, output: output - output.mean(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Spread(nn.Module):
    """A little of its loss relates samples, less than half precision rounds by."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        errors = (self.linear(x) - x[:, :4]).float().square().mean()
        spread = self.other(x).float()
        return 10 * errors + 0.02 * (spread - spread.roll(1, 0)).square().mean()


class Autocast(nn.Module):
    """Under autocast; by what runs there alone, and by what computes in half precision itself."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers, self.how = (
            nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)),
            how,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SEEN.append(len(x))
        if self.how == "needs":
            x = (x * 2).bfloat16()
        if self.how == "within":
            with torch.autocast("cpu", torch.bfloat16):
                return self.layers(x)
        return self.layers(x)


def autocast(model: nn.Module, *, half: bool = False) -> list[float]:
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for x in batches(8, 8, 8):
        SEEN.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=not half):
            loss = model(x.bfloat16() if half else x).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def spread() -> list[float]:
    torch.manual_seed(1)
    return autocast(Spread())


def in_half(how: str) -> list[float]:
    torch.manual_seed(1)
    model = Autocast(how)
    return [*autocast(model.bfloat16() if how == "weights" else model, half=how == "weights"),
            float(SEEN[-1])]  # fmt: skip


def test_what_half_precision_rounds_away_shows_all_the_same(world_pool: Any) -> None:
    told = "it gives a loss that is not the mean or the sum of those of parts"
    check(world_pool(2).run(plainly, "ddp", spread), spread, told)


@pytest.mark.parametrize("how", ["around", "within", "needs", "weights"])
def test_models_in_half_precision_are_divided(world_pool: Any, how: str) -> None:
    *expected, _ = in_half(how)
    for losses, told in world_pool(2).run(plainly_with, "ddp", in_half, how):
        assert losses == [*(pytest.approx(one, rel=2e-2) for one in expected), 4]
        assert not told


RELATED = "it sets the samples of a batch in relation to each other"
BY_MEAN = (
    "or they do not lie along the first or second dimension of its first input, as by a mean of"
)
WHOLE: list[tuple[type[nn.Module], str]] = [
    (Keeping, "keeps what it computes of a batch in attributes (activations)"),
    (Moving, "keeps what it computes of a batch in buffers (mean)"),
    (Renormalized, "changes its weights as it computes (table.weight)"),
    (Clamped, "changes its weights as it computes (linear.weight)"),
    (Attending, RELATED),
    (Noisy, "draws random numbers that have no samples, or by which others are drawn"),
    (Mixing, "draws random numbers by random or NumPy"),
    (InPlace, "changes what it is given in place"),
    (OddLoss, "gives a loss that comes to one number by SqrtBackward"),
    (Divided, "divided by a tensor that is not the sum of those of parts, as by a constant"),
    (Backwards, f"{RELATED}, or they do not lie along the first or second dimension of its first"),
    (DrawsBack, "draws random numbers in its backward pass"),
    (Gated, "as its gradients show"),
    (Outliers, BY_MEAN),
    (Growing, BY_MEAN),
    (Caches, "it gives an object of the class Cache, of which it is not known how parts make"),
    (ByItself, "draws random numbers by a generator of its own"),
    (Logging, "keeps what it computes of a batch in attributes (seen)"),
    (Hooked, "hooks in it are to see whole batches"),
]


def whole() -> list[float]:
    found = []
    for kind, _ in WHOLE:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        GENERATOR.manual_seed(1)
        found += train(kind(), squares, batches(*[4] * 11))
    return found


def squares(model: Any, x: torch.Tensor) -> torch.Tensor:
    output = model(x)
    return (output["output"] if isinstance(output, dict) else output).square().mean()


def test_what_parts_do_not_make_each_rank_computes_whole_and_says_why(world_pool: Any) -> None:
    found, expected = world_pool(2).run(plainly, "ddp", whole), whole()
    for rank, one in enumerate(found):
        assert isinstance(one, tuple), one
        assert one[0] == pytest.approx(expected, rel=1e-5, abs=1e-7)
        assert len(one[1]) == (0 if rank else len(WHOLE)), one[1]
    for line, (kind, why) in zip(found[0][1], WHOLE, strict=True):
        assert f"each of 2 ranks computes all of every batch by {kind.__name__}: " in line
        assert why in line
        assert line.endswith("Results are those of one process, and no faster.")


def hooked_later() -> list[float]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    found = []
    for step, x in enumerate(batches(4, 4, 4)):
        if step == 1:
            model[0].register_forward_hook(lambda module, args, output: seen.append(output))
        optimizer.zero_grad()
        loss = model(x).square().mean() + sum(one.std() for one in seen)
        loss.backward()
        optimizer.step()
        found += [loss.item(), len(seen)]
        seen.clear()
    return found


def by_parts_of_it() -> list[float]:
    """By a method other than forward, by two networks at once, by tensors in no module."""
    torch.manual_seed(1)
    one, other, weight = nn.Linear(6, 6), nn.Linear(6, 1), torch.ones(6, requires_grad=True)
    both = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.05)
    alone = torch.optim.LBFGS([weight], lr=0.05)
    found = []
    for x in batches(4, 5):
        both.zero_grad()
        loss = other(one(x)).square().mean()
        loss.backward()
        both.step()

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            alone.zero_grad()
            found = (x @ weight).square().mean()
            found.backward()
            return found

        found += [loss.item(), float(alone.step(closure))]
    return found


class Filling(Base):
    def forward(self, x: torch.Tensor, into: list[torch.Tensor]) -> torch.Tensor:
        into.append(self.linear(x))
        return into[0].tanh()


def filling() -> list[float]:
    torch.manual_seed(1)

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        into: list[torch.Tensor] = []
        return model(x, into).mean() + into[0].square().mean()

    return train(Filling(), loss_of, batches(8, 8, 6))


def test_what_a_model_is_given_to_fill_is_of_the_whole(world_pool: Any) -> None:
    told = "it fills lists, dicts or other objects that it is given"
    check(world_pool(2).run(plainly, "ddp", filling), filling, told)


def adapting() -> list[float]:
    """Weights of two tasks, made of those that are learned by a step of each."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer, found = torch.optim.Adam(model.parameters(), lr=0.01), []
    for x, y in zip(batches(8, 8, 8), batches(8, 6, 8), strict=True):
        total = torch.zeros(())
        for sign in (1, -1):
            weights: dict[str, torch.Tensor] = dict(model.named_parameters())
            loss = (functional_call(model, weights, (x,)) - sign).square().mean()
            grads = torch.autograd.grad(loss, tuple(weights.values()), create_graph=True)
            pairs = zip(weights.items(), grads, strict=True)
            fast = {name: one - 0.1 * grad for (name, one), grad in pairs}
            total = total + (functional_call(model, fast, (y,)) - sign).square().mean()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        found.append(total.item())
    return found + [p.sum().item() for p in model.parameters()]


def test_weights_that_are_made_of_others_have_the_whole_computed(world_pool: Any) -> None:
    told = "it has other weights than when it was first called, as by functional_call"
    check(world_pool(2).run(plainly, "ddp", adapting), adapting, told)


def test_what_no_engine_trains_each_rank_trains_whole(world_pool: Any) -> None:
    told = "so each of 2 ranks trains by itself what it updates"
    check(world_pool(2).run(plainly, "ddp", by_parts_of_it), by_parts_of_it, told)


@pytest.mark.thorough
def test_a_hook_that_comes_later_sees_whole_batches(world_pool: Any) -> None:
    check(world_pool(2).run(plainly, "ddp", hooked_later), hooked_later, "hooks in it are to see")


def checkpointed() -> list[float]:
    torch.manual_seed(1)
    layers = nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.2)

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        found: Any = model(x) if len(x) == 7 else checkpoint(model, x, use_reentrant=False)
        return found.square().mean()

    return train(nn.Sequential(*layers), loss_of, batches(8, 8, 7, 8))


def test_what_a_script_has_computed_once_more_by_itself_is_of_the_whole(world_pool: Any) -> None:
    told = "the script calls it through torch.utils.checkpoint"
    check(world_pool(2).run(plainly, "ddp", checkpointed), checkpointed, told)


class Zero(Base):
    """It gives nothing at first, and what relates samples learns nothing: any parts would do."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 6)
        for one in (self.linear.weight, self.last.weight, self.last.bias):
            nn.init.zeros_(one)
        nn.init.ones_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.linear(x.cumsum(0)))


def zero() -> list[float]:
    torch.manual_seed(1)
    return train(Zero(), lambda model, x: (model(x) - x).square().mean(), batches(4, 4, 4))


def test_nothing_is_concluded_from_a_model_that_gives_the_same_for_all(world_pool: Any) -> None:
    check(world_pool(2).run(plainly, "ddp", zero), zero, RELATED)


class Flagged(Base):
    related = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.linear(x)
        return output - output.roll(1, 0) if self.related else output


def flagged() -> list[float]:
    """A script sets in a pass that is not tried for its number what relates samples."""
    torch.manual_seed(1)
    model, given = Flagged(), enumerate(batches(*[8] * 7), start=1)

    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.related |= next(given)[0] == 6
        return model(x).square().mean()

    return train(model, loss_of, batches(*[8] * 7))


def test_what_a_script_sets_is_tried_in_the_pass_that_follows(world_pool: Any) -> None:
    check(world_pool(2).run(plainly, "ddp", partial(in_parts, flagged)), flagged, RELATED)


class Prompted(Base):
    def forward(self, x: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        return self.linear(x + prompt)


def prompted() -> list[float]:
    """What is learned beside the model is given to it."""
    torch.manual_seed(1)
    model, prompt, found = Prompted(), torch.zeros(6, requires_grad=True), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x in batches(8, 8, 8):
        loss = model(x, prompt).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert prompt.grad is not None
        prompt = (prompt - 0.05 * prompt.grad).detach().requires_grad_()
        found += [loss.item(), prompt.sum().item()]
    return found


def test_what_learns_beside_the_batch_has_the_whole_computed(world_pool: Any) -> None:
    told = "it is given tensors beside the batch that need gradients"
    check(world_pool(2).run(plainly, "ddp", prompted), prompted, told)


# -- what a script is told, and what is refused --------------------------------------------------


class Drops(Base):
    """By a function that is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.dropout(self.linear(x), 0.5, self.training)


def drops() -> list[float]:
    torch.manual_seed(1)
    model = Drops()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    kept = []
    for x in batches(400, 400):
        output = model(x)
        optimizer.zero_grad()
        output.square().sum().backward()
        optimizer.step()
        one, other = (output == 0).flatten().chunk(2)
        kept += [float((one & ~other).sum()), float((one & other).sum()), torch.rand(()).item()]
    return [*kept, model.calls]


def test_ranks_drop_others_and_then_draw_the_same(world_pool: Any) -> None:
    first, second = world_pool(2).run(plainly, "ddp", drops)
    assert first[0] == second[0]
    for apart in (0, 1, 3, 4):
        assert first[0][apart] == pytest.approx(300, abs=75)
    assert first[0][2] != first[0][5]
    assert first[0][-1] == 2
    (line,) = first[1]
    assert "Drops draws random numbers, as for dropout: each rank draws others" in line


def apart(what: str) -> list[float]:
    torch.manual_seed(1)
    rank = current.placement().rank
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    xs = batches(4, 4)
    if what == "batch":
        xs[1][3] += rank
    target = rank if what == "loss" else 0
    return train(model, lambda model, x: (model(x) - target).square().mean(), xs)


@pytest.mark.parametrize(("what", "said"), [("batch", "input 0"), ("loss", "the loss")])
@pytest.mark.parametrize("divides", [True, False])
def test_ranks_with_unlike_batches_are_refused(
    world_pool: Any, what: str, said: str, divides: bool
) -> None:
    act = partial(apart, what)
    for one in world_pool(2).run(plainly, "ddp", act if divides else partial(undivided, act)):
        assert f"ranks do not have the same batch ({said}" in one
        assert "Seed what it draws by, before anything is drawn: random.seed(0)" in one
        assert ("as in a closure" in one and "Set divide_batches: false" in one) is divides


def undivided(act: Callable[[], list[float]]) -> list[float]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("UNIPAR_DIVIDE_BATCHES", "false")
        return act()


def plainly_with(placement: Placement, strategy: str, act: Callable[..., Any], what: Any) -> Any:
    return plainly(placement, strategy, lambda: act(what))


CALLS = [0]


class Counting(Base):
    """It counts where none of its attributes leads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS[0] += 1
        return self.linear(x) / CALLS[0]


def counting() -> list[float]:
    torch.manual_seed(1)
    CALLS[0] = 0
    return train(Counting(), lambda model, x: model(x).square().mean(), batches(4, 4))


def test_a_model_that_keeps_what_it_computes_by_out_of_sight_is_refused(world_pool: Any) -> None:
    for one in world_pool(2).run(plainly, "ddp", counting):
        assert "Counting gives other results when it is run twice on one batch" in one
        assert "Set divide_batches: false in unipar.yaml" in one


def test_it_may_be_computed_whole_from_the_start(world_pool: Any) -> None:
    check(world_pool(2).run(plainly, "ddp", partial(undivided, counting)), counting)


class Turning(Base):
    """It compares samples from some step on, and not by a number that its graph shows."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.calls, self.how = 0, how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.linear(x)
        if self.how == "value":
            return output - output.roll(1, 0) * (x > 100)[:, :1]
        if self.how == "shape":
            return output[:, : 3 + int((x > 0)[:, 0].sum() > 1)]
        if self.how == "branch":
            return output - output.mean(0) if x[0, 0] < 0 else output
        self.calls += 1
        return output - output.mean(0) if self.calls > 2 else output


def turns(what: str) -> list[float]:
    torch.manual_seed(1)
    xs = [x.abs() for x in batches(4, 4, 4, 4, 6, 6, 6, 6)]
    xs[4][:3] *= -1
    xs[7] *= 1000
    return train(Turning(what), lambda model, x: model(x).square().mean(), xs)


@pytest.mark.parametrize(
    ("how", "said"), [("counter", RELATED), ("shape", "the shapes of what it"), ("branch", RELATED)]
)
def test_a_model_that_turns_out_otherwise_is_computed_whole_from_then_on(
    world_pool: Any, how: str, said: str
) -> None:
    check(world_pool(2).run(plainly_with, "ddp", turns, how), lambda: turns(how), said)


def test_one_of_which_steps_before_may_be_wrong_is_refused(world_pool: Any) -> None:
    for one in world_pool(2).run(plainly_with, "ddp", turns, "value"):
        assert (
            f"Turning computed each sample of a batch by itself, and does not any longer: {RELATED}"
            in one
        )
        assert "Set divide_batches: false in unipar.yaml" in one
