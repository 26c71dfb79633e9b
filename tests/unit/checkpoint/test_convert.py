"""To the Hugging Face layout and back, and into bare models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from unipar.checkpoint import describe, from_safetensors, load, load_model, save, to_safetensors
from unipar.errors import CheckpointError, ConfigError
from unipar.state import named_weights
from unipar.world import World


class Tied(nn.Module):
    """An embedding tied to a head, a normalization with statistics, and a table made by code."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight


class Computed(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0), persistent=False)


@pytest.fixture
def model() -> Tied:
    return Tied()


@pytest.fixture
def path(tmp_path: Path, make_engine: Callable[..., Any], alone: World, model: Tied) -> Path:
    weights, aliases = named_weights(model)
    engine = make_engine(weights, {"embed.weight.exp_avg": torch.ones(11, 8)}, aliases=aliases)
    return save(tmp_path / "run", {"model": engine}, alone, step=7, metrics={"loss": 1.5})


def _equal(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def test_a_tied_weight_that_is_stored_twice_is_one(tmp_path: Path, model: Tied) -> None:
    stored = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    save_file(stored, tmp_path / "model.safetensors")
    assert _equal(load_model(tmp_path, Tied), model)
    stored["head.weight"][3, 2] += 1
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'head.weight' with other values .* Build the mod"):
        load_model(tmp_path, Tied)


def test_weights_load_into_a_model_or_what_builds_one(path: Path, model: Tied) -> None:
    assert _equal(load_model(path, Tied()), model)
    assert _equal(load_model(path.parent, Tied), model)
    built = load_model(path, Tied)
    assert isinstance(built, Tied)
    assert built.head.weight is built.embed.weight, "the tie is lost"
    assert built.head.weight.requires_grad


def test_a_model_that_computes_tensors_is_built_for_real(path: Path) -> None:
    built = load_model(path, Computed)
    assert torch.equal(built.get_buffer("table"), torch.arange(4.0))


def test_a_model_function_is_built_without_memory_where_it_can_be(path: Path) -> None:
    devices = []

    def build() -> nn.Module:
        model = Tied()
        devices.append(model.embed.weight.device.type)
        return model

    load_model(path, build)
    assert devices == ["meta"]


def test_a_model_of_another_size_lists_the_differences(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"embed.weight: stored \[11, 8\], wanted \[11, 9\]"):
        load_model(path, Tied(9))


def test_one_of_several_engines_is_chosen_by_name(
    tmp_path: Path, make_engine: Callable[..., Any], alone: World
) -> None:
    engines = {
        name: make_engine({"weight": torch.full((1, 2), v), "bias": torch.ones(1)})
        for name, v in (("generator", 1.0), ("critic", 2.0))
    }
    path = save(tmp_path, engines, alone, step=1)
    with pytest.raises(CheckpointError, match=r"several engines \(generator, critic\): say which"):
        load_model(path, nn.Linear(2, 1))
    with pytest.raises(CheckpointError, match="Did you mean 'critic'"):
        load_model(path, nn.Linear(2, 1), engine="critics")
    linear = load_model(path, nn.Linear(2, 1), engine="critic")
    assert torch.equal(linear.get_parameter("weight"), torch.full((1, 2), 2.0))


def test_one_file_holds_each_tied_weight_once(path: Path, tmp_path: Path, model: Tied) -> None:
    output = to_safetensors(path, tmp_path / "out")
    assert [file.name for file in output.iterdir()] == ["model.safetensors"]
    tensors = load_file(output / "model.safetensors")
    assert "head.weight" not in tensors
    assert torch.equal(tensors["embed.weight"], model.embed.weight)
    assert _equal(load_model(output, Tied), model)
    assert _equal(load_model(output / "model.safetensors", Tied()), model)


def test_shards_have_an_index_and_keep_to_their_size(
    path: Path, tmp_path: Path, model: Tied
) -> None:
    output = to_safetensors(path, tmp_path / "out", max_shard_bytes=100)
    index = json.loads((output / "model.safetensors.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    files = sorted(output.glob("*.safetensors"))
    for number, file in enumerate(files, 1):
        assert file.name == f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 100
        assert {name: index["weight_map"][name] for name in tensors} == dict.fromkeys(
            tensors, file.name
        )
        found.update(tensors)
    assert len(files) > 1
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    assert _equal(load_model(output, Tied), model)


@pytest.mark.parametrize("dtype", ["bf16", torch.bfloat16])
def test_only_floating_point_weights_change_dtype(path: Path, tmp_path: Path, dtype: Any) -> None:
    tensors = load_file(to_safetensors(path, tmp_path / "out", dtype=dtype) / "model.safetensors")
    assert tensors["embed.weight"].dtype == torch.bfloat16
    assert tensors["norm.num_batches_tracked"].dtype == torch.int64


def test_there_and_back_is_the_same_model(
    path: Path, tmp_path: Path, make_engine: Callable[..., Any], alone: World, model: Tied
) -> None:
    exported = to_safetensors(path, tmp_path / "out", max_shard_bytes=200)
    back = from_safetensors(exported, tmp_path / "back")
    assert back == tmp_path / "back/step-00000000"
    assert _equal(load_model(back, Tied), model)
    again = Tied()
    manifest = load(back, {"model": make_engine(named_weights(again)[0])}, alone)
    assert manifest.weights_only
    assert _equal(again, model)


def test_transformers_reads_what_is_written_and_back(
    tmp_path: Path, make_engine: Callable[..., Any], alone: World
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 12}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    gpt = transformers.GPT2LMHeadModel(config).eval()
    weights, aliases = named_weights(gpt)
    assert aliases, "GPT-2 ties its head"
    path = save(tmp_path / "run", {"model": make_engine(weights, aliases=aliases)}, alone, step=1)
    output = to_safetensors(path, tmp_path / "hf", max_shard_bytes=8000)
    config.save_pretrained(output)
    read, report = transformers.GPT2LMHeadModel.from_pretrained(output, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert _equal(read, gpt)

    gpt.save_pretrained(tmp_path / "theirs")
    back = from_safetensors(tmp_path / "theirs", tmp_path / "back")
    other = transformers.GPT2LMHeadModel(config)
    assert _equal(load_model(back, other), gpt)


def test_bad_sources_and_outputs_are_named(path: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        from_safetensors(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled/pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin: pickles, which are not read"):
        from_safetensors(tmp_path / "pickled", tmp_path / "out")
    output = to_safetensors(path, tmp_path / "out")
    with pytest.raises(ConfigError, match="holds safetensors already"):
        to_safetensors(path, output)
    with pytest.raises(ConfigError, match="dtype 'int8' is unknown"):
        to_safetensors(path, tmp_path / "int", dtype="int8")  # pyright: ignore[reportArgumentType]
    file = output / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"model.safetensors: tensor .* cut short or damaged"):
        load_model(output, Tied)
    file.write_bytes(b"not safetensors at all")
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        load_model(output, Tied)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"w": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"Tensor 'w' is in .*a.safetensors and b"):
        load_model(tmp_path, nn.Linear(1, 1))


def test_a_description_says_what_is_there(path: Path) -> None:
    description = describe(path.parent)
    assert (description.step, description.world_size, description.weights_only) == (7, 1, False)
    assert description.metrics == {"loss": 1.5}
    engine = description.engines["model"]
    assert engine.weights["embed.weight"].shape == (11, 8)
    assert engine.num_elements == 11 * 8 + 4 * 8 + 1
    assert engine.weight_bytes == 4 * (11 * 8 + 4 * 8) + 8
    assert engine.optimizer_bytes == 4 * 11 * 8
    assert engine.aliases == {"head.weight": "embed.weight"}
    assert description.nbytes > engine.weight_bytes + engine.optimizer_bytes
