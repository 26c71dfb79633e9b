"""Experts by the hub's names and as transformers 5 holds them, beside transformers itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from unipar.checkpoint import from_safetensors, load_model, to_safetensors
from unipar.cli.convert import convert
from unipar.errors import CheckpointError, ConfigError
from unipar.state import named_weights

SIZES: dict[str, Any] = {
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def mixtral() -> Any:
    import transformers

    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2)
    )


def qwen() -> Any:
    import transformers

    make: Any = transformers.Qwen3MoeConfig
    config = make(
        **SIZES, head_dim=4, moe_intermediate_size=10, num_experts=4, num_experts_per_tok=2
    )
    return transformers.Qwen3MoeForCausalLM(config)


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    (own, _), (others, _) = named_weights(found), named_weights(expected)
    assert own.keys() == others.keys()
    for name, tensor in others.items():
        assert torch.equal(own[name], tensor), name


@pytest.mark.parametrize(("build", "form"), [(mixtral, "mixtral"), (qwen, "qwen")])
def test_the_hubs_names_are_written_and_read(
    build: Callable[[], Any], form: Any, tmp_path: Path
) -> None:
    model = build()
    # What transformers itself writes has the hub's names.
    model.save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    assert any(".experts.0." in name for name in theirs)

    checkpoint = from_safetensors(tmp_path / "theirs", tmp_path / "own", experts="fused")
    assert_same(load_model(checkpoint, build()), model)
    assert_same(load_model(tmp_path / "theirs", build()), model)

    written = to_safetensors(checkpoint, tmp_path / "out", max_shard_bytes=3000, experts=form)
    tensors: dict[str, torch.Tensor] = {}
    for file in written.glob("*.safetensors"):
        tensors |= load_file(file)
    assert tensors.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(tensors[name], tensor), name
    model.config.save_pretrained(written)
    assert_same(type(model).from_pretrained(written, dtype=torch.float32), model)


def test_the_form_of_experts_has_to_be_said(tmp_path: Path) -> None:
    model = mixtral()
    model.save_pretrained(tmp_path / "theirs")
    with pytest.raises(ConfigError, match=r"experts fused.*separate"):
        from_safetensors(tmp_path / "theirs", tmp_path / "none")
    as_they_are = from_safetensors(tmp_path / "theirs", tmp_path / "apart", experts="separate")
    with pytest.raises(ConfigError, match="no tensor of all experts"):
        to_safetensors(as_they_are, tmp_path / "out", experts="qwen")
    own = from_safetensors(tmp_path / "theirs", tmp_path / "own", experts="fused")
    with pytest.raises(ConfigError, match=r"mixtral .*qwen .*fused"):
        to_safetensors(own, tmp_path / "out")
    kept = to_safetensors(own, tmp_path / "out", experts="fused")
    with pytest.raises(ConfigError, match="no tensor of a single expert"):
        from_safetensors(kept, tmp_path / "again", experts="fused")
    assert_same(load_model(kept, mixtral()), model)


@pytest.mark.parametrize("form", ["mixtral", "qwen"])
@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        # As GPT-OSS has them: with biases, and the other way round.
        (
            {"gate_up_proj": (2, 8, 6), "gate_up_proj_bias": (2, 6), "down_proj": (2, 3, 8)},
            r"holds down_proj, gate_up_proj, gate_up_proj_bias\. .*fused",
        ),
        (
            {"gate_up_proj": (2, 8, 6), "down_proj": (2, 3, 8)},
            r"gate_up_proj \[2, 8, 6\] and down_proj \[2, 3, 8\]",
        ),
        ({"gate_up_proj": (2, 8), "down_proj": (2, 8)}, r"gate_up_proj \[2, 8\]"),
        # Without gates.
        ({"up_proj": (2, 6, 8), "down_proj": (2, 8, 6)}, "holds down_proj, up_proj"),
        ({"gate_up_proj": (2, 6, 8)}, "holds gate_up_proj"),
    ],
)
def test_other_experts_of_the_same_names_are_refused(
    form: Any, shapes: dict[str, tuple[int, ...]], said: str, tmp_path: Path
) -> None:
    tensors = {f"layers.0.mlp.experts.{key}": torch.ones(shape) for key, shape in shapes.items()}
    # Beside them, one layer as it should be: without any nothing is to be written.
    tensors |= {
        "layers.1.mlp.experts.gate_up_proj": torch.ones(2, 6, 8),
        "layers.1.mlp.experts.down_proj": torch.ones(2, 8, 3),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    own = from_safetensors(tmp_path / "a.safetensors", tmp_path / "own")
    with pytest.raises(CheckpointError, match=rf"'layers\.0\.mlp\.experts'.*{said}"):
        to_safetensors(own, tmp_path / "out", experts=form)
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    names = {f"mlp.experts.{e}.{key}_proj.weight" for e in range(3) for key in ("gate", "up")}
    save_file(
        {n: torch.ones(2, 2) for n in names - {"mlp.experts.1.up_proj.weight"}},
        tmp_path / "a.safetensors",
    )
    with pytest.raises(CheckpointError, match=r"gate_up_proj.* of expert 1"):
        from_safetensors(tmp_path / "a.safetensors", tmp_path / "own", experts="fused")


def test_the_command_line_says_which_forms_there_are(tmp_path: Path) -> None:
    mixtral().save_pretrained(tmp_path / "theirs")
    with pytest.raises(ConfigError, match="Say fused or separate"):
        convert(tmp_path / "theirs", tmp_path / "own", experts="qwen")
    convert(tmp_path / "theirs", tmp_path / "own", experts="fused")
    with pytest.raises(ConfigError, match="Say mixtral, qwen or fused"):
        convert(tmp_path / "own", tmp_path / "out", experts="separate")
    convert(tmp_path / "own", tmp_path / "out", experts="mixtral")
    assert (tmp_path / "out" / "model.safetensors").exists()
