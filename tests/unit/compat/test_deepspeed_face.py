"""What a script meets in one process: values as before, or an error that names call and remedy."""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from unipar.compat import deepspeed
from unipar.compat.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from unipar.compat.deepspeed_config import read_config
from unipar.compat.run import current
from unipar.errors import CheckpointError, ConfigError, NonFiniteLossError

pytestmark = pytest.mark.usefixtures("alone")

SGD = {"type": "SGD", "params": {"lr": 0.5}}
CONFIG = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, "optimizer": SGD}


def start(config: dict[str, Any] | None = None, **given: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    settings = {**CONFIG, **(config or {})}
    parts = {"model": model, "model_parameters": model.parameters(), "config": settings, **given}
    return model, deepspeed.initialize(**parts)


def step(engine: Any, x: torch.Tensor | None = None) -> torch.Tensor:
    loss = engine(torch.ones(2, 3) if x is None else x).square().mean()
    engine.backward(loss)
    engine.step()
    return loss


def test_weights_are_updated_after_so_many_micro_batches() -> None:
    model, (engine, optimizer, _, scheduler) = start(
        {"gradient_accumulation_steps": 3},
        lr_scheduler=lambda one: torch.optim.lr_scheduler.ExponentialLR(one, 0.5),
    )
    plain = nn.Linear(3, 1)
    plain.load_state_dict(model.state_dict())
    parts = torch.randn(3, 4, 3)
    sum((plain(part).square().mean() for part in parts), torch.zeros(())).div(3).backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    boundaries = []
    for part in parts:
        boundaries.append(engine.is_gradient_accumulation_boundary())
        before = model.weight.clone()
        loss = engine(part).square().mean()
        assert engine.backward(loss).item() == pytest.approx(loss.item() / 3)
        engine.step()
        assert torch.equal(model.weight, before) is not engine.was_step_applied()
    assert boundaries == [False, False, True]
    assert (engine.micro_steps, engine.global_steps, engine.global_samples) == (3, 1, 12)
    assert torch.allclose(model.weight, plain.weight, rtol=1e-6)
    assert engine.get_lr() == scheduler.get_last_lr() == [0.25]
    assert engine.optimizer is optimizer
    assert engine.module is model
    assert [name for name, _ in engine.named_parameters()] == ["module.weight", "module.bias"]


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.taken, self.left = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.taken(x)


def test_parameters_that_a_step_leaves_out_are_decayed_as_by_deepspeed() -> None:
    decaying = {"type": "SGD", "params": {"lr": 0.5, "weight_decay": 0.1}}
    model = Heads()
    before = model.left.weight.detach().clone()
    config = {**CONFIG, "optimizer": decaying}
    step(deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0])
    torch.testing.assert_close(model.left.weight.detach(), before * 0.95)


def test_clipping_to_one_is_the_default() -> None:
    model, (engine, *_) = start({"gradient_clipping": 1.0, "steps_per_print": 1})
    assert engine.get_global_grad_norm() is None
    step(engine, torch.full((2, 3), 50.0))
    clipped = model.weight.detach().clone()
    assert engine.get_global_grad_norm() > 10
    current.close()
    config = {key: value for key, value in CONFIG.items() if key != "gradient_clipping"}
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config_params=config
    )
    step(engine, torch.full((2, 3), 50.0))
    assert torch.equal(model.weight, clipped)


