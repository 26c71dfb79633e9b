"""What a script meets in one process: values as before, or an error that names call and remedy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unipar.compat import colossalai
from unipar.compat.colossalai.accelerator import get_accelerator
from unipar.compat.colossalai.booster import Booster
from unipar.compat.colossalai.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    MoeHybridParallelPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from unipar.compat.colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from unipar.compat.colossalai.nn.optimizer import CPUAdam, FusedAdam, FusedSGD, HybridAdam
from unipar.compat.run import current
from unipar.errors import CheckpointError, ConfigError
from unipar.world import Placement

# A script's own process: nothing is divided, and what ranks do is proved by the corpus.


@pytest.fixture(autouse=True)
def _on_cpu(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIPAR_DEVICE", "cpu")


def boosted(plugin: Any = None, **asked: Any) -> tuple[Booster, Any, Any]:
    colossalai.launch_from_torch(seed=0, verbose=False)
    booster = Booster(plugin=TorchDDPPlugin() if plugin is None else plugin(), **asked)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    model, optimizer, *_ = booster.boost(model, optimizer)
    return booster, model, optimizer


def step(booster: Booster, model: Any, optimizer: Any) -> float:
    loss = model(torch.ones(2, 3)).square().mean()
    booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def fp32_zero(**asked: Any) -> LowLevelZeroPlugin:
    return LowLevelZeroPlugin(precision="fp32", **asked)


def test_a_plugins_norm_clips_every_step() -> None:
    booster, model, optimizer = boosted(lambda: fp32_zero(max_norm=0.01))
    plain = nn.Linear(3, 1)
    plain.load_state_dict(model.state_dict())
    loss = plain(torch.ones(2, 3)).square().mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5).step()
    step(booster, model, optimizer)
    assert torch.allclose(model.unwrap().weight, plain.weight, atol=1e-7)
    assert optimizer.get_grad_norm() == pytest.approx(float(norm))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda b, m, o, x: o.backward(x, retain_graph=True), "takes a loss and nothing else"),
        (lambda b, m, o, x: o.step(), r"booster.backward\(loss, optimizer\) was not called"),
        (lambda b, m, o, x: o.clip_grad_by_norm(1.0), "clip_grad_by_norm came before booster.back"),
        (lambda b, m, o, x: o.clip_grad_by_norm(1.0, norm_type=1), "clip to a 2-norm above 0"),
        (lambda b, m, o, x: o.clip_grad_by_value(1.0), "Use clip_grad_by_norm"),
        (lambda b, m, o, x: o.scale_loss(x), "Engines scale losses"),
        (lambda b, m, o, x: b.boost(m, torch.optim.SGD(m.parameters(), 1)), "two optimizers upd"),
        (lambda b, m, o, x: b.boost(nn.Linear(2, 1), torch.optim.SGD(nn.Linear(2, 1).parameters())),
         "updates no parameter of the Linear"),
        (lambda b, m, o, x: b.boost(torch.compile(nn.Linear(2, 1))), "divides the model itself"),
        (lambda b, m, o, x: b.enable_lora(m), "peft.get_peft_model"),
        (lambda b, m, o, x: b.execute_pipeline(iter([]), m, None), "only HybridParallelPlugin"),
        (lambda b, m, o, x: b.save_model(m, "a", shard=True, prefix="p"), "Name another directory"),
        (lambda b, m, o, x: b.plugin.configure(m), "Call the Booster's own methods"),
        (lambda b, m, o, x: b.plugin.tp_group, "Reduce numbers over all ranks"),
        (lambda b, m, o, x: b.load_model(m, "nowhere"), "there is no file nowhere"),
        (lambda b, m, o, x: Booster(), "without a plugin"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_where_it_is_called(
    call: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    booster, model, optimizer = boosted()
    loss = model(torch.ones(1, 3)).sum()
    if "without a plugin" in said:
        monkeypatch.setattr(current, "placement", lambda *_: Placement(rank=0, size=2))
    with pytest.raises((ConfigError, CheckpointError), match=said):
        call(booster, model, optimizer, loss)


def test_a_step_without_clearing_is_refused_and_not_taken_otherwise() -> None:
    booster, model, optimizer = boosted(fp32_zero)
    booster.backward(model(torch.ones(1, 3)).sum(), optimizer)
    optimizer.step()
    loss = model(torch.ones(1, 3)).sum()
    with pytest.raises(ConfigError, match=r"Call optimizer.zero_grad\(\) after optimizer.step"):
        booster.backward(loss, optimizer)
    optimizer.zero_grad()
    booster.backward(model(torch.ones(1, 3)).sum(), optimizer)
    optimizer.step()


def test_an_optimizer_of_another_model_than_the_losss_is_refused() -> None:
    booster, model, optimizer = boosted()
    other = nn.Bilinear(3, 3, 1)
    other, of_other, *_ = booster.boost(other, torch.optim.SGD(other.parameters(), lr=0.1))
    told = r"told that this loss trains a Bilinear, and it was computed by Linear alone\. Name the"
    with pytest.raises(ConfigError, match=told):
        booster.backward(model(torch.ones(1, 3)).sum(), of_other)
    step(booster, model, optimizer)


def test_a_step_within_no_sync_is_refused() -> None:
    booster, model, optimizer = boosted()
    with booster.no_sync(model, optimizer):
        booster.backward(model(torch.ones(1, 3)).sum(), optimizer)
        with pytest.raises(ConfigError, match="Call it behind the block"):
            optimizer.step()
    optimizer.step()


def test_plugins_that_clip_by_themselves_are_told_the_norm() -> None:
    booster, model, optimizer = boosted(fp32_zero)
    booster.backward(model(torch.ones(1, 3)).sum(), optimizer)
    with pytest.raises(ConfigError, match=r"Pass max_norm .* LowLevelZeroPlugin\(max_norm=2.0\)"):
        optimizer.clip_grad_by_norm(2.0)


def test_so_does_a_hybrid_in_half_precision() -> None:
    booster, model, optimizer = boosted(lambda: HybridParallelPlugin(1, 1, precision="bf16"))
    booster.backward(model(torch.ones(1, 3)).sum(), optimizer)
    with pytest.raises(ConfigError, match=r"HybridParallelPlugin\(max_norm=2.0\)"):
        optimizer.clip_grad_by_norm(2.0)


def test_what_zero_never_trains_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    colossalai.launch_from_torch(seed=0, verbose=False)
    booster, net = Booster(plugin=fp32_zero()), nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 1))
    net[0].requires_grad_(False)
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    step(booster, model, optimizer)
    net[0].requires_grad_(True)
    for _ in range(2):
        step(booster, model, optimizer)
    told = [
        one.message for one in caplog.records if "frozen when LowLevelZeroPlugin" in one.message
    ]
    assert len(told) == 1
    assert told[0].startswith("0.bias, 0.weight: ")


def test_zero_measures_a_norm_that_nothing_clips() -> None:
    booster, model, optimizer = boosted(fp32_zero)
    plain = nn.Linear(3, 1)
    plain.load_state_dict(model.state_dict())
    plain(torch.ones(2, 3)).square().mean().backward()
    step(booster, model, optimizer)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    norm = nn.utils.get_total_norm([one.grad for one in plain.parameters() if one.grad is not None])
    assert optimizer.get_grad_norm() == pytest.approx(norm.item())
    assert torch.allclose(model.unwrap().weight, plain.weight)


def test_files_of_other_optimizers_are_refused_with_a_reason() -> None:
    booster, _, optimizer = boosted()
    torch.save({"state": {}, "param_groups": [{"params": [0]}]}, "fewer.pt")
    with pytest.raises(CheckpointError, match="number those alone that are trained"):
        booster.load_optimizer(optimizer, "fewer.pt")
    torch.save({"state.0.step": torch.ones(())}, "flat.pt")
    with pytest.raises(CheckpointError, match="without use_async"):
        booster.load_optimizer(optimizer, "flat.pt")


@pytest.mark.parametrize(("plugin", "decays"), [(TorchFSDPPlugin, True), (TorchDDPPlugin, False)])
def test_what_a_step_does_not_use_decays_under_fsdp(plugin: Any, decays: bool) -> None:
    colossalai.launch_from_torch(seed=0, verbose=False)
    used, left = nn.Linear(3, 1), nn.Linear(3, 1)
    net = nn.ModuleList([used, left])
    net.forward = used.forward
    booster, before = Booster(plugin=plugin()), left.weight.detach().clone()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
    step(booster, *booster.boost(net, optimizer)[:2])
    assert torch.allclose(left.weight, before * (1 - 0.1 * 0.5) if decays else before)


def test_gemini_accumulates_when_it_is_told() -> None:
    booster, model, optimizer = boosted(lambda: GeminiPlugin(precision="bf16"))
    booster.backward(model(torch.ones(1, 3)).sum(), optimizer)
    with pytest.raises(ConfigError, match="enable_gradient_accumulation=True"):
        booster.backward(model(torch.ones(1, 3)).sum(), optimizer)


def test_half_precision_comes_out_as_the_plugin_would_have_it() -> None:
    _, model, _ = boosted(lambda: LowLevelZeroPlugin(precision="bf16"))
    assert model(torch.ones(1, 3)).dtype == torch.bfloat16
    current.close()
    _, model, _ = boosted(lambda: GeminiPlugin(precision="bf16", force_outputs_fp32=True))
    assert model(torch.ones(1, 3)).dtype == torch.float32


def test_a_criterion_computes_as_the_model_under_a_boosters_precision() -> None:
    colossalai.launch_from_torch(verbose=False)
    booster = Booster(mixed_precision="bf16", plugin=TorchDDPPlugin())
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.Linear(2, 1))
    assert criterion(model(torch.ones(1, 3))).dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="Choose of fp16, bf16, or set precision: fp8"):
        Booster(mixed_precision="fp16_apex", plugin=TorchDDPPlugin())


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("safe", [False, True])
def test_files_are_those_of_a_plain_model_and_optimizer(shard: bool, safe: bool) -> None:
    booster, model, optimizer = boosted()
    step(booster, model, optimizer)
    booster.save_model(model, "model", shard=shard, use_safetensors=safe)
    booster.save_optimizer(optimizer, "optimizer", shard=shard)
    before = model.unwrap().weight.clone()
    expected = step(booster, model, optimizer)
    booster.load_model(model, "model")
    booster.load_optimizer(optimizer, "optimizer")
    assert torch.equal(model.unwrap().weight, before)
    assert step(booster, model, optimizer) == expected
    if shard:
        name = "model.safetensors" if safe else "pytorch_model.bin"
        index = json.loads(Path(f"model/{name}.index.json").read_text())
        stem, ending = name.split(".")
        assert index["weight_map"] == dict.fromkeys(("weight", "bias"), f"{stem}-00001.{ending}")
        assert index["metadata"]["total_size"] == 16
    elif not safe:
        plain = nn.Linear(3, 1)
        plain.load_state_dict(torch.load("model"))
        sgd = torch.optim.SGD(plain.parameters(), lr=1.0)
        sgd.load_state_dict(torch.load("optimizer"))
        assert sgd.param_groups[0]["lr"] == 0.1
        assert sgd.state[plain.weight]["momentum_buffer"].shape == (1, 3)


def test_steps_are_read_as_colossalais_adams_count_them() -> None:
    def trained() -> tuple[Booster, Any, Any]:
        colossalai.launch_from_torch(seed=0, verbose=False)
        booster, model = Booster(plugin=TorchDDPPlugin()), nn.Linear(3, 1)
        model, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), lr=0.1))
        return booster, model, optimizer

    booster, model, optimizer = trained()
    step(booster, model, optimizer)
    booster.save_model(model, "model.pt")
    booster.save_optimizer(optimizer, "optimizer.pt")
    found = torch.load("optimizer.pt", weights_only=True)
    for values in found["state"].values():
        values["step"] = int(values["step"])
    torch.save(found, "ints.pt")
    # FusedAdam counts the steps of a group.
    for values in found["state"].values():
        found["param_groups"][0]["step"] = values.pop("step")
    torch.save(found, "groups.pt")
    ends = []
    for file in ("optimizer.pt", "ints.pt", "groups.pt"):
        booster.load_model(model, "model.pt")
        booster.load_optimizer(optimizer, file)
        ends.append([step(booster, model, optimizer) for _ in range(2)])
    assert ends[0] == ends[1] == ends[2]


def test_a_part_of_a_model_is_not_written_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIPAR_STRATEGY", "fsdp")
    booster, model, optimizer = boosted()
    step(booster, model, optimizer)
    for part in (model, model.unwrap()):
        with pytest.raises(ConfigError, match=r"Call booster.save_model\(model, path\), on all"):
            part.state_dict()
    booster.save_model(model, "model.pt")
    assert torch.load("model.pt")["weight"].shape == (1, 3)
    booster.load_model(model, "model.pt")


def test_weights_of_other_names_are_left_out_only_if_so_asked() -> None:
    booster, model, _ = boosted()
    torch.save({"weight": torch.ones(1, 3), "head": torch.ones(1)}, "other.pt")
    with pytest.raises(CheckpointError, match="head"):
        booster.load_model(model, "other.pt")
    bias = model.unwrap().bias.item()
    booster.load_model(model, "other.pt", strict=False)
    assert torch.equal(model.unwrap().weight, torch.ones(1, 3))
    assert model.unwrap().bias.item() == bias


class Adapter(nn.Module):
    """A layer as PEFT's LoRA makes it."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(3, 1, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_A["default"](x)


