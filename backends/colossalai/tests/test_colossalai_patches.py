"""Each change to Colossal-AI is still needed, still fits what it changes, and is taken back."""

from __future__ import annotations

import hashlib
import inspect
import subprocess
import sys
from functools import reduce
from importlib import import_module
from typing import Any

import pytest
import torch
from colossalai_engines import GEMINI, train, with_engine
from torch import nn

from unipar.strategy import registry
from unipar.testing.compare import assemble_weights, assert_equal_weights
from unipar.world import Placement, joined
from unipar_colossalai import patches
from unipar_colossalai.patches import Patch


def target_of(patch: Patch) -> Any:
    module, _, name = patch.target.partition(":")
    return reduce(getattr, name.split("."), import_module(module))


@pytest.mark.parametrize("patch", patches.ALL, ids=lambda patch: patch.name)
def test_what_a_patch_replaces_is_what_it_was_written_against(
    patch: Patch, world_pool: Any
) -> None:
    assert world_pool(1).run(source_hash, patch.name)[0] == patch.source


def source_hash(placement: Placement, name: str) -> str:
    from unipar_colossalai.framework import load

    load()
    (patch,) = (patch for patch in patches.ALL if patch.name == name)
    return hashlib.sha256(inspect.getsource(target_of(patch)).encode()).hexdigest()


# -- what goes wrong without them ----------------------------------------------------------------


def test_without_zero_on_cpu_it_refuses_a_cpu(world_pool: Any) -> None:
    assert world_pool(1).run(zero_unpatched)[0] == "device is required"


def zero_unpatched(placement: Placement) -> str:
    from unipar_colossalai.framework import load

    booster = load()
    with joined(placement):
        plugin = booster.plugin.LowLevelZeroPlugin(precision="fp32", overlap_communication=False)
        model = nn.Linear(2, 2)
        try:
            booster.Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters()))
        except AssertionError as error:
            return str(error)
    return "it runs"


def test_without_keep_batchnorm_the_model_gets_another_normalization(world_pool: Any) -> None:
    assert "SyncBatchNorm" in world_pool(1).run(batchnorm_unpatched)[0]


def batchnorm_unpatched(placement: Placement) -> str:
    from unipar_colossalai.framework import load

    booster = load()
    with joined(placement):
        plugin = booster.plugin.TorchDDPPlugin()
        try:
            model, *_ = booster.Booster(plugin=plugin).boost(nn.Sequential(nn.BatchNorm1d(2)))
        except ValueError as error:
            return str(error)
        return type(model.unwrap()[0]).__name__


def test_without_the_hosts_streams_zero_has_none(world_pool: Any) -> None:
    assert "not supported for cpu" in world_pool(1).run(stream_of_the_host)[0]


def stream_of_the_host(placement: Placement) -> str:
    from unipar_colossalai.framework import load

    load()
    from colossalai.accelerator.cpu_accelerator import (  # pyright: ignore[reportMissingImports]
        CpuAccelerator,
    )

    try:
        CpuAccelerator().Stream()
    except RuntimeError as error:
        return str(error)
    return "it has one"


class Transposed(nn.Linear):
    """Reads its weight through an attribute, and its bias through a reflected operator."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input @ self.weight.T + (1 - self.bias)


class Called(nn.Linear):
    """The same, in calls that Gemini knows by itself."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input @ self.weight.t() + torch.rsub(self.bias, 1)


def test_attributes_and_reflected_operators_are_gathered_for(world_pool: Any) -> None:
    trained = []
    for kind in (Transposed, Called):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = nn.Sequential(kind(4, 4), kind(4, 2))
        ranks = world_pool(2).run(with_engine, GEMINI, train, model)
        trained.append(assemble_weights(ranks))
    by_attributes, by_calls = trained
    assert_equal_weights(by_attributes, by_calls, 0.0)


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        ("chunks-on-cpu", "AssertionError"),
        ("attributes-that-compute", "out of bounds for storage of size 0"),
        ("gemini-optimizers", "You should use an optimizer in the available list"),
        ("auto-placement-on-cpu", "Torch not compiled with CUDA enabled"),
        ("fsdp-on-cpu", "Torch not compiled with CUDA enabled"),
    ],
)
def test_without_each_change_a_step_fails(left_out: str, said: str, world_pool: Any) -> None:
    assert said in world_pool(1).run(step_without, left_out)[0]


