"""What HybridParallelPlugin needs changed on a CPU."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from colossalai_models import adamw, language_model

from unipar.data.batch import Batch, MicroBatch
from unipar.objective import Objective
from unipar.strategy import EngineSpec, registry
from unipar.testing.pool import WorldPools
from unipar.world import Placement
from unipar_colossalai import patches

pytestmark = pytest.mark.slow


GPT2: dict[str, Any] = {"kind": "GPT2"}
QWEN2: dict[str, Any] = {"kind": "Qwen2"}
NO_MASK, NO_LABELS, HALF = {"attention_mask"}, {"labels"}, {"fp32"}


@pytest.mark.parametrize(
    ("left_out", "sizes", "model", "without", "said"),
    [
        ("stages-on-cpu", "pp_size=2", {}, set(), "has no attribute 'is_hccl_available'"),
        ("stages-on-cpu", "tp_size=2", {}, set(), "it runs"),
        ("", "pp_size=2", {}, set(), "it runs"),
        ("gpt2-on-cpu", "pp_size=2", GPT2, set(), "Expected a cuda device"),
        ("gptj-on-cpu", "pp_size=2", {"kind": "GPTJ"}, set(), "Expected a cuda device"),
        ("gpt2-masks", "pp_size=2", GPT2, NO_MASK, "'NoneType' object has no attribute 'size'"),
        ("gpt2-without-labels", "pp_size=2", GPT2, NO_LABELS, "local variable 'loss'"),
        ("autocast-linear", "tp_size=2", {}, HALF, "same dtype"),
        ("", "tp_size=2", {}, HALF, "it runs"),
    ],
)
def test_without_each_change_a_step_fails(
    left_out: str,
    sizes: str,
    model: dict[str, Any],
    without: set[str],
    said: str,
    world_pool: WorldPools,
) -> None:
    results = world_pool(2).run(step_without, left_out, sizes, model, without)
    # What the other stages say is that one has gone.
    assert any(said in of_rank for of_rank in results), results


def step_without(
    placement: Placement, left_out: str, sizes: str, model: dict[str, Any], without: set[str]
) -> str:
    def of_output(output: Any, batch: Any) -> Any:
        return output.logits.mean() if "labels" in without else output.loss

    loss = Objective(lambda batch: batch, of_output)

    def run(engine: Any) -> str:
        engine.train_step(batch_of(without), loss)
        return "it runs"

    try:
        precision = "bf16" if "fp32" in without else "fp32"
        return engine_without(placement, left_out, sizes, run, model, precision)
    except (AttributeError, ValueError, RuntimeError, NameError) as error:
        return str(error)


def batch_of(without: Collection[str]) -> Batch:
    tokens = torch.arange(16).reshape(2, 8) % 11
    data = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}
    return Batch((MicroBatch({k: v for k, v in data.items() if k not in without}, 2),), 2)


def engine_without(
    placement: Placement,
    left_out: str,
    sizes: str,
    run: Any,
    model: dict[str, Any],
    precision: Any = "fp32",
) -> Any:
    kept = patches.ALL
    patches.ALL = tuple(patch for patch in kept if patch.name != left_out)
    strategy = registry.resolve(f"colossalai:plugin=hybrid,{sizes}")
    world = strategy.setup(placement)
    try:
        engine = strategy.prepare(
            EngineSpec(language_model(**model), adamw, precision=precision), world
        )
        return run(engine)
    finally:
        patches.ALL = kept
        strategy.teardown()
        world.leave()


@pytest.mark.parametrize(("left_out", "widths"), [("gpt2-whole-logits", [11, 0]), ("", [11, 11])])
def test_each_rank_has_whole_logits(
    left_out: str, widths: list[int], world_pool: WorldPools
) -> None:
    def width(engine: Any) -> int:
        return engine.module(input_ids=torch.zeros(1, 2, dtype=torch.long)).logits.shape[-1]

    assert world_pool(2).run(engine_without, left_out, "tp_size=2", width, GPT2) == widths


@pytest.mark.parametrize(
    ("left_out", "same"), [("same-dropout", False), ("", True)], ids=["without", "with"]
)
def test_ranks_drop_the_same_of_what_each_has_whole(
    left_out: str, same: bool, world_pool: WorldPools
) -> None:
    def run(engine: Any) -> torch.Tensor:
        for _ in range(2):
            engine.train_step(batch_of(()), Objective.of_model(engine.module))
        return engine.module.transformer.ln_f.weight.detach().clone()

    def on(placement: Placement) -> torch.Tensor:
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.3)
        return engine_without(placement, left_out, "tp_size=2", run, GPT2 | rates)

    one, other = world_pool(2).run(on)
    assert torch.equal(one, other) == same


@pytest.mark.parametrize(
    ("left_out", "model", "changed", "read", "sees"),
    [
        ("gpt2-masks", GPT2, -1, 0, True),
        ("", GPT2, -1, 0, False),
        ("qwen2-masks", QWEN2 | {"num_hidden_layers": 2, "sliding_window": 2}, 0, -1, True),
        ("", QWEN2 | {"num_hidden_layers": 2, "sliding_window": 2}, 0, -1, False),
    ],
)
def test_a_stage_sees_what_the_model_sees(
    left_out: str,
    model: dict[str, Any],
    changed: int,
    read: int,
    sees: bool,
    world_pool: WorldPools,
) -> None:
    """Without the change, PyTorch's attention looks ahead, or further back than its window."""

    logits = Objective(lambda batch: batch, lambda output, batch: output.logits[:, read].sum())

    def run(engine: Any) -> list[float]:
        first, second = (batch_of(()) for _ in range(2))
        second.microbatches[0].data["input_ids"][:, changed] += 1
        return [engine.eval_batch(one, logits).total.item() for one in (first, second)]

    def on(placement: Placement) -> list[float]:
        settings = model | {"attn_implementation": "sdpa"}
        return engine_without(placement, left_out, "pp_size=2", run, settings)

    for one, other in world_pool(2).run(on):
        assert (one != other) == sees


