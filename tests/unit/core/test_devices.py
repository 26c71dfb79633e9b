"""Which devices a run gets, on machines that are described to it."""

from __future__ import annotations

import pytest
import torch

from unipar.checks import check_capabilities
from unipar.devices import peak_memory, resolve_device_type, resolve_num_devices
from unipar.errors import ConfigError
from unipar.registry import resolve
from unipar.strategy import EngineSpec
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