def step_without(placement: Placement, left_out: str) -> str:
    from unipar.data.batch import Batch, MicroBatch
    from unipar.strategy import EngineSpec

    kept = patches.ALL
    patches.ALL = tuple(patch for patch in kept if patch.name != left_out)
    plugin = "fsdp" if left_out == "fsdp-on-cpu" else "gemini,placement=auto"
    strategy = registry.resolve(f"colossalai:plugin={plugin}")
    world = strategy.setup(placement)
    try:
        model = Transposed(2, 2)
        spec = EngineSpec(
            model, lambda named: torch.optim.SGD([p for _, p in named]), precision="bf16"
        )
        engine = strategy.prepare(spec, world)
        batch = Batch((MicroBatch(torch.ones(2, 2), 2),), 2)
        engine.train_step(batch, lambda model, x: model(x).mean())
    except (AssertionError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        patches.ALL = kept
        strategy.teardown()
        world.leave()
    return "it runs"


@pytest.mark.thorough
@pytest.mark.usefixtures("new_interpreters")
def test_without_stand_ins_it_cannot_be_imported() -> None:
    code = "import warnings; warnings.simplefilter('ignore'); import colossalai.booster"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "ModuleNotFoundError: No module named 'galore_torch'" in done.stderr


def test_stand_ins_are_gone_after_the_import(world_pool: Any) -> None:
    assert world_pool(1).run(left_over)[0] == []


def left_over(placement: Placement) -> list[str]:
    from importlib.util import find_spec

    from unipar_colossalai.framework import load

    load()
    return [name for name in ("galore_torch", "bitsandbytes") if find_spec(name)]


# -- what is left of them ------------------------------------------------------------------------


@pytest.mark.parametrize("plugin", ["ddp", "zero2", "gemini", "fsdp"])
def test_teardown_leaves_colossalai_as_it_was(plugin: str, world_pool: Any) -> None:
    before, during, after = world_pool(1).run(set_up_and_tear_down, plugin)[0]
    assert before == after != during


def set_up_and_tear_down(placement: Placement, plugin: str) -> tuple[Any, Any, Any]:
    from unipar_colossalai.framework import load

    load()
    from colossalai.accelerator import api  # pyright: ignore[reportMissingImports]
    from colossalai.booster.plugin import (  # pyright: ignore[reportMissingImports]
        torch_ddp_plugin,
        torch_fsdp_plugin,
    )
    from colossalai.legacy.utils import memory  # pyright: ignore[reportMissingImports]
    from colossalai.zero import LowLevelZeroOptimizer  # pyright: ignore[reportMissingImports]
    from colossalai.zero.gemini import gemini_optimizer  # pyright: ignore[reportMissingImports]
    from colossalai.zero.gemini.chunk.chunk import Chunk  # pyright: ignore[reportMissingImports]
    from colossalai.zero.gemini.memory_tracer.memory_monitor import (  # pyright: ignore
        SyncCudaMemoryMonitor,
    )

    def seen() -> tuple[int, ...]:
        found = api._ACCELERATOR, torch_ddp_plugin.nn, LowLevelZeroOptimizer._sanity_checks
        found = *found, Chunk.close_chunk, gemini_optimizer._AVAIL_OPTIM_LIST
        found = *found, SyncCudaMemoryMonitor.start, memory.colo_device_memory_capacity
        found = *found, torch_fsdp_plugin.torch
        return tuple(map(id, found))

    before = seen()
    strategy = registry.resolve(f"colossalai:plugin={plugin}")
    world = strategy.setup(placement)
    during = seen()
    strategy.teardown()
    world.leave()
    return before, during, seen()


@pytest.mark.parametrize(
    ("device_type", "plugin", "names"),
    [
        ("cpu", "ddp", ["keep-batchnorm"]),
        ("cpu", "zero1", ["zero-on-cpu"]),
        (
            *("cpu", "gemini"),
            [
                *("chunks-on-cpu", "attributes-that-compute"),
                *("auto-placement-on-cpu", "gemini-optimizers", "strided-gradients"),
            ],
        ),
        ("cuda", "gemini", ["attributes-that-compute", "gemini-optimizers", "strided-gradients"]),
        ("cpu", "fsdp", ["fsdp-on-cpu"]),
        ("cuda", "fsdp", []),
        ("cuda", "zero2", []),
        ("cuda", "ddp", ["keep-batchnorm"]),
    ],
)
def test_a_run_gets_only_what_it_needs(device_type: str, plugin: str, names: list[str]) -> None:
    assert [patch.name for patch in patches.ALL if patch.needed(device_type, plugin)] == names