@pytest.mark.parametrize(
    ("given", "micro", "accumulation"),
    [
        ({"train_batch_size": 12}, 12, 1),
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4}, 4, 3),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 2}, 6, 2),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, 4, 2),
    ],
)
def test_batch_sizes_follow_from_each_other(
    given: dict[str, int], micro: int, accumulation: int
) -> None:
    model = nn.Linear(3, 1)
    engine, *_ = deepspeed.initialize(model=model, config={**given, "optimizer": SGD})
    assert engine.get_batch_info() == (micro * accumulation, micro, accumulation)
    with pytest.raises(ValueError, match="are not a number of micro-batches"):
        engine.set_train_batch_size(micro * accumulation + 1)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"train_batch_size": 10}, r"train_batch_size=10 is not train_micro_batch_size_per_gpu=4 "),
        ({"fp16": {"enabled": "auto"}}, r'has "auto" as its fp16.enabled, which nobody fills in'),
        (
            {"zero_optimization": {"stage": 0, "zero_quantized_weights": True}},
            "changes what is exc",
        ),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "Enable one of fp16, bf16"),
        ({"amp": {"enabled": True}}, "Use bf16 or fp16"),
        ({"gradient_allreduce_op": "sum"}, "Multiply the loss, and use mean"),
        ({"managed_gradient_accumulation": False}, "set_gradient_accumulation_boundary"),
        ({"tensor_parallel": {"autotp_size": 2}}, "has 'tensor_parallel'. Set tp below strategy"),
        ({"curriculum_learning": {"enabled": True}}, "Do it in the script"),
        ({"compression_training": {"layer_reduction": {"enabled": True}}}, "changes the model"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer OneBitAdam, which is DeepSpeed's own"),
        ({"scheduler": {"type": "Mine"}}, "scheduler Mine, and there are WarmupLR, "),
        ({"torch_autocast": {"enabled": True, "dtype": "float8"}}, "Use bfloat16 or float16"),
    ],
)
def test_settings_without_counterpart_are_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        start(config)


def test_what_is_off_or_of_speed_alone_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    start(
        {
            "amp": {"enabled": False},
            "tensor_parallel": {"autotp_size": 1},
            "compression_training": {
                "weight_quantization": {"shared_parameters": {"enabled": False}}
            },
            "gradient_allreduce_op": "mean",
            "wandb": {"enabled": True},
            "zero_optimization": {"stage": 0, "reduce_scatter": True, "offload_param": None},
            "of_my_own": 3,
        }
    )
    assert current.session is not None
    assert current.session.strategy.name == "single"
    assert "'of_my_own', which DeepSpeed does not read" in caplog.text


def test_a_configuration_becomes_options_of_its_stage() -> None:
    zero = {
        "stage": 3, "reduce_bucket_size": 5e8, "allgather_bucket_size": 2e8, "overlap_comm": True,
        "stage3_param_persistence_threshold": 1e4, "round_robin_gradients": True,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/local", "pin_memory": True},
        "offload_param": {"device": "none"}, "memory_efficient_linear": False,
        "stage3_gather_16bit_weights_on_model_save": True,
    }  # fmt: skip
    assert read_config({"zero_optimization": zero})["strategy"] == {
        "name": "zero3", "reduce_bucket_size": 500_000_000, "overlap_comm": True,
        "persistence_threshold": 10_000, "offload_optimizer": True, "nvme_path": "/local",
        "pin_memory": True, "native": {"zero_optimization": {"memory_efficient_linear": False}},
    }  # fmt: skip
    assert read_config({"zero_optimization": {**zero, "stage": 0}})["strategy"] == {
        "name": "deepspeed", "stage": 0, "reduce_bucket_size": 500_000_000,
        "allgather_bucket_size": 200_000_000,
    }  # fmt: skip
    old = {"zero_optimization": {"stage": 2, "cpu_offload": True}, "bfloat16": {"enabled": True}}
    assert read_config(old) == {
        "precision": "bf16", "strategy": {"name": "zero2", "offload_optimizer": True},
        "max_grad_norm": 1.0,
    }  # fmt: skip


def test_the_command_line_may_name_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"])
    model = nn.Linear(3, 1)
    engine, *_ = deepspeed.initialize(args=args, model=model)
    assert engine.train_batch_size() == 4
    with pytest.raises(ConfigError, match=r"names the configuration ds\.json, and initialize was"):
        deepspeed.initialize(args=args, model=model, config=CONFIG)
    with pytest.raises(ConfigError, match="start the script with --deepspeed_config"):
        deepspeed.initialize(args=parser.parse_args([]), model=model)


@pytest.mark.parametrize(
    ("params", "kind", "expected"),
    [
        ({"lr": 0.1}, FusedAdam, (True, 0.0)),
        ({"lr": 0.1, "adam_w_mode": False, "weight_decay": 0.2}, FusedAdam, (False, 0.2)),
        ({"torch_adam": True}, torch.optim.AdamW, (True, 0.01)),
        ({"torch_adam": True, "adam_w_mode": False}, torch.optim.Adam, (False, 0)),
    ],
)
def test_adam_is_adamw_unless_told_otherwise(params: Any, kind: Any, expected: Any) -> None:
    _, (engine, *_) = start({"optimizer": {"type": "Adam", "params": params}})
    assert type(engine.basic_optimizer) is kind
    (group,) = engine.optimizer.param_groups
    assert (group["decoupled_weight_decay"], group["weight_decay"]) == expected
    assert engine.optimizer_name() == "adam"


