"""``dropout_seed="sample"`` in one process: what it draws, what it leaves, and what it refuses."""

from __future__ import annotations

import copy
import itertools
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import dropout as imported_dropout
from torch.utils.checkpoint import checkpoint

from unipar import Batch, ConfigError, MicroBatch, Session
from unipar.testing import masks

SAMPLES, WIDTH = 4, 6
X = torch.randn(SAMPLES, 3, WIDTH, generator=torch.Generator().manual_seed(4))
Forward = Callable[["Net", torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Calls what it is given, and notes it."""

    def __init__(self, forward: Forward, **layers: nn.Module) -> None:
        super().__init__()
        self.own, self.scale = forward, nn.Parameter(torch.ones(()))
        self.layers = nn.ModuleDict(layers)
        self.calls = 0
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out = self.own(self, x * self.scale)
        self.seen.append(out.detach())
        return out


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def batch_of(x: Any, sizes: tuple[int, ...] = (), num: int = SAMPLES) -> Batch:
    """A global batch in micro-batches of these sizes."""
    starts = list(itertools.accumulate(sizes or (num,), initial=0))
    pairs = itertools.pairwise(starts)
    return Batch(tuple(MicroBatch(x[a:b], b - a, a) for a, b in pairs), num)


def trained(
    forward: Forward,
    x: torch.Tensor = X,
    *,
    sizes: tuple[int, ...] = (),
    steps: int = 1,
    loss: Callable[[Any, Any], Any] = loss_of,
    seed: int = 0,
    name: str = "model",
    layers: Mapping[str, nn.Module] | None = None,
    precision: Any = "fp32",
    **asked: Any,
) -> tuple[list[float], Net, torch.Tensor]:
    """Losses, the model with what it gave in its last passes, and its gradient in the last step."""
    net = Net(forward, **(layers or {}))
    gradients: list[torch.Tensor] = []
    with Session("single", dropout_seed="sample", seed=seed, precision=precision) as session:
        engine = session.prepare(net, optimizer="sgd", name=name, **asked)
        optimizer: Any = engine.optimizer
        weight: Any = net.scale
        optimizer.register_step_pre_hook(lambda *_: gradients.append(weight.grad.clone()))
        results = [engine.train_step(batch_of(x, sizes), loss).loss for _ in range(steps)]
    return results, net, gradients[-1]


def kept(
    call: int = 0, sizes: tuple[int, ...] = (1, 3, WIDTH), step: int = 0, p: float = 0.5
) -> Any:
    return ~masks.dropped(0, "model", step, call, (SAMPLES, *sizes), p)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_what_is_kept_is_scaled_so_that_the_mean_stays(p: float) -> None:
    _, net, _ = trained(lambda net, x: functional.dropout(x, p, net.training))
    assert torch.equal(net.seen[-1], torch.where(kept(p=p)[:, 0], X * (1 / (1 - p)), 0.0))


@pytest.mark.parametrize("sizes", [(4,), (1, 3), (2, 2), (1, 1, 1, 1)], ids=str)
def test_masks_do_not_depend_on_micro_batches(sizes: tuple[int, ...]) -> None:
    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        x = functional.dropout(x, 0.3, net.training)
        return functional.dropout(x.flatten(0, 1), 0.3, net.training, True)

    whole = trained(forward, steps=3)
    parts = trained(forward, steps=3, sizes=sizes)
    assert parts[0] == pytest.approx(whole[0], rel=1e-6)
    torch.testing.assert_close(parts[2], whole[2])
    assert len(set(whole[0])) == 3


def test_engines_seeds_and_steps_have_masks_of_their_own() -> None:
    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x)

    def masks_of(**changes: Any) -> torch.Tensor:
        return trained(forward, **changes)[1].seen[-1] != 0

    different = [masks_of(), masks_of(seed=1), masks_of(name="other"), masks_of(steps=2)]
    for one, other in itertools.combinations(different, 2):
        assert not torch.equal(one, other)


def channels(call: int, ndim: int, p: float = 0.5) -> torch.Tensor:
    return kept(call, (1, 3, *[1] * (ndim - 2)), p=p)[:, 0]


def alpha(x: torch.Tensor, keep: torch.Tensor, p: float) -> torch.Tensor:
    """Klambauer et al., section 3: mean and variance stay for those of zero and one."""
    low = -1.7580993408473766
    a = (1 - p + low**2 * p * (1 - p)) ** -0.5
    return a * torch.where(keep, x, low) - a * (p * low)


IMAGES = torch.randn(SAMPLES, 3, 5, 5, generator=torch.Generator().manual_seed(5))
VOLUMES = torch.randn(SAMPLES, 3, 2, 2, 2, generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize(
    ("layer", "x", "expected"),
    [
        (nn.Dropout1d(0.5), X, X * channels(0, 3) * 2),
        (nn.Dropout2d(0.5), IMAGES, IMAGES * channels(0, 4) * 2),
        (nn.Dropout3d(0.5), VOLUMES, VOLUMES * channels(0, 5) * 2),
        (nn.AlphaDropout(0.2), X, alpha(X, kept(p=0.2)[:, 0], 0.2)),
        (nn.FeatureAlphaDropout(0.2), IMAGES, alpha(IMAGES, channels(0, 4, p=0.2), 0.2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_kind_of_dropout_of_torch(
    layer: nn.Module, x: torch.Tensor, expected: torch.Tensor
) -> None:
    _, net, _ = trained(lambda net, x: net.layers["layer"](x), x, layers={"layer": layer})
    torch.testing.assert_close(net.seen[-1], expected)


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    x = torch.randn(SAMPLES, 3, 40_000)
    _, net, _ = trained(lambda net, x: functional.alpha_dropout(x, 0.3, net.training), x)
    assert float(net.seen[-1].mean()) == pytest.approx(0, abs=0.01)
    assert float(net.seen[-1].var()) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_all_or_nothing_is_as_in_torch(p: float) -> None:
    _, net, _ = trained(lambda net, x: functional.dropout(x, p, net.training))
    assert torch.equal(net.seen[-1], X * (1 - p))


def test_in_place_changes_its_input_and_has_the_same_gradient() -> None:
    def forward(net: Net, x: torch.Tensor, inplace: bool) -> torch.Tensor:
        x = x + 0
        y = functional.dropout(x, 0.5, net.training, inplace)
        assert (y is x) == inplace
        return y

    apart, beside = (trained(lambda net, x, i=i: forward(net, x, i)) for i in (False, True))
    assert apart[0] == beside[0]
    assert torch.equal(apart[2], beside[2])


def test_under_autocast_the_dtype_stays() -> None:
    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        y = functional.dropout(net.layers["linear"](x), 0.5, net.training)
        assert y.dtype is torch.bfloat16
        return y

    layers = {"linear": nn.Linear(WIDTH, WIDTH)}
    _, net, _ = trained(forward, precision="bf16", layers=layers)
    assert torch.equal(net.seen[-1] != 0, kept()[:, 0])


def test_evaluation_and_the_process_draw_as_before() -> None:
    net = Net(lambda net, x: functional.dropout(x, 0.5, net.training))
    with Session("single", dropout_seed="sample") as session:
        engine = session.prepare(net, optimizer="sgd")
        before = torch.get_rng_state()
        engine.train_step(batch_of(X), loss_of)
        assert torch.equal(torch.get_rng_state(), before)
        assert float(engine.eval_batch(batch_of(X), loss_of).total) > 0
        assert torch.equal(net.seen[-1], X * net.scale.detach())
    assert functional.dropout.__module__ == "torch.nn.functional"
    # Beside what it counts: the passes that were looked at left nothing.
    assert net.calls == 2


# -- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "causal", "bool mask", "float mask", "grouped"])
def test_attention_drops_its_weights(kind: str) -> None:
    """As torch's own kernel, written out, does with the same mask."""
    heads, length, size, p = 4, 5, 8, 0.4
    generator = torch.Generator().manual_seed(7)
    few = 2 if kind == "grouped" else heads
    qkv = torch.randn(SAMPLES, heads + 2 * few, length, size, generator=generator)
    seen = torch.ones(length, length, dtype=torch.bool).tril(1)
    # The first query sees nothing.
    seen[0] = False
    as_floats = torch.zeros(length, length).masked_fill(~seen, -torch.inf)
    mask = {"bool mask": seen, "float mask": as_floats}.get(kind)
    options: dict[str, Any] = {"is_causal": kind == "causal", "enable_gqa": kind == "grouped"}

    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.split([heads, few, few], dim=1)
        return functional.scaled_dot_product_attention(q, k, v, mask, p, **options)

    _, net, gradient = trained(forward, qkv)
    keep = kept(0, (1, heads, length, length), p=p)[:, 0]
    scale = torch.ones((), requires_grad=True)
    q, k, v = (qkv * scale).split([heads, few, few], dim=1)
    expected, _ = torch.ops.aten._scaled_dot_product_attention_math(
        q,
        k,
        v,
        as_floats if kind == "bool mask" else mask,
        p,
        options["is_causal"],
        keep,
        enable_gqa=options["enable_gqa"],
    )
    torch.testing.assert_close(net.seen[-1], expected)
    expected.square().mean().backward()
    torch.testing.assert_close(gradient, scale.grad)


@pytest.mark.parametrize("need_weights", [False, True])
def test_multi_head_attention_of_torch(need_weights: bool) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(WIDTH, 2, dropout=0.5, batch_first=True)
    layers: list[dict[str, nn.Module]] = [{"attention": layer}, {"attention": copy.deepcopy(layer)}]

    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        return net.layers["attention"](x, x, x, need_weights=need_weights)[0]

    whole = trained(forward, layers=layers[0])
    parts = trained(forward, layers=layers[1], sizes=(1, 3))
    assert parts[0] == pytest.approx(whole[0], rel=1e-6)
    torch.testing.assert_close(parts[2], whole[2])


# -- computed again ------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(torch.tanh(self.linear(self.dropout(x))))


def blocks() -> dict[str, nn.Module]:
    torch.manual_seed(2)
    return {"blocks": nn.ModuleList(Block() for _ in range(3))}


def through_blocks(net: Net, x: torch.Tensor, **options: Any) -> torch.Tensor:
    for block in net.layers["blocks"]:  # pyright: ignore[reportGeneralTypeIssues]
        x = checkpoint(block, x, **options) if options else block(x)
    return functional.dropout(x, 0.5, net.training)


@pytest.mark.parametrize("policy", ["full", "selective", ("Block",)], ids=str)
def test_recomputed_activations_have_the_same_masks(policy: Any) -> None:
    expected = trained(through_blocks, layers=blocks(), steps=2)
    found = trained(
        through_blocks, layers=blocks(), steps=2, activation_checkpointing=policy, sizes=(3, 1)
    )
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    torch.testing.assert_close(found[2], expected[2])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_models_own_checkpoints_have_the_same_masks(reentrant: bool) -> None:
    expected = trained(through_blocks, layers=blocks(), steps=2)
    found = trained(
        lambda net, x: through_blocks(net, x, use_reentrant=reentrant), layers=blocks(), steps=2
    )
    assert found[0] == expected[0]
    assert torch.equal(found[2], expected[2])


def test_a_checkpoint_that_draws_anew_is_refused() -> None:
    options = {"use_reentrant": False, "preserve_rng_state": False}
    with pytest.raises(ConfigError, match=r"backward pass draws .*preserve_rng_state"):
        trained(lambda net, x: through_blocks(net, x, **options), layers=blocks())


# -- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward", "named"),
    [
        (lambda net, x: x + torch.rand_like(x), "torch.rand_like in 'the model' (Net)"),
        (lambda net, x: x.clone().bernoulli_(0.5) * x, "bernoulli_ in 'the model' (Net)"),
        (lambda net, x: torch.dropout(x, 0.5, True), "torch.dropout in 'the model' (Net)"),
        (lambda net, x: x if torch.rand(()) < 0.5 else -x, "torch.rand in 'the model' (Net)"),
    ],
    ids=["noise", "mask", "torch.dropout", "layer drop"],
)
def test_other_random_numbers_are_refused(forward: Forward, named: str) -> None:
    with pytest.raises(ConfigError, match=rf"and .*{re.escape(named)} draws other random numbers"):
        trained(forward)


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_random_numbers_of_other_generators_are_refused(draw: Callable[[], float]) -> None:
    """A layer passed by, whose numbers are the same in both passes that are held together."""
    with pytest.raises(ConfigError, match="other random numbers from Python's or NumPy's generat"):
        trained(lambda net, x: functional.dropout(x) * (draw() < 0.5))


def test_random_numbers_of_a_later_step_are_refused_too() -> None:
    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        noisy = torch.is_grad_enabled() and net.calls > 1
        return functional.dropout(x) + (torch.rand(()) if noisy else 0)

    with pytest.raises(ConfigError, match="the forward pass or the loss draws other random"):
        trained(forward, steps=3)


def test_dropout_by_its_name_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"by its name alone, after `from torch\.nn\.func"):
        trained(lambda net, x: imported_dropout(x))