def test_without_the_hosts_generator_a_layer_cannot_be_divided(world_pool: WorldPools) -> None:
    assert "takes 0 positional arguments" in world_pool(1).run(generator_of_the_host)[0]


def generator_of_the_host(placement: Placement) -> str:
    from unipar_colossalai.framework import load

    load()
    from colossalai.accelerator.cpu_accelerator import (  # pyright: ignore[reportMissingImports]
        CpuAccelerator,
    )

    try:
        CpuAccelerator().get_rng_state()
    except TypeError as error:
        return str(error)
    return "it can"


def test_teardown_leaves_colossalai_as_it_was(world_pool: WorldPools) -> None:
    before, during, after = world_pool(2).run(set_up_and_tear_down)[0]
    assert before == after != during


def set_up_and_tear_down(placement: Placement) -> tuple[Any, Any, Any]:
    from unipar_colossalai.framework import load

    load()
    import colossalai.pipeline.p2p as p2p  # pyright: ignore[reportMissingImports]
    import colossalai.shardformer.modeling.gpt2 as gpt2  # pyright: ignore[reportMissingImports]
    import colossalai.shardformer.modeling.qwen2 as qwen2  # pyright: ignore[reportMissingImports]
    from colossalai.shardformer.layer import (  # pyright: ignore[reportMissingImports]
        DropoutForParallelInput,
    )
    from colossalai.shardformer.layer._operation import (  # pyright: ignore[reportMissingImports]
        LinearWithAsyncCommunication,
    )
    from colossalai.shardformer.policies.gpt2 import (  # pyright: ignore[reportMissingImports]
        GPT2LMHeadModelPolicy,
    )
    from colossalai.shardformer.policies.qwen2 import (  # pyright: ignore[reportMissingImports]
        Qwen2ForCausalLMPolicy,
    )

    def seen() -> tuple[int, ...]:
        found = p2p._check_for_nccl_hccl_backend, gpt2.torch, gpt2._get_attention_mask
        found = *found, gpt2.GPT2PipelineForwards.gpt2_lmhead_model_forward
        found = *found, GPT2LMHeadModelPolicy.module_policy
        found = *found, DropoutForParallelInput.from_native_module
        found = *found, Qwen2ForCausalLMPolicy.module_policy
        found = *found, qwen2.Qwen2PipelineForwards.qwen2_model_forward
        found = *found, qwen2._prepare_4d_causal_attention_mask
        found = *found, LinearWithAsyncCommunication.forward
        return tuple(map(id, found))

    before = seen()
    strategy = registry.resolve("colossalai:plugin=hybrid,tp_size=2")
    world = strategy.setup(placement)
    during = seen()
    strategy.teardown()
    world.leave()
    return before, during, seen()


def test_a_run_gets_only_what_it_needs() -> None:
    def names(device_type: str) -> set[str]:
        return {patch.name for patch in patches.ALL if patch.needed(device_type, "hybrid")}

    on_cpu = {"stages-on-cpu", "gpt2-on-cpu", "gptj-on-cpu", "zero-on-cpu"}
    assert names("cpu") - names("cuda") == on_cpu
    assert {"gpt2-whole-logits", "same-dropout"} <= names("cuda")
