"""Which layers mesh divides: what is said, what a model carries, what is found; and what is refused
before any process starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from unipar.errors import ConfigError
from unipar.layout import Layout
from unipar.strategy import EngineSpec, registry
from unipar.testing import models
from unipar.world import Placement
from unipar_torch.mesh import MeshStrategy
from unipar_torch.mesh_options import MeshOptions
from unipar_torch.tensor_plan import make_plan

DECODER = {
    **dict.fromkeys(("attention.q", "attention.k", "attention.v", "gate", "up"), "colwise"),
    **dict.fromkeys(("attention.out", "down"), "rowwise"),
}


def of_first_block(styles: Any) -> dict[str, str]:
    start = "blocks.0."
    return {name[len(start) :]: style for name, style in styles.items() if name.startswith(start)}


def llama(**changed: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 12,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "use_cache": False,
    }
    config = transformers.LlamaConfig(**{**sizes, **changed})
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


# -- what is found ---------------------------------------------------------------------------------


def test_pairs_of_a_decoder_are_found_with_the_heads_that_they_count() -> None:
    plan = make_plan(models.Decoder(), 2)
    assert plan.source == "found by tracing"
    assert of_first_block(plan.styles) == DECODER
    assert plan.counts["blocks.1.attention"] == ("num_heads", "num_kv_heads")
    assert not plan.notes


def test_what_is_found_needs_no_weights() -> None:
    with torch.device("meta"):
        model = models.Decoder()
    assert make_plan(model, 2) == make_plan(models.Decoder(), 2)


class Fused(nn.Module):
    """Queries, keys and values in one layer, so that columns of it are no heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 2
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(x)))


class Normed(nn.Module):
    """A norm over the whole width between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(self.up(x)))


def test_layers_that_do_not_bear_it_are_left_whole_and_said_to_be() -> None:
    plan = make_plan(nn.Sequential(Fused(), Fused()), 2)
    assert {name for name in plan.styles if name.startswith("0.")} == {"0.up", "0.down"}
    assert not plan.counts
    (note,) = plan.notes
    assert "qkv and out are left whole" in note


class Masked(nn.Module):
    """Attention behind a mask, told either way."""

    def __init__(self, allowed: bool) -> None:
        super().__init__()
        self.allowed, self.heads = allowed, 4
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        mask = torch.ones(8, 8, dtype=torch.bool)
        self.register_buffer("mask", mask.tril() if allowed else mask.triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        shape = (rows, length, self.heads, -1)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        hidden: Any = self.mask[:length, :length]  # pyright: ignore[reportIndexIssue]
        scores = q @ k.mT
        scores = scores.masked_fill(~hidden if self.allowed else hidden, float("-inf"))
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("allowed", [True, False])
def test_masks_need_no_values(allowed: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(Masked(allowed) for _ in range(2)))
    plan = make_plan(model, 2)
    assert plan.styles["0.q"] == "colwise"
    assert plan.styles["1.out"] == "rowwise"
    assert plan.counts["0"] == ("heads",)


def test_looking_for_a_plan_seeds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.manual_seed`` seeds GPUs, and ``fork_rng`` of the host leaves them so."""
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("seeded"))
    assert make_plan(nn.Sequential(Masked(True), Masked(True)), 2).styles