def test_a_loss_that_draws_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"torch\.randn_like in the loss function draws"):
        trained(lambda net, x: x, loss=lambda model, x: model(torch.randn_like(x)).mean())


@pytest.mark.parametrize(
    ("forward", "shape"),
    [
        (lambda net, x: functional.dropout(x.transpose(0, 1)), (3, 4, 6)),
        (lambda net, x: functional.dropout(x.repeat(1, 4, 1).transpose(0, 1)), (12, 4, 6)),
        (lambda net, x: functional.dropout(x.transpose(0, 1).flatten(0, 1)), (12, 6)),
        (lambda net, x: x + functional.dropout(torch.ones(1, 3, 6)), (1, 3, 6)),
        (lambda net, x: functional.dropout(x[x[:, :, 0] > 0]), None),
        (lambda net, x: functional.dropout1d(x[0]), None),
    ],
    ids=["positions", "many positions", "flattened", "broadcast", "picked", "one"],
)
def test_rows_that_are_not_of_samples_are_refused(
    forward: Forward, shape: tuple[int, ...] | None
) -> None:
    told = re.escape(str(shape)) if shape else r"\(\d+, 6\)|\(1, 3, 6\)"
    said = rf"Dropout in 'the model' \(Net\) is given a tensor of shape ({told}) in a micro-batch"
    with pytest.raises(ConfigError, match=said):
        trained(forward)


