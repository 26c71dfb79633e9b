"""What sets the samples of a part of a batch in relation is found, and what does not is let be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from unipar.compat.sample_flow import SampleFlow
from unipar.compat.sample_rules import Coupled

SAMPLES, WIDTH, STEPS, CLASSES = 5, 6, 4, 3
Loss = Callable[["Given"], Any]


class Given:
    """A part of a batch, and what a model makes of it, followed."""

    def __init__(self, flow: SampleFlow) -> None:
        torch.manual_seed(0)
        self._flow = flow
        self._net = nn.Linear(WIDTH, CLASSES)
        self.x = torch.randn(SAMPLES, WIDTH)
        self.y = torch.randint(CLASSES, (SAMPLES,))
        self.w = torch.rand(SAMPLES)
        self.sequences = torch.randn(SAMPLES, STEPS, WIDTH)
        self.tokens = torch.randint(CLASSES, (SAMPLES, STEPS))
        self.images = torch.randn(SAMPLES, 3, 8, 8)
        self.time_first = torch.randn(STEPS, SAMPLES, WIDTH)
        given = [getattr(self, name) for name in vars(self) if not name.startswith("_")]
        flow.begin(given, SAMPLES, self)
        self.table = torch.randn(50, CLASSES)

    def net(self, x: Tensor) -> Tensor:
        """The output of a model, as engines compute it."""
        if (found := self._flow.coupled(x, reduced=True)) is not None:
            raise Refused(found)
        self._flow.pause()
        out = self._net(x)
        self._flow.go_on()
        self._flow.computed(out, x, SAMPLES)
        return out

    @property
    def out(self) -> Tensor:
        return self.net(self.x)

    @property
    def losses(self) -> Tensor:
        """One of each sample."""
        return functional.cross_entropy(self.out, self.y, reduction="none")


class Refused(Exception):
    """A model was given what sets samples in relation."""


@pytest.fixture
def flow() -> Iterator[SampleFlow]:
    made = SampleFlow(lambda: False)
    yield made
    made.stop()


def found(flow: SampleFlow, loss: Loss) -> Coupled | None:
    try:
        return flow.coupled(loss(Given(flow)), reduced=False)
    except Refused as refused:
        return refused.args[0]


def ce(g: Given, out: Tensor | None = None, **more: Any) -> Tensor:
    return functional.cross_entropy(g.out if out is None else out, g.y, **more)


def halves(g: Given, both: Tensor) -> Tensor:
    a, b = both.chunk(2)
    return functional.mse_loss(a, b.detach())


def scattered(g: Given) -> Tensor:
    hot = torch.zeros(SAMPLES, CLASSES).scatter_(1, g.y[:, None], 1.0)
    return -(hot * g.out.log_softmax(1)).sum(1).mean()


def looked_up(g: Given) -> Tensor:
    t = torch.randint(50, (SAMPLES,))
    return functional.mse_loss(g.out * g.table[t], torch.randn_like(g.out))


def dice(g: Given) -> Tensor:
    p, t = g.out.softmax(1), functional.one_hot(g.y, CLASSES).float()
    return (1 - (2 * (p * t).sum(1) + 1) / (p.sum(1) + t.sum(1) + 1)).mean()


def actor(g: Given) -> Tensor:
    logp = g.out.log_softmax(-1)
    ratio = (logp[torch.arange(len(g.x)), g.y] - logp.gather(1, g.y[:, None])[:, 0].detach()).exp()
    return -torch.min(ratio * g.w, ratio.clamp(0.8, 1.2) * g.w).mean() - 0.01 * logp.mean()


def real_and_fake(g: Given) -> Tensor:
    logits = g.net(torch.cat([g.x, torch.randn_like(g.x) + g.x]))
    real, fake = logits[:SAMPLES], logits[SAMPLES:]
    return functional.softplus(-real).mean() + functional.softplus(fake).mean()


def penalty(g: Given) -> Tensor:
    x = g.x.clone().requires_grad_(True)
    (grad,) = torch.autograd.grad(g.net(x).sum(), x, create_graph=True)
    return ((grad.norm(2, dim=1) - 1) ** 2).mean()


def mixed_at_random(g: Given) -> Tensor:
    index = torch.randperm(len(g.x))
    out = g.net(0.7 * g.x + 0.3 * g.x[index])
    return 0.7 * ce(g, out) + 0.3 * functional.cross_entropy(out, g.y[index])


def patches(g: Given) -> Tensor:
    cut = (
        g.images.reshape(SAMPLES, 3, 2, 4, 2, 4).permute(0, 2, 4, 3, 5, 1).flatten(1, 2).flatten(2)
    )
    kept = cut.argsort(-1)[..., :6]
    return g.net(torch.gather(cut, 2, kept)).square().mean(-1).sum(1).mean()


def by_class(g: Given) -> Tensor:
    weights = 1.0 / (torch.bincount(g.y, minlength=CLASSES).float() + 1)
    return ce(g, weight=weights)


def mined(g: Given) -> Tensor:
    distances = torch.cdist(g.out, g.out)
    same = g.y[:, None] == g.y[None]
    return (distances * same).max(1)[0].mean()


def written(g: Given) -> Tensor:
    targets = torch.zeros(SAMPLES, CLASSES)
    targets[:, 0] = g.w
    targets[torch.arange(SAMPLES), g.y] = 1.0
    targets[g.w > 0.5] = 0.0
    return functional.mse_loss(g.out, targets)


def written_steps(g: Given) -> Tensor:
    made = torch.zeros(STEPS, SAMPLES, CLASSES)
    for step in range(STEPS):
        made[step] = g.net(g.time_first[step])
    return made.square().mean(0).sum(1).mean()


def one_by_one(g: Given) -> Tensor:
    total = torch.zeros(())
    for x, y in zip(g.out, g.y, strict=True):
        total = total + functional.cross_entropy(x[None], y[None])
    return total / SAMPLES


def of_lengths(g: Given) -> Tensor:
    out = g.net(g.sequences)
    losses = [functional.cross_entropy(out[i, : 1 + i % 3], g.tokens[i, : 1 + i % 3])
              for i in range(SAMPLES)]  # fmt: skip
    return torch.stack(losses).mean()


def in_order_of_length(g: Given) -> Tensor:
    lengths, order = (g.tokens != 0).sum(1).sort(descending=True)
    return g.net(g.sequences[order] * (torch.arange(STEPS) < lengths[:, None])[..., None]).mean()


def matched(g: Given) -> Tensor:
    sample, place = torch.tensor([0, 0, 1, 2, 2, 4]), torch.tensor([1, 0, 3, 2, 0, 1])
    return g.net(g.sequences)[sample, place].square().mean()


def several_draws(g: Given) -> Tensor:
    drawn = g.x.expand(4, -1, -1).reshape(-1, WIDTH)
    return g.net(drawn).view(4, SAMPLES, CLASSES).logsumexp(0).mean()


def flipped_at_random(g: Given) -> Tensor:
    images, some = g.images.clone(), torch.rand(SAMPLES) < 0.5
    images[some] = images[some].rot90(2, (2, 3))
    return images.unfold(3, 4, 2).mean()


def adversarial(g: Given) -> Tensor:
    x = g.x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(ce(g, g.net(x)), x)
    return ce(g, g.net((x + 0.1 * grad.sign()).detach()))


def running_norm(g: Given) -> Tensor:
    return functional.batch_norm(g.out, torch.zeros(CLASSES), torch.ones(CLASSES)).mean()


def mixed_regions(g: Given) -> Tensor:
    images = g.images.clone()
    images[:, :, 2:5] = g.images.flip(0)[:, :, 2:5]
    return images.mean()


def one_missing(g: Given) -> Tensor:
    return torch.stack([g.out[i].square().mean() for i in range(SAMPLES - 1)]).mean()


APART: dict[str, Loss] = {
    "mean": ce,
    "smoothed": lambda g: ce(g, label_smoothing=0.1, ignore_index=2),
    "weighted by sample": lambda g: (g.losses * g.w).mean(),
    "weights that sum to one": lambda g: (g.losses * g.w).sum() / g.w.sum(),
    "masked": lambda g: (g.losses * (g.w > 0.5)).sum() / (g.w > 0.5).sum().clamp(min=1),
    "selected": lambda g: g.losses[g.w > 0.5].mean(),
    "a class weight": lambda g: ce(g, weight=torch.rand(CLASSES)),
    "hot": lambda g: functional.mse_loss(g.out, functional.one_hot(g.y, CLASSES).float()),
    "scattered": scattered,
    "looked up": looked_up,
    "dice of each": dice,
    "actor": actor,
    "real and fake": real_and_fake,
    "gradient penalty": penalty,
    "mixed at random": mixed_at_random,
    "patches": patches,
    "two views": lambda g: halves(g, g.net(torch.cat([g.x, g.x + torch.randn_like(g.x)]))),
    "a language model": lambda g: functional.cross_entropy(
        g.net(g.sequences).view(-1, CLASSES), g.tokens.view(-1)
    ),
    "shifted tokens": lambda g: functional.cross_entropy(
        g.net(g.sequences)[:, :-1].reshape(-1, CLASSES), g.tokens[:, 1:].reshape(-1)
    ),
    "classes second": lambda g: functional.cross_entropy(
        g.net(g.sequences).transpose(1, 2), g.tokens
    ),
    "time first": lambda g: g.net(g.time_first).log_softmax(-1).mean(0).sum(-1).mean(),
    "within a sequence": lambda g: (
        (g.net(g.sequences) - g.net(g.sequences).mean(1, keepdim=True)).pow(2).mean()
    ),
    "flipped features": lambda g: ce(g, g.net(g.x.flip(1))),
    "normalized features": lambda g: ce(g, g.net(functional.normalize(g.x, dim=1))),
    "attention of each": lambda g: functional.scaled_dot_product_attention(
        g.net(g.sequences), g.net(g.sequences), g.net(g.sequences)
    ).mean(),
    "products of each": lambda g: (g.net(g.sequences) @ g.net(g.sequences).transpose(1, 2)).mean(),
    "distances of each": lambda g: torch.cdist(g.net(g.sequences), g.net(g.sequences)).mean(),
    "distances to centers": lambda g: torch.cdist(g.out, torch.randn(7, CLASSES)).min(1)[0].mean(),
    "repeated": lambda g: functional.mse_loss(
        g.net(g.x.repeat_interleave(2, 0)), torch.rand(2 * SAMPLES, CLASSES)
    ),
    "a penalty of weights": lambda g: ce(g) + 0.1 * g._net.weight.abs().sum(),
    "cosines": lambda g: 1 - functional.cosine_similarity(g.out, g.out.detach() + 1).mean(),
    "triplets of each": lambda g: functional.triplet_margin_loss(g.out, g.out + 1, g.out - 1),
    "divergence": lambda g: functional.kl_div(
        g.out.log_softmax(1), g.out.detach().softmax(1), reduction="batchmean"
    ),
    "einsum": lambda g: torch.einsum("bi,bi->b", g.out, g.out).mean(),
    "resized": lambda g: functional.interpolate(g.images, scale_factor=2).mean(),
    "negatives of a queue": lambda g: functional.cross_entropy(
        torch.cat([(g.out * g.out).sum(1, keepdim=True), g.out @ g.table.t()], 1),
        torch.zeros(SAMPLES, dtype=torch.long),
    ),
    "written": written,
    "written steps": written_steps,
    "one by one": one_by_one,
    "of lengths": of_lengths,
    "in order of length": in_order_of_length,
    "matched": matched,
    "several draws": several_draws,
    "flipped at random": flipped_at_random,
    "adversarial": adversarial,
    "a norm of running statistics": running_norm,
    "a norm of each": lambda g: functional.instance_norm(g.images).square().mean(),
    "losses of tasks": lambda g: torch.stack([ce(g), g.losses.sum()]) @ torch.rand(2),
    "by places": lambda g: g.losses[(g.w > 0.5).nonzero()[:, 0]].mean(),
    "selected by masks": lambda g: g.net(g.sequences).masked_select((g.tokens == 1)[..., None]),
    "two indices": lambda g: g.sequences[torch.arange(SAMPLES)[:, None], g.tokens].mean(),
    "classes of some": lambda g: (g.losses * torch.isin(g.y, torch.arange(2))).mean(),
    "preferences": lambda g: -functional.logsigmoid(g.out[:, 0] - g.w).mean(),
    "connectionist": lambda g: functional.ctc_loss(
        g.net(g.time_first).log_softmax(-1),
        torch.ones(SAMPLES, 2).long(),
        torch.full((SAMPLES,), STEPS),
        torch.full((SAMPLES,), 2),
    ),
    "spectra": lambda g: torch.stft(
        g.images.flatten(1), 16, window=torch.ones(16), return_complex=True
    ).abs(),
    "packed": lambda g: (
        nn.utils.rnn.pack_padded_sequence(
            g.net(g.sequences), torch.tensor([4, 3, 3, 2, 1]), batch_first=True
        ).data
    ),
    "a normal distribution": lambda g: torch.distributions.MultivariateNormal(
        torch.zeros(CLASSES), torch.eye(CLASSES)
    ).log_prob(g.out),
    "determinants of each": lambda g: torch.linalg.det(g.net(g.sequences)[:, :3]).mean(),
    "an unknown of one": lambda g: torch.stack([torch.trace(x) for x in g.sequences]).mean(),
}
TOGETHER: dict[str, Loss] = {
    "centered": lambda g: ce(g, g.out - g.out.mean(0)),
    "centered by constants": lambda g: ce(g, g.out - g.out.mean(0).detach()),
    "mined": mined,
    "flipped": lambda g: functional.mse_loss(g.out, g.out.flip(0)),
    "rolled": lambda g: functional.mse_loss(g.out, g.out.roll(1, 0)),
    "neighbors": lambda g: (g.out[1:] - g.out[:-1]).pow(2).mean(),
    "mixed with the last": lambda g: ce(g, g.net(0.7 * g.x + 0.3 * g.x.flip(0))),
    "rolled inputs": lambda g: ce(g, g.net(g.x + 0.1 * g.x.roll(1, 0))),
    "normalized inputs": lambda g: ce(g, g.net((g.x - g.x.mean(0)) / g.x.std(0))),
    "normalized advantages": lambda g: (g.losses * (g.w - g.w.mean()) / g.w.std()).mean(),
    "softmax of losses": lambda g: (g.losses * g.losses.detach().softmax(0)).sum(),
    "by the largest": lambda g: (g.losses / g.losses.detach().max()).mean(),
    "weights by class counts": by_class,
    "the first": lambda g: g.losses[0],
    "every other": lambda g: g.losses[::2].mean(),
    "sorted": lambda g: (g.losses.sort()[0] * torch.arange(SAMPLES)).mean(),
    "the hardest": lambda g: g.losses.topk(2)[0].mean(),
    "similarities": lambda g: functional.cross_entropy(g.out @ g.out.t(), torch.arange(SAMPLES)),
    "pairs": lambda g: functional.pdist(g.out).mean(),
    "correlation": lambda g: ((g.w - g.w.mean()) * (g.out[:, 0] - g.out[:, 0].mean())).mean(),
    "a product of means": lambda g: ce(g) * g.w.mean(),
    "shuffled by hand": lambda g: functional.mse_loss(g.out, g.out[torch.tensor([2, 0, 1, 4, 3])]),
    "a batch norm": lambda g: functional.batch_norm(g.out, None, None, training=True).abs().mean(),
    "mixed regions": mixed_regions,
    "moved by padding": lambda g: g.out - functional.pad(g.out, (0, 0, 1, -1)),
    "each with each": lambda g: functional.mse_loss(
        g.out[:, :1].expand(-1, SAMPLES), g.w.expand(SAMPLES, -1)
    ),
    "one with the next": lambda g: torch.stack([g.out[i] - g.out[i - 1] for i in range(SAMPLES)]),
    "the largest of some": lambda g: torch.stack(list(g.losses)).max(),
    "singular values": lambda g: torch.linalg.svdvals(g.out).sum(),
    "one missing": one_missing,
    "given one sample": lambda g: g.net(g.x[:1]).mean(),
}


@pytest.mark.parametrize("name", APART)
def test_what_is_computed_of_each_sample_by_itself_is_let_be(name: str, flow: SampleFlow) -> None:
    assert found(flow, APART[name]) is None


@pytest.mark.parametrize("name", TOGETHER)
def test_what_sets_samples_in_relation_is_found(name: str, flow: SampleFlow) -> None:
    how = found(flow, TOGETHER[name])
    assert how is not None
    assert how.known
    assert "test_sample_flow.py:" in how.how or "over its samples" in how.how


def test_what_is_written_into_a_part_of_a_tensor_is_told_of(flow: SampleFlow) -> None:
    def written(g: Given) -> Tensor:
        made = torch.zeros(SAMPLES)
        made[0] = g.losses[0]
        return made

    how = found(flow, written)
    assert how is not None
    assert not how.known
    assert how.how.startswith("copy in test_sample_flow.py:")


def test_of_a_loop_that_leaves_out_samples_is_told(flow: SampleFlow) -> None:
    how = found(flow, lambda g: g.losses[0] + g.losses[2])
    assert how is not None
    assert not how.known


@pytest.mark.parametrize(
    "loss",
    [
        lambda g: g.losses[:3].mean(),
        lambda g: g.net(g.x[2:4]).mean(),
        lambda g: ce(g, g.net(g.x)) + g.net(g.x.chunk(2)[0]).mean(),
    ],
)
def test_pieces_of_which_there_may_be_more_are_told_of(loss: Loss, flow: SampleFlow) -> None:
    how = found(flow, loss)
    assert how is not None
    assert not how.known


@pytest.mark.parametrize("end", [SAMPLES, SAMPLES + 2])
def test_the_first_of_a_batch_may_be_more_than_a_part_has(end: int, flow: SampleFlow) -> None:
    how = found(flow, lambda g: g.losses[:end].mean())
    assert how is not None
    assert not how.known
    assert found(flow, lambda g: g.losses[:].mean()) is None


def test_an_operation_that_is_not_known_is_told_of(flow: SampleFlow) -> None:
    how = found(flow, lambda g: torch.trace(g.out))
    assert how is not None
    assert not how.known
    assert how.how.startswith("trace in test_sample_flow.py:")


def test_within_a_loop_over_one_loader_another_may_be_read(flow: SampleFlow) -> None:
    outer, inner = object(), object()
    x, other = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES + 1, WIDTH)
    flow.begin(x, SAMPLES, outer)
    flow.begin(other, SAMPLES + 1, inner)
    assert flow.coupled((other - other.mean(0)).mean(), reduced=False) is not None
    flow.leave(inner)
    assert flow.coupled((x - x.mean(0)).mean(), reduced=False) is not None
    flow.leave(outer)
    assert not flow.follows


def test_a_loop_that_was_left_does_not_count_for_ever(flow: SampleFlow) -> None:
    flow.begin(torch.randn(SAMPLES, WIDTH), SAMPLES, left := object())
    loop = object()
    looked = []
    for _ in range(64):
        flow.begin(torch.randn(SAMPLES, WIDTH), SAMPLES, loop)
        looked.append(flow.follows)
        flow.end(loop)
    assert looked[:16] == [True] * 16
    assert sum(looked[32:]) == 2
    flow.leave(left)