class Coupled(nn.Module):
    """In training it couples what two layers hand on; in evaluation it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.up(x))
        return x + self.down(inner - inner.mean(-1, keepdim=True) if self.training else inner)


def test_layers_that_are_coupled_in_training_alone_are_left_whole() -> None:
    with pytest.raises(ConfigError, match=r"Coupled: up and down are left whole: the sum of"):
        make_plan(nn.Sequential(Coupled(), Coupled()), 2)


def test_layers_of_a_block_may_share_a_weight() -> None:
    blocks = [Masked(True), Masked(True)]
    model = nn.Sequential(*blocks)
    for block in blocks:
        block.k.weight = block.q.weight
    assert make_plan(model, 2).styles["0.k"] == "colwise"


def test_weights_that_other_layers_have_too_are_left_whole_and_said_to_be() -> None:
    blocks = [Masked(True), Masked(True)]
    model = nn.Sequential(*blocks)
    for block in blocks:
        block.out.weight = block.q.weight
    with pytest.raises(ConfigError, match=r"0: .* left whole: 0\.q and 0\.out have one weight"):
        make_plan(model, 2)
    blocks = nn.Sequential(Leaving([]), Leaving([]))
    tied: Any = nn.ModuleDict({"tokens": nn.Embedding(16, 8), "blocks": blocks})
    tied.tokens.weight = blocks.get_parameter("1.up.weight")
    plan = make_plan(tied, 2)
    assert set(plan.styles) == {"blocks.0.up", "blocks.0.down"}
    (note,) = plan.notes
    assert "tokens and blocks.1.up have one weight" in note


class Placed(nn.Module):
    """It makes tensors of its own, on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device="cpu").unsqueeze(-1)
        return x + self.down(torch.relu(self.up(x + places)))


def test_a_block_that_cannot_be_traced_is_named_with_its_error() -> None:
    said = r"Placed: it could not be run .* \(RuntimeError: .*cpu.*, on the meta device\)"
    with pytest.raises(ConfigError, match=said):
        make_plan(nn.Sequential(Placed(), Placed()), 2)


class Leaving(nn.Module):
    """It leaves what it computes in a list, for a loss to read."""

    def __init__(self, seen: list[torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.seen = nn.Linear(8, 16), nn.Linear(16, 8), seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.square().mean())
        return x + self.down(torch.relu(self.up(x)))


def test_looking_for_a_plan_leaves_nothing_in_modules() -> None:
    blocks = [Leaving([]), Leaving([])]
    model = nn.Sequential(*blocks)
    for block in blocks:
        block.up.register_forward_hook(lambda *_, seen=block.seen: seen.append(torch.ones(1)))
    assert make_plan(model, 2).styles
    assert not any(block.seen for block in blocks)


def test_what_it_leaves_elsewhere_is_explained() -> None:
    strategy = MeshStrategy(MeshOptions(tp=2))
    with pytest.raises(NotImplementedError) as raised:
        torch.ones((), device="meta").to("cpu")
    assert "puts tensors into a list" in strategy.explain(raised.value)
    assert not MeshStrategy(MeshOptions()).explain(raised.value)


def test_nothing_to_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"up and down are left whole.* plan=\{"):
        make_plan(nn.Sequential(Normed(), Normed()), 2)
    with pytest.raises(ConfigError, match=r"no repeated blocks.* plan=\{"):
        make_plan(models.Normalized(), 2)


# -- what is said ----------------------------------------------------------------------------------


def test_a_plan_of_the_user_is_taken_as_it_is() -> None:
    plan = make_plan(models.Decoder(), 2, {"blocks.*.up": "colwise", "blocks.0.down": "rowwise"})
    assert set(plan.styles) == {"blocks.0.up", "blocks.1.up", "blocks.0.down"}
    assert not plan.counts