class Adapted(nn.Module):
    """A model as PEFT makes it of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = nn.Sequential(Adapter(nn.Linear(3, 1)))

    def get_base_model(self) -> nn.Module:
        return self.base_model.model  # pyright: ignore[reportReturnType]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_base_model()(x)


@pytest.mark.parametrize("trained", [False, True])
def test_a_base_model_is_read_into_a_model_with_adapters(trained: bool) -> None:
    colossalai.launch_from_torch(seed=0, verbose=False)
    booster, model, plain = Booster(plugin=TorchDDPPlugin()), Adapted(), nn.Linear(3, 1)
    adapters = [one for one in model.parameters() if one.requires_grad]
    model, *_ = booster.boost(model, torch.optim.SGD(adapters, lr=0.1) if trained else None)
    torch.save(nn.Sequential(plain).state_dict(), "base.pt")
    booster.load_model(model, "base.pt", strict=False)
    base = model.unwrap().get_base_model()[0].base_layer
    assert torch.equal(base.weight, plain.weight)
    booster.save_model(model, "adapted.pt")
    assert [*torch.load("adapted.pt")] == ["0.weight", "0.bias", "0.lora_A.default.weight"]
    base.weight.data.zero_()
    booster.load_model(model, "adapted.pt")
    assert torch.equal(model.unwrap().get_base_model()[0].base_layer.weight, plain.weight)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("shard", [False, True])
def test_tied_weights_are_in_safetensors_by_each_name(shard: bool) -> None:
    colossalai.launch_from_torch(seed=0, verbose=False)
    booster, model = Booster(plugin=TorchDDPPlugin()), Tied()
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.save_model(model, "tied.safetensors", shard=shard, use_safetensors=True)
    evaluated, *_ = booster.boost(Tied())
    booster.load_model(evaluated, "tied.safetensors")
    assert torch.equal(evaluated.unwrap().second.weight, model.unwrap().first.weight)


def test_a_directory_has_one_index_and_safetensors_come_first() -> None:
    booster, model, optimizer = boosted()
    step(booster, model, optimizer)
    Path("both").mkdir()
    booster.save_model(model, "both/model.safetensors", use_safetensors=True)
    torch.save({}, "both/pytorch_model.bin")
    booster.load_model(model, "both")
    booster.save_model(model, "both", shard=True)
    booster.save_optimizer(optimizer, "both", shard=True)
    with pytest.raises(CheckpointError, match="has several indexes: pytorch_model"):
        booster.load_model(model, "both")
    booster.load_model(model, "both/pytorch_model.bin.index.json")
    booster.load_optimizer(optimizer, "both/pytorch_optim.bin.index.json")


def test_transformers_can_read_a_directory() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=4, n_head=1, vocab_size=5, n_positions=4)
    model = transformers.AutoModelForCausalLM.from_config(config)
    colossalai.launch_from_torch(seed=0, verbose=False)
    booster = Booster(plugin=TorchDDPPlugin())
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.save_model(model, "gpt", shard=True)
    found = transformers.AutoModelForCausalLM.from_pretrained("gpt")
    assert torch.equal(found.lm_head.weight, model.unwrap().lm_head.weight)
    assert found.config.architectures == ["GPT2LMHeadModel"]
    assert Path("gpt/generation_config.json").is_file()


def test_a_schedule_goes_on_from_its_file() -> None:
    booster, *_ = boosted()

    def made() -> tuple[Any, Any]:
        sgd = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.4)
        return sgd, CosineAnnealingWarmupLR(sgd, total_steps=9, warmup_steps=2)

    (first, schedule), (second, other) = made(), made()
    for _ in range(4):
        first.step()
        schedule.step()
    booster.save_lr_scheduler(schedule, "schedule")
    booster.load_lr_scheduler(other, "schedule")
    second.load_state_dict(first.state_dict())
    for _ in range(3):
        for sgd, one in ((first, schedule), (second, other)):
            sgd.step()
            one.step()
        assert schedule.get_last_lr() == other.get_last_lr()
    assert schedule.get_last_lr() != [0.4]


# -- plugins as strategies -------------------------------------------------------------------------


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Placement(rank=0, size=2)
    monkeypatch.setattr(current, "placement", lambda *_: place)


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("plugin", "names"),
    [
        (lambda: TorchDDPPlugin(bucket_cap_mb=3), {"ddp"}),
        (lambda: TorchFSDPPlugin(), {"fsdp"}),
        (lambda: LowLevelZeroPlugin(), {"ddp", "colossalai"}),
        (lambda: LowLevelZeroPlugin(stage=2), {"fsdp", "colossalai"}),
        (lambda: LowLevelZeroPlugin(cpu_offload=True), {"fsdp"}),
        (lambda: GeminiPlugin(), {"fsdp", "colossalai"}),
        (lambda: GeminiPlugin(tp_size=2), {"mesh"}),
        (lambda: HybridParallelPlugin(1, 1), {"ddp"}),
        (lambda: HybridParallelPlugin(2, 1), {"mesh", "colossalai"}),
        (lambda: MoeHybridParallelPlugin(1, 1, 2), {"mesh"}),
    ],
)
def test_a_plugin_is_a_strategy(plugin: Any, names: set[str]) -> None:
    made = plugin()
    asked = made.asked()
    assert asked["strategy"]["name"] in names
    assert asked.get("precision") == made.precision
    assert current.layout(asked).size == 2


@pytest.mark.usefixtures("two")
def test_ddps_options_are_the_plugins() -> None:
    asked = TorchDDPPlugin(bucket_cap_mb=3, find_unused_parameters=True).asked()["strategy"]
    assert asked == {"name": "ddp", "bucket_cap_mb": 3, "find_unused_parameters": True}
    hybrid = HybridParallelPlugin(1, 1, ddp_bucket_cap_mb=3, find_unused_parameters=True)
    assert hybrid.asked()["strategy"] == asked


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        (lambda: HybridParallelPlugin(1, 2), "Set another strategy in unipar.yaml"),
        (lambda: HybridParallelPlugin(1, 1, sp_size=2), "sequence_parallel=true"),
        (lambda: LowLevelZeroPlugin(precision="int8"), "Choose of fp32, fp16 and bf16"),
        (lambda: LowLevelZeroPlugin(use_fp8=True), "Set precision: fp8"),
        (lambda: LowLevelZeroPlugin(stage=3, precision="fp32"), "ZeRO's stage is 3"),
        (lambda: GeminiPlugin(extra_dp_size=2), "fsdp:sharding=hybrid"),
        (lambda: TorchFSDPPlugin(auto_wrap_policy=print), "Set wrap or wrap_min_params"),
    ],
)
def test_a_plugin_that_no_strategy_stands_for_is_refused(plugin: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plugin()


@pytest.mark.usefixtures("two")
def test_what_divides_the_model_is_without_effect_where_the_run_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UNIPAR_STRATEGY", "fsdp")
    plugin = HybridParallelPlugin(1, 2, precision="bf16", custom_policy=object())
    assert plugin.asked() == {"precision": "bf16"}
    assert plugin.pp_size == 1
    assert plugin.stage_manager.is_last_stage()
    assert plugin.dp_size == 2


def test_micro_batches_of_a_pipeline_are_computed_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UNIPAR_STRATEGY", "single")
    booster, model, optimizer = boosted(
        lambda: HybridParallelPlugin(1, 2, precision="fp32", num_microbatches=2)
    )
    plain = nn.Linear(3, 1)
    plain.load_state_dict(model.state_dict())
    x = torch.arange(12.0).view(4, 3) / 10
    seen: list[Any] = []

    def criterion(output: torch.Tensor, inputs: Any) -> torch.Tensor:
        seen.append(inputs["input"])
        return output.square().mean()

    found = booster.execute_pipeline(
        iter([{"input": x}]), model, criterion, optimizer, return_outputs=True
    )
    loss = plain(x).square().mean()
    loss.backward()
    assert [one.shape for one in seen] == [(2, 3), (2, 3)]
    assert found["loss"].item() == pytest.approx(loss.item())
    assert torch.allclose(found["outputs"], plain(x))
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert torch.allclose(model.unwrap().weight, plain.weight)
    with torch.no_grad():
        found = booster.execute_pipeline(iter([{"input": x[:3]}]), model, criterion, optimizer)
    losses = [model(part).square().mean().item() for part in (x[:2], x[2:3])]
    assert found["loss"].item() == pytest.approx(sum(losses) / 2)
    with pytest.raises(ConfigError, match=r"\[3\] samples, which are not 2 micro-batches"):
        booster.execute_pipeline(iter([{"input": x[:3]}]), model, criterion, optimizer)


# -- the rest --------------------------------------------------------------------------------------


def test_optimizers_are_pytorchs() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    made = HybridAdam(parameters, lr=0.3)
    assert type(made) is torch.optim.AdamW
    assert made.defaults["weight_decay"] == 0
    assert type(CPUAdam(parameters, adamw_mode=False)) is torch.optim.Adam
    assert FusedAdam(parameters, betas=(0.5, 0.6)).defaults["betas"] == (0.5, 0.6)
    assert type(FusedSGD(parameters, 0.1)) is torch.optim.SGD
    for call in (
        lambda: HybridAdam(parameters, bias_correction=False),
        lambda: HybridAdam(parameters, nvme_offload_fraction=1.0),
        lambda: FusedAdam(parameters, amsgrad=True),
        lambda: FusedSGD(parameters, 0.1, wd_after_momentum=True),
    ):
        with pytest.raises(ConfigError):
            call()


def test_a_face_says_what_it_has_not() -> None:
    with pytest.raises(ImportError, match=r"has no Lamb\. Strategies take any class"):
        from unipar.compat.colossalai.nn.optimizer import Lamb  # noqa: F401  # pyright: ignore
    with pytest.raises(ImportError, match=r"has no zero\. It is an older interface"):
        from unipar.compat.colossalai import zero  # noqa: F401  # pyright: ignore
    with pytest.raises(ImportError, match=r"has no nonsense\. It is none of the names"):
        from unipar.compat.colossalai.utils import nonsense  # noqa: F401  # pyright: ignore


def test_launchers_have_to_be_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="found no SLURM_PROCID"):
        colossalai.launch_from_slurm("localhost", 1)
    found = Placement(rank=0, size=1)
    monkeypatch.setattr("unipar.compat.colossalai.initialize.launchers.detect", lambda: found)
    with pytest.raises(ConfigError, match=re.escape("launch(rank=1, world_size=2) was called in")):
        colossalai.launch(1, 2, "localhost", 1)


def test_memory_of_a_cpu_is_none() -> None:
    accelerator = get_accelerator()
    assert accelerator.name == "cpu"
    assert accelerator.max_memory_allocated() == 0
    accelerator.synchronize()
    with pytest.raises(RuntimeError, match="the run is on a CPU"):
        accelerator.get_device_name()


def test_a_strategy_is_an_argument_of_launch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    colossalai.launch_from_torch(verbose=False, strategy="ddp")
    assert TorchDDPPlugin().asked() == {"strategy": "ddp"}
    monkeypatch.setenv("UNIPAR_STRATEGY", "fsdp")
    assert TorchDDPPlugin().asked() == {}