def test_an_optimizer_of_the_scripts_own_is_named_by_what_it_gave() -> None:
    model = nn.Linear(3, 1)
    for given, name in ((functools.partial(torch.optim.SGD, lr=0.1), "partial"),
                        (torch.optim.SGD(model.parameters(), lr=0.1), "SGD")):  # fmt: skip
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=given, config={**CONFIG, "optimizer": {"type": "Adam"}}
        )
        assert engine.client_optimizer is given
        assert engine.optimizer_name() == name
        assert type(engine.basic_optimizer) is torch.optim.SGD
        current.close()


def test_an_optimizer_is_not_given_the_norm_to_clip_to() -> None:
    with pytest.raises(ConfigError, match="Write gradient_clipping beside the optimizer"):
        start({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "max_grad_norm": 1.0}}})


def test_fused_adam_steps_as_torchs() -> None:
    found = []
    for build in (
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0),
        lambda p: FusedAdam(p, lr=0.1),
        lambda p: DeepSpeedCPUAdam(p, lr=0.1),
    ):
        parameter = nn.Parameter(torch.ones(3))
        optimizer = build([parameter])
        for scale in (1.0, 2.0):
            parameter.grad = torch.full((3,), scale)
            optimizer.step()
        found.append(parameter.detach())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    with pytest.raises(ConfigError, match="corrects for bias always"):
        FusedAdam([nn.Parameter(torch.ones(1))], bias_correction=False)


def test_training_data_become_a_loader_of_one_order() -> None:
    data = TensorDataset(torch.arange(10.0)[:, None])
    _, (engine, _, loader, _) = start({"dataloader_drop_last": True}, training_data=data)
    assert len(loader) == 2
    orders = [torch.cat([one[0] for one in loader]).tolist() for _ in range(2)]
    assert orders[0] == orders[1] != sorted(orders[0])
    assert [len(one[0]) for one in engine.deepspeed_io(data, 5, route="eval")] == [5, 5]
    repeated = iter(deepspeed.utils.RepeatingLoader(loader))
    assert [len(next(repeated)[0]) for _ in range(3)] == [4, 4, 4]


def test_where_deepspeed_has_no_norm_its_face_has_none() -> None:
    _, (engine, *_) = start()
    step(engine)
    # DeepSpeed takes float32 without ZeRO to the script's own optimizer, which measures none.
    assert engine.get_global_grad_norm() is None


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"fp16": {"enabled": True}},
            "In fp16 without ZeRO, DeepSpeed 0.19.8 divides gradients",
        ),
        ({"bf16": {"enabled": True}}, "In bf16 without ZeRO, DeepSpeed 0.19.8 begins with a step"),
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}, None),
        ({"torch_autocast": {"enabled": True}, "bf16": {"enabled": False}}, None),
    ],
)
def test_half_precision_that_deepspeed_itself_trains_otherwise_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    config: dict[str, Any],
    said: str | None,
) -> None:
    monkeypatch.setenv("UNIPAR_STRATEGY", "single")
    for _ in range(2):
        start(config)
    assert caplog.text.count("That is not repeated here") == (said is not None)
    assert (said or "") in caplog.text