def test_a_mask_that_samples_share_is_refused() -> None:
    """Ones tell nothing of the rows that they are; what is made of them does."""
    with pytest.raises(ConfigError, match=r"the loss of a micro-batch is .* in another order"):
        trained(lambda net, x: x * functional.dropout(torch.ones(4, 6))[1])


def test_the_module_is_named() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.1)
    with pytest.raises(ConfigError, match=r"'layers.layer.*' \(\w+\).*\(3, 4, 6\)|MultiheadAtt"):
        trained(lambda net, x: net.layers["layer"](x.transpose(0, 1)), layers={"layer": layer})


def test_a_call_more_is_refused() -> None:
    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        for _ in range(1 + net.calls // 3):
            x = functional.dropout(x, 0.5, net.training)
        return x

    with pytest.raises(ConfigError, match="this one has 2, where there have been 1"):
        trained(forward, steps=4)


def test_recurrent_layers_with_dropout_are_refused_by_name() -> None:
    lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.1, batch_first=True)
    with pytest.raises(ConfigError, match=r"the dropout of 'layers\.lstm' \(LSTM\)"):
        trained(lambda net, x: net.layers["lstm"](x)[0], layers={"lstm": lstm})


def test_compiled_models_and_loops_of_ones_own_are_refused() -> None:
    with pytest.raises(ConfigError, match="constants of each step"):
        trained(lambda net, x: x, compile=True)
    with Session("single", dropout_seed="sample") as session:
        engine = session.prepare(Net(lambda net, x: functional.dropout(x)), optimizer="sgd")
        with pytest.raises(ConfigError, match=r"engine\.train_step.*dropout_seed='rank'"):
            engine(X)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        ({"x": X, "sizes": torch.ones(3)}, r"a tensor of shape \(3,\)"),
        ({"x": nn.utils.rnn.pack_sequence(list(X))}, r"a tensor of shape \(12, 6\)"),
    ],
)
def test_batches_whose_samples_are_not_known_are_refused(data: Any, found: str) -> None:
    net = Net(lambda net, x: x)
    with Session("single", dropout_seed="sample") as session:
        engine = session.prepare(net, optimizer="sgd")
        with pytest.raises(ConfigError, match=rf"finds {found}"):
            engine.train_step(Batch((MicroBatch(data, 4, 0),), 4), loss_of)
        with pytest.raises(ConfigError, match="first=place"):
            engine.train_step(Batch((MicroBatch(X, 4),), 4), loss_of)
