"""Which devices a run gets, on machines that are described to it."""

from __future__ import annotations

import re
from importlib import metadata

import pytest
import torch

from unipar.engine import float8
from unipar.engine.checks import check_capabilities
from unipar.errors import ConfigError
from unipar.strategy import EngineSpec
from unipar.strategy.registry import resolve, table
from unipar.utils.devices import peak_memory, resolve_device_type, resolve_num_devices
from unipar.world import Placement


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla P100")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("three_gpus")
def test_every_gpu_is_taken_unless_told_otherwise():
    assert resolve_device_type("auto") == "cuda"
    assert resolve_num_devices("auto", "cuda") == 3
    assert resolve_num_devices(2, "cuda") == 2
    assert resolve_device_type("cpu") == "cpu"


@pytest.mark.usefixtures("three_gpus")
def test_more_gpus_than_there_are_is_refused():
    with pytest.raises(ConfigError, match=r"devices=4 .* has 3 GPU.*Use devices=3 .*num_nodes"):
        resolve_num_devices(4, "cuda")


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_one_process_runs_on_the_cpu():
    assert resolve_device_type("auto") == "cpu"
    assert resolve_num_devices("auto", "cpu") == 1


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("built_for", "reason"), [("12.6", "nvidia-smi and CUDA_VISIBLE_DEVICES"), (None, "CUDA build")]
)
def test_a_gpu_that_is_not_there_is_refused_with_the_likely_reason(
    monkeypatch: pytest.MonkeyPatch, built_for: str | None, reason: str
):
    monkeypatch.setattr(torch.version, "cuda", built_for)
    with pytest.raises(ConfigError, match=rf"sees no GPU .*{reason}.*Use device='cpu'"):
        resolve_device_type("cuda")


def test_fewer_than_one_device_is_refused():
    with pytest.raises(ConfigError, match="devices=0: ask for at least 1"):
        resolve_num_devices(0, "cpu")


@pytest.mark.usefixtures("three_gpus")
def test_a_precision_that_the_gpu_lacks_is_refused():
    strategy = resolve("ddp")
    spec = EngineSpec(torch.nn.Linear(1, 1), precision="bf16")
    with pytest.raises(ConfigError, match=r"'bf16' is not supported by Tesla P100. Use .*'fp16'"):
        check_capabilities(strategy, spec, Placement(device_type="cuda"))


def test_memory_is_told_in_bytes():
    assert 2**24 < peak_memory("cpu") < 2**40


def refusal_of_fp8(strategy: str = "ddp", device: str = "cuda") -> str:
    spec = EngineSpec(torch.nn.Linear(16, 16), precision="fp8")
    with pytest.raises(ConfigError) as error:
        check_capabilities(resolve(strategy), spec, Placement(device_type=device))
    return str(error.value)


@pytest.mark.usefixtures("three_gpus")
def test_fp8_is_refused_where_nothing_computes_in_it(monkeypatch: pytest.MonkeyPatch):
    assert re.search("fp8' needs a GPU, .* on cpu. Use .*'bf16'", refusal_of_fp8(device="cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    assert re.search(r"Tesla P100, .*8\.6\. Use precision='bf16', or .*8\.9", refusal_of_fp8())


@pytest.mark.usefixtures("three_gpus")
def test_fp8_is_refused_without_its_torchao(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    # With an older torch it is refused for that.
    monkeypatch.setattr(float8, "check_torchao", lambda: None)
    monkeypatch.setattr(metadata, "version", lambda name: "0.17.0")
    assert "torchao 0.17.0 is installed. Run: pip install 'unipar[fp8]'" in refusal_of_fp8()
    monkeypatch.setattr(metadata, "version", raise_not_found)
    assert "torchao is not installed. Run: pip install 'unipar[fp8]'" in refusal_of_fp8()
    monkeypatch.setattr(metadata, "version", lambda name: "0.18.0")
    spec = EngineSpec(torch.nn.Linear(16, 16), precision="fp8")
    check_capabilities(resolve("ddp"), spec, Placement(device_type="cuda"))


def raise_not_found(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


def test_fp8_is_claimed_only_where_layers_are_changed_for_it():
    found = [one for one in table() if one.capabilities and "fp8" in one.capabilities.precisions]
    assert {one.name for one in found} == {"single", "ddp", "fsdp"}


@pytest.mark.usefixtures("three_gpus")
def test_fp8_is_refused_under_other_strategies():
    assert "precision='fp8' is not supported. Allowed: bf16, fp16, fp32" in refusal_of_fp8("dp")