def test_a_norm_that_nobody_has_measured_under_zero_is_refused() -> None:
    pytest.importorskip("deepspeed")
    _, (engine, *_) = start({"zero_optimization": {"stage": 1}})
    step(engine)
    with pytest.raises(ConfigError, match="gradient_clipping is 0"):
        engine.get_global_grad_norm()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda e: e.backward(e(torch.ones(1, 3)).sum(), retain_graph=True), "takes a loss and no"),
        (lambda e: e.backward(e.module(torch.ones(1, 3)).sum()), r"without engine\(…\) since the"),
        (lambda e: e.step(), r"engine.step\(\) came without engine.backward\(loss\)"),
        (lambda e: e(torch.ones(1, 3)).sum().backward() is e.step(), r"and not loss.backward\(\)"),
        (lambda e: e.optimizer.step(), r"Call engine.step\(\)"),
        (
            lambda e: e.backward(e(torch.ones(1, 3)).sum()) is e.zero_grad(),
            "in the midst of a step",
        ),
        (lambda e: e.train_batch(), "strategy: mesh with pp"),
        (lambda e: e.compile(), r"engine.compile\(…\) has no counterpart"),
        (lambda e: e.dynamic_loss_scale_args(), "scale the losses of fp16 themselves"),
        (lambda e: e.zero_offload_param(), "Look at engine.config"),
        (lambda e: e.save_checkpoint("a", exclude_frozen_parameters=True), "hold the whole model"),
        (lambda e: e.save_checkpoint("a", client_state={"a": argparse.Namespace()}), "Give plain"),
        (lambda e: e.load_checkpoint("a", load_module_strict=False), "Load others before init"),
        (lambda e: copy.deepcopy(e), "Copy the model before deepspeed.initialize"),
        (lambda e: deepspeed.initialize(model=None), "a NoneType as its model"),
        (lambda e: deepspeed.initialize(model=e, mpu=1), "otherwise than by data"),
        (
            lambda e: start(optimizer=torch.optim.SGD(nn.Linear(1, 1).parameters())),
            "no parameter of",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_where_it_is_called(call: Any, said: str) -> None:
    _, (engine, *_) = start()
    with pytest.raises(ConfigError, match=said):
        call(engine)


def test_an_engine_without_an_optimizer_is_only_asked() -> None:
    model = nn.Linear(3, 1)
    engine, optimizer, *_ = deepspeed.initialize(model=model, config={"train_batch_size": 4})
    x = torch.ones(2, 3)
    assert optimizer is None
    assert torch.equal(engine(x), model(x))
    assert torch.equal(engine.module_state_dict()["weight"], model.weight)
    with pytest.raises(ConfigError, match="this engine has no optimizer"):
        engine.backward(engine(x).sum())


def test_names_of_the_model_are_found_on_its_engine() -> None:
    model, (engine, *_) = start()
    assert engine.in_features == 3
    assert not hasattr(engine, "nonsense")
    assert engine.config["optimizer"] == SGD
    engine.eval()
    assert not model.training
    assert engine.zero_optimization_stage() == 0


def test_the_precision_is_that_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "unipar.yaml").write_text("precision: bf16\n")
    _, (engine, *_) = start({"fp16": {"enabled": True, "loss_scale": 0}})
    assert (engine.fp16_enabled(), engine.bfloat16_enabled()) == (False, True)
    assert engine(torch.ones(2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_half_precision_weights_are_trained_in_fp32() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).bfloat16()
    given = {"model": model, "model_parameters": model.parameters()}
    small = {"optimizer": {"type": "SGD", "params": {"lr": 1e-5}}, "train_batch_size": 2}
    with pytest.raises(ConfigError, match=r"weight and 1 more are bfloat16, and.*model.float\(\)"):
        deepspeed.initialize(**given, config=small)
    current.close()
    engine, *_ = deepspeed.initialize(**given, config={**small, "bf16": {"enabled": True}})
    before = model.weight.detach().clone()
    step(engine)
    assert model.weight.dtype == torch.float32
    assert 0 < (model.weight - before).abs().max() < 1e-3


def test_checkpoints_bring_back_weights_counts_and_state(tmp_path: Path) -> None:
    warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 3}}
    model, (engine, _, _, scheduler) = start(
        {"gradient_accumulation_steps": 2, "scheduler": warmup}
    )
    assert engine.load_checkpoint(tmp_path / "none") == (None, None)
    for _ in range(5):
        step(engine)
    engine.save_checkpoint(tmp_path / "all", client_state={"epoch": 4})
    engine.save_checkpoint(tmp_path / "all", tag="other", save_latest=False)
    weight, rates = model.weight.clone(), engine.get_lr()
    assert (tmp_path / "all" / "latest").read_text() == "global_step2"
    step(engine)
    assert not torch.equal(model.weight, weight)
    path, state = engine.load_checkpoint(tmp_path / "all", load_module_only=True)
    assert (engine.global_steps, scheduler.last_batch_iteration) == (3, 2)
    path, state = engine.load_checkpoint(tmp_path / "all")
    assert path == str(tmp_path / "all" / "global_step2")
    assert state == {"epoch": 4}
    assert torch.equal(model.weight, weight)
    assert (engine.global_steps, scheduler.last_batch_iteration) == (2, 1)
    assert engine.get_lr() == rates
    engine.save_16bit_model(tmp_path / "whole")
    stored = torch.load(tmp_path / "whole" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(stored["weight"], model.weight)


def test_a_checkpoint_leaves_random_numbers_as_they_are(tmp_path: Path) -> None:
    _, (engine, *_) = start()
    engine.save_checkpoint(tmp_path, tag="a")
    draws = (lambda: torch.rand(1).item(), random.random, np.random.rand)
    for module_only in (False, True):
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(3)
        expected = [[draw() for draw in draws] for _ in range(2)]
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(3)
        assert [draw() for draw in draws] == expected[0]
        engine.load_checkpoint(tmp_path, tag="a", load_module_only=module_only)
        assert [draw() for draw in draws] == expected[1]


def test_deepspeeds_own_checkpoints_are_named(tmp_path: Path) -> None:
    _, (engine, *_) = start()
    (tmp_path / "latest").write_text("global_step9")
    (tmp_path / "global_step9").mkdir()
    (tmp_path / "global_step9" / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(CheckpointError, match="Convert it: unipar convert --from deepspeed"):
        engine.load_checkpoint(tmp_path)


def test_a_loss_through_two_engines_trains_one_of_them_or_is_refused() -> None:
    engines = []
    for model in (nn.Linear(2, 2), nn.Linear(2, 1)):
        engines.append(deepspeed.initialize(model=model, config=CONFIG)[0])
    first, second = engines
    x = torch.ones(1, 2)
    with pytest.raises(ConfigError, match=r"Freeze that model meanwhile, by other.module.requi"):
        first.backward(second(first(x)).sum())
    second.module.requires_grad_(False)
    first.backward(second(first(x)).sum())
    first.step()
    second.module.requires_grad_(True)
    second.backward(second(x).sum())
    second.step()


def test_an_engine_that_is_destroyed_makes_room_for_another() -> None:
    first, second = (start()[1][0] for _ in range(2))
    first.destroy()
    first.destroy()
    session = current.session
    assert session is not None
    assert list(session.engines) == ["model2"]
    third = start()[1][0]
    assert list(session.engines) == ["model2", "model"]
    step(second)
    step(third)


def test_what_deepspeed_times_and_reports_is_asked_for_in_vain() -> None:
    _, (engine, *_) = start()
    engine.tput_timer.update_epoch_count()
    engine.monitor.write_events([("loss", 1.0, 1)])
    assert not engine.monitor.enabled


def test_modules_stand_where_deepspeeds_do() -> None:
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        layer = nn.Linear(2, 2)
    with deepspeed.zero.GatheredParameters(layer.weight, modifier_rank=0), torch.no_grad():
        layer.weight.fill_(1)
    x = torch.ones(1, 2, requires_grad=True)
    deepspeed.checkpointing.configure(None, partition_activations=False)
    assert torch.equal(deepspeed.checkpointing.checkpoint(layer, x), layer(x))
    fixed = x.detach()
    # As DeepSpeed's, which is reentrant.
    assert not deepspeed.checkpointing.checkpoint(layer, fixed).requires_grad
    assert deepspeed.checkpointing.non_reentrant_checkpoint(layer, fixed).requires_grad
    assert deepspeed.comm.get_world_size() == 1
    device = deepspeed.get_accelerator()
    assert device.device_name() in ("cpu", "cuda")
    assert torch.zeros(1, device=device.device_name(0)).device.type == device.device_name()
    assert device.is_bf16_supported() in (True, False)
    assert deepspeed.__version__


def test_one_process_has_a_group_too() -> None:
    deepspeed.init_distributed()
    assert torch.distributed.get_rank() == deepspeed.comm.get_rank() == 0
    total = torch.ones(2)
    deepspeed.comm.all_reduce(total)  # pyright: ignore[reportAttributeAccessIssue]
    assert total.tolist() == [1, 1]


def test_collectives_take_the_arguments_that_deepspeeds_have() -> None:
    comm: Any = deepspeed.comm
    logged = {"prof": True, "log_name": "mine", "debug": "here"}
    given, pair = torch.arange(4.0), [torch.ones(3), torch.full((1,), 2.0)]
    found, parts = torch.empty(3, 4), [torch.empty(3), torch.empty(1)]
    comm.all_gather_into_tensor(output_tensor=found[0], tensor=given, **logged)
    comm.reduce_scatter_tensor(output_tensor=found[1], tensor=given, **logged)
    comm.all_to_all_single(output=found[2], tensor=given, **logged)
    assert torch.equal(found, given.expand(3, 4))
    comm.all_gather_coalesced(output_tensors=parts, input_tensors=pair)
    assert all(map(torch.equal, parts, pair))
    comm.all_gather_coalesced(parts, [one + 1 for one in pair], async_op=True).wait()
    assert [one.tolist() for one in parts] == [[2, 2, 2], [3]]
    comm.all_reduce(given, **logged)
    comm.broadcast(tensor=given, src=0, **logged)
    assert comm.P2POp(comm.isend, given, 0).op is torch.distributed.isend


def test_a_step_that_autocast_skips_without_zero_is_told_of_to_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UNIPAR_STRATEGY", "single")
    halved = lambda one: torch.optim.lr_scheduler.ExponentialLR(one, 0.5)  # noqa: E731
    for stage, told in ((0, False), (1, True)):
        config = {
            "torch_autocast": {"enabled": True, "dtype": "float16"}, "train_batch_size": 2,
            "zero_optimization": {"stage": stage}, "optimizer": SGD, "gradient_clipping": 1.0,
        }  # fmt: skip
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        before = model.weight.detach().clone()
        engine, *_ = deepspeed.initialize(model=model, config=config, lr_scheduler=halved)
        step(engine, torch.full((2, 3), 4.0))
        assert torch.equal(model.weight, before)
        assert engine.was_step_applied() is not told
        assert (engine.skipped_steps, engine.get_lr()) == (told, [0.5 if told else 0.25])
        assert not told or engine.get_global_grad_norm() == math.inf
        current.close()


@pytest.mark.parametrize("stage", [0, 2])
def test_a_loss_that_is_not_finite_is_as_an_overflow_in_fp16(
    monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    monkeypatch.setenv("UNIPAR_STRATEGY", "single")
    model, (engine, *_, scheduler) = start(
        {
            "fp16": {"enabled": True, "initial_scale_power": 4}, "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage},
        },
        lr_scheduler=lambda one: torch.optim.lr_scheduler.ExponentialLR(one, 0.5),
    )  # fmt: skip
    step(engine)
    optimizer = engine.optimizer
    assert (optimizer.cur_scale, optimizer.loss_scale, optimizer.overflow) == (16, 16, False)
    assert (engine.loss_scale(), engine.dynamic_loss_scale()) == (0, True)
    assert engine.initial_dynamic_scale() == 16
    weight = model.weight.clone()
    step(engine, torch.full((2, 3), math.inf))
    assert (optimizer.cur_scale, optimizer.overflow) == (8, True)
    with pytest.raises(ConfigError, match=r"no scale that can be set, as to 4\. Engines scale the"):
        optimizer.loss_scale = 4
    assert torch.equal(model.weight, weight)
    assert not engine.was_step_applied()
    assert (engine.global_steps, engine.skipped_steps, scheduler.last_epoch) == (2, 1, 1)
    assert engine.get_global_grad_norm() == math.inf
    step(engine)
    assert not torch.equal(model.weight, weight)
    assert math.isfinite(engine.get_global_grad_norm())


def test_the_error_of_a_loss_that_is_not_finite_names_what_a_script_has() -> None:
    _, (engine, *_) = start()
    with pytest.raises(NonFiniteLossError, match="gradient_clipping in the config") as caught:
        step(engine, torch.full((2, 3), math.inf))
    assert "set on_nan: skip in unipar.yaml to leave such batches out" in str(caught.value)
    assert "max_grad_norm" not in str(caught.value)


def test_engines_that_a_script_has_done_with_are_released() -> None:
    for _ in range(2):
        _, (engine, *_) = start()
        step(engine)
        assert current.session is not None
        assert [*current.session.engines] == ["model"]
        del engine, _