class Widths(models.Attention):
    """It keeps the width of a head, too, which looks like a number of heads."""

    def __init__(self, heads: int, kv_heads: int, d_head: int) -> None:
        super().__init__(heads * d_head, heads, kv_heads)
        self.d_head = d_head

    def forward(self, x: torch.Tensor, cos: Any = None, sin: Any = None) -> torch.Tensor:
        shape = (*x.shape[:2], -1, self.d_head)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (part.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for part in (k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, scale=self.d_head**-0.5)
        return self.out(mixed.transpose(1, 2).reshape(*x.shape[:2], self.num_heads * self.d_head))


@pytest.mark.parametrize("d_head", [2, 4, 5], ids=["smaller", "as many", "odd"])
@pytest.mark.parametrize(
    "plan", [None, {f"*.{n}": "colwise" for n in "qkv"} | {"*.out": "rowwise"}]
)
def test_the_width_of_a_head_is_no_number_of_heads(
    d_head: int, plan: dict[str, str] | None
) -> None:
    model = nn.Sequential(*(Widths(4, 2, d_head) for _ in range(2)))
    found = make_plan(model, 2, plan)
    assert {found.styles[f"0.{name}"] for name in "qkv"} == {"colwise"}
    assert set(found.counts["1"]) <= {"num_heads", "num_kv_heads"}
    assert "num_heads" in found.counts["1"]
    assert not found.notes


def test_numbers_of_heads_follow_a_plan_of_the_user() -> None:
    given = {f"blocks.*.attention.{name}": "colwise" for name in "qkv"}
    plan = make_plan(models.Decoder(), 2, {**given, "blocks.*.attention.out": "rowwise"})
    assert plan.counts["blocks.0.attention"] == ("num_heads", "num_kv_heads")


def test_tied_layers_are_divided_alike() -> None:
    for given in ({"head": "colwise_gather_output"}, {"tokens": "embedding_rowwise"}):
        plan = make_plan(models.Decoder(), 2, given)
        assert plan.styles == {"tokens": "embedding_rowwise", "head": "colwise_gather_output"}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"blocks.*.attention.qq": "colwise"}, r"names no layer.* Did you mean 'blocks\.\*\.att"),
        ({"blocks.*.up.weight": "colwise"}, "names a parameter"),
        ({"blocks.*.up": "colwize"}, "'colwize', which is not built. Allowed: colwise, rowwise"),
        ({"blocks.*.up": "colwise", "blocks.0.up": "rowwise"}, "and, by 'blocks.0.up', as"),
        ({"blocks.*.norm_feed": "colwise"}, r"LayerNorm\) cannot be divided.* is for nn\.Linear"),
        ({"tokens": "embedding_rowwise", "head": "rowwise_split_input"}, "in two ways"),
        ({}, "plan is empty"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(given: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_plan(models.Decoder(), 2, given)


def test_a_plan_that_divides_what_does_not_bear_it_is_refused() -> None:
    given = {"*.qkv": "colwise", "*.out": "rowwise"}
    with pytest.raises(ConfigError, match=r"option plan divides 0\.qkv, 0\.out, which would"):
        make_plan(nn.Sequential(Fused(), Fused()), 2, given)


# -- what a model carries --------------------------------------------------------------------------


def test_a_model_of_transformers_says_itself() -> None:
    model: Any = llama()
    plan = make_plan(model, 2)
    assert plan.source == "the model's own plan (_tp_plan)"
    assert plan.styles["model.layers.1.self_attn.k_proj"] == "colwise"
    assert plan.styles["lm_head"] == "colwise_gather_output"
    # transformers 5.23 says embedding_rowwise of it, and 5.20 nothing.
    assert plan.styles.get("model.embed_tokens") == model._tp_plan.get("model.embed_tokens")


def test_a_vocabulary_that_does_not_divide_is_left_whole_and_said_to_be() -> None:
    model: Any = llama(vocab_size=13)
    plan = make_plan(model, 2)
    named = {"lm_head", "model.embed_tokens"} & set(model._tp_plan)
    assert named
    assert not named & set(plan.styles)
    assert sorted(plan.notes) == [f"{name}: 13 does not divide by tp=2" for name in sorted(named)]


# -- arithmetic ------------------------------------------------------------------------------------


def test_heads_that_do_not_divide_are_refused_with_the_sizes_that_would() -> None:
    with pytest.raises(ConfigError, match=r"num_key_value_heads is 2.* tp=1 or 2;"):
        make_plan(llama(), 4)
    with pytest.raises(ConfigError, match=r"num_kv_heads of 'attention' is 2.* tp=1 or 2;"):
        make_plan(models.Decoder(), 4)


def test_widths_that_do_not_divide_are_refused_with_the_sizes_that_would() -> None:
    with pytest.raises(ConfigError, match=r"is 18.* tp=1 or 2 or 3 or 6 or 9 or 18;"):
        make_plan(models.Network(), 4)


def test_it_is_refused_before_any_process_starts() -> None:
    strategy = MeshStrategy(MeshOptions(tp=4))
    for model in (models.Network(), models.Network):
        with pytest.raises(ConfigError, match="tp=4 does not divide the model"):
            strategy.check(EngineSpec(model), Placement(size=4, local_size=4))


@pytest.mark.parametrize(
    ("options", "size", "layout"),
    [
        ({}, 4, Layout(dp_shard=4)),
        ({"tp": 2}, 8, Layout(dp_shard=4, tp=2)),
        ({"tp": 2, "dp_replicate": 2}, 8, Layout(dp_replicate=2, dp_shard=2, tp=2)),
        ({"tp": 2, "dp_shard": 1, "dp_replicate": 2}, 4, Layout(dp_replicate=2, tp=2)),
    ],
)
def test_what_other_axes_leave_is_dp_shard(options: Any, size: int, layout: Layout) -> None:
    assert MeshStrategy(MeshOptions(**options)).layout(Placement(size=size)) == layout


@pytest.mark.parametrize(
    ("options", "size", "named"),
    [
        ({"tp": 3}, 4, "tp=3 does not divide the 4 processes"),
        ({"tp": 4}, 2, "tp=4 does not divide the 2 processes"),
        ({"tp": 2, "dp_shard": 4}, 4, "is of 8 processes, and there are 4.* dp_shard to 2"),
    ],
)
def test_other_numbers_of_processes_are_refused(options: Any, size: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        MeshStrategy(MeshOptions(**options)).layout(Placement(size=size))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("pp=2,cp=4", "pp=2 with cp=4 is not built. Leave one of them out"),
        ("pp=2,ep=2", "pp=2 with ep=2 is not built"),
        ("cp=2,ep=2", "cp=2 with ep=2 is not built"),
        ("tp=2,ep=2", "tp=2 with ep=2 is not built"),
        ("sequence_parallel=true", "sequence_parallel says how the ranks of tp .* tp is 1. Set"),
        ("loss_parallel=true", "loss_parallel says how the ranks of tp are used, and tp is 1. Set"),
        ("pp=2,tp=2,loss_parallel=true", "loss_parallel with pp is not built"),
        ("cp=2,tp=2,loss_parallel=true", "loss_parallel with cp is not built"),
        ("plan={a: colwise}", "plan says how the ranks of tp are used, and tp is 1"),
        ("sharding=hybrid", "sharding"),
    ],
)
def test_what_is_not_built_or_says_nothing_is_refused(options: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        registry.resolve(f"mesh:{options}")


def test_float8_is_denied_whatever_the_options() -> None:
    for options in (MeshOptions(), MeshOptions(tp=2)):
        assert "fp8" not in MeshStrategy(options).capabilities().precisions


# -- what is shown ---------------------------------------------------------------------------------


def test_a_dry_run_shows_every_parameter() -> None:
    strategy = MeshStrategy(MeshOptions(tp=2))
    placement = Placement(size=4, local_size=4)
    said = dict(strategy.placements(EngineSpec(models.Decoder), placement))
    assert set(dict(models.Decoder().named_parameters())) < set(said)
    assert said["layers divided over tp"] == "found by tracing"
    assert said["blocks.0.attention: divided too"] == "num_heads, num_kv_heads"
    assert said["blocks.0.down.weight"] == (
        "[16, 32], dim 1 over tp=2, dim 0 over dp_shard=2: [8, 16] of a rank"
    )
    assert said["blocks.0.down.bias"] == "[16], whole on tp=2, dim 0 over dp_shard=2: [8] of a rank"
    assert said["tokens.weight"].endswith("also head.weight")


class TiedToABlock(nn.Module):
    """An embedding whose weight is also that of a layer that is divided."""

    def __init__(self, *, as_table: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        blocks = [Bare() for _ in range(2)]
        self.blocks = nn.ModuleList(blocks)
        if as_table:
            self.table = blocks[1].up.weight
        else:
            blocks[1].up.weight = self.embedding.weight


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def test_a_layer_that_is_tied_to_one_elsewhere_stays_whole_where_none_is_named() -> None:
    plan = make_plan(TiedToABlock(), 2)
    assert set(plan.styles) == {"blocks.0.up", "blocks.0.down"}


def test_a_parameter_of_no_layer_that_is_tied_to_a_divided_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'table' and 'blocks\.1\.up\.weight' are one parameter"):
        make_plan(TiedToABlock(as_table=True), 2)
