"""What a script meets in one process: values as before, or an error that names call and remedy."""

from __future__ import annotations

import copy
import csv
import functools
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from unipar.compat.fabric import Fabric, is_wrapped, seed_everything, settings
from unipar.compat.fabric.loggers import CSVLogger, TensorBoardLogger
from unipar.compat.fabric.plugins import (
    ClusterEnvironment,
    DoublePrecision,
    MixedPrecision,
    SLURMEnvironment,
)
from unipar.compat.fabric.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from unipar.compat.fabric.utilities import rank_zero_only, suggested_max_num_workers
from unipar.compat.fabric.wrappers import _unwrap_objects
from unipar.compat.run import current
from unipar.errors import ConfigError
from unipar.strategy import LossScale

SCALE = LossScale(initial=2.0**16, growth_interval=1000)
"""DeepSpeed's, of a run in fp16."""

CPU: dict[str, Any] = {"accelerator": "cpu", "devices": 1}


@pytest.fixture(autouse=True)
def _seeded(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")


def parts(fabric: Fabric) -> Any:
    seed_everything(0, verbose=False)
    model = nn.Linear(3, 1)
    return fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_marked_method_leaves_a_patched_forward_as_it_was() -> None:
    class Net(nn.Linear):
        def training_step(self, x: torch.Tensor) -> torch.Tensor:
            return self(x).square().mean()

    fabric = Fabric(**CPU)
    net = Net(3, 1)
    net.forward = lambda input, own=net.forward: 3 * own(input)
    x = torch.randn(4, 3)
    wanted = net.training_step(x).item()
    model, _ = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(2):
        assert model.training_step(x).item() == wanted


class Looking(nn.Module):
    """It notes what it is given, and in what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(3, 1), list[torch.dtype]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        self.seen += [x.dtype, out.dtype]
        return out

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).mean()


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_inputs_and_methods_are_in_half_where_they_are_in_fabric(strategy: str) -> None:
    theirs = pytest.importorskip("lightning_fabric")

    def seen(fabric: Any) -> list[torch.dtype]:
        fabric.launch()
        plain = Looking()
        model, _ = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        x = torch.randn(4, 3)
        assert model(x).dtype is torch.float32
        model.training_step(x)
        return plain.seen

    given: dict[str, Any] = {**CPU, "precision": "bf16-mixed", "strategy": strategy}
    found = seen(Fabric(**given))
    current.close()
    # It says there where it stands.
    with mock.patch.dict(os.environ):
        try:
            expected = seen(theirs.Fabric(**given))
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    assert found == expected
    assert len(found) == 4


@dataclass
class Output:
    logits: torch.Tensor
    kinds: torch.Tensor


def test_outputs_in_dataclasses_are_in_fp32() -> None:
    class Tagger(nn.Linear):
        def forward(self, input: Any) -> Any:
            logits = super().forward(input.logits)
            return Output(logits, input.kinds)

    net = Tagger(3, 1)
    fabric = Fabric(**CPU, precision="bf16-mixed")
    model, _ = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    output = model(Output(torch.ones(2, 3), torch.ones(2, dtype=torch.long)))
    assert (output.logits.dtype, output.kinds.dtype) == (torch.float32, torch.long)


class AsLightnings(nn.Linear):
    """What a LightningModule has of Fabric; it finds its logger there."""

    _fabric: Any = None
    _fabric_optimizers: Any = None

    def on_train_epoch_end(self) -> None:
        self._fabric.logger.log_metrics({"a": 1.0}, 0)


def test_a_lightning_module_finds_its_fabric_and_has_hooks_of_callbacks(tmp_path: Path) -> None:
    fabric = Fabric(**CPU, loggers=CSVLogger(tmp_path))
    module = AsLightnings(3, 1)
    _, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    assert module._fabric is fabric
    assert module._fabric_optimizers == [optimizer]
    fabric.call("on_train_epoch_end")
    fabric.logger.finalize("success")
    (found,) = tmp_path.rglob("metrics.csv")
    assert found.read_text().splitlines() == ["a,step", "1.0,0"]


def test_a_step_is_torchs_clipped_by_norm_or_value() -> None:
    fabric = Fabric(**CPU)
    model, optimizer = parts(fabric)
    seed_everything(0, verbose=False)
    plain = nn.Linear(3, 1)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(6):
        x = torch.randn(4, 3)
        loss, wanted = model(x).square().mean(), plain(x).square().mean()
        assert loss.item() == wanted.item()
        fabric.backward(loss)
        wanted.backward()
        if step % 3 == 1:
            norm = fabric.clip_gradients(model, optimizer, max_norm=0.2)
            known = nn.utils.clip_grad_norm_(plain.parameters(), 0.2)
            assert float(norm) == pytest.approx(float(known))  # pyright: ignore
        elif step % 3 == 2:
            assert fabric.clip_gradients(model, optimizer, clip_val=0.05) is None
            nn.utils.clip_grad_value_(plain.parameters(), 0.05)
        optimizer.step()
        sgd.step()
        optimizer.zero_grad()
        sgd.zero_grad()
    assert torch.equal(model.module.weight, plain.weight)


def test_a_gradient_is_clipped_in_the_order_of_the_script() -> None:
    fabric = Fabric(**CPU)
    model, optimizer = parts(fabric)
    seed_everything(0, verbose=False)
    plain = nn.Linear(3, 1)
    x = torch.randn(4, 3)
    fabric.backward(model(x).square().mean())
    plain(x).square().mean().backward()
    clips: list[dict[str, Any]] = [{"clip_val": 0.3}, {"max_norm": 0.2}, {"clip_val": 0.1}]
    for clip in [*clips, {"clip_val": 0.2}]:
        norm = fabric.clip_gradients(model, optimizer, **clip)
        if "max_norm" in clip:
            known = nn.utils.clip_grad_norm_(plain.parameters(), clip["max_norm"])
            assert float(norm) == pytest.approx(float(known))  # pyright: ignore
        else:
            nn.utils.clip_grad_value_(plain.parameters(), clip["clip_val"])
    for own, known in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own.grad, known.grad)  # pyright: ignore[reportArgumentType]
    optimizer.step()


def test_an_order_of_clipping_that_a_step_does_not_have_is_refused() -> None:
    fabric = Fabric(**CPU, strategy="fsdp")
    model, optimizer = parts(fabric)
    x = torch.ones(2, 3)
    fabric.backward(model(x).square().mean())
    fabric.clip_gradients(model, optimizer, max_norm=0.2)
    fabric.clip_gradients(model, optimizer, clip_val=0.01)
    fabric.clip_gradients(model, optimizer, clip_val=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    for one, was in zip(model.parameters(), before, strict=True):
        # The learning rate is 0.1.
        assert float((one.detach() - was).abs().max()) <= 0.1 * 0.01 + 1e-6
    fabric.backward(model(x).square().mean())
    fabric.clip_gradients(model, optimizer, clip_val=0.01)
    with pytest.raises(ConfigError, match="clip_gradients came twice in one step"):
        fabric.clip_gradients(model, optimizer, max_norm=0.2)
    with pytest.raises(ConfigError, match="Clip after the last backward pass of a step"):
        fabric.backward(model(x).square().mean())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda f, m, o, x: f.backward(x, retain_graph=True), "takes a loss and nothing else"),
        (lambda f, m, o, x: o.step(), r"fabric.backward\(loss\) was not called"),
        (lambda f, m, o, x: x.backward() or o.step(), r"fabric.backward\(loss\) was not called"),
        (lambda f, m, o, x: f.clip_gradients(m, o, max_norm=1), "before fabric.backward"),
        (lambda f, m, o, x: f.clip_gradients(m, o, clip_val=1), "before fabric.backward"),
        (lambda f, m, o, x: f.clip_gradients(m, o), "give one of them"),
        (lambda f, m, o, x: f.clip_gradients(m, o, max_norm=1, norm_type=1), "by the 2-norm"),
        (lambda f, m, o, x: f.clip_gradients(m.module, o, max_norm=1), "as fabric.setup gave"),
        (lambda f, m, o, x: f.setup(m), "was set up before"),
        (lambda f, m, o, x: f.setup_optimizers(o), "was set up before"),
        (lambda f, m, o, x: f.setup_optimizers(torch.optim.SGD(m.parameters())), "two optimizers"),
        (
            lambda f, m, o, x: f.setup_optimizers(torch.optim.SGD(nn.Linear(1, 1).parameters())),
            "no parameters of a model that was set up",
        ),
        (lambda f, m, o, x: f.no_backward_sync(m.module), r"model = fabric.setup\(model"),
        (lambda f, m, o, x: f.setup_dataloaders([1]), "was given a list"),
        (lambda f, m, o, x: f.all_gather(x, group=1), "exchange among all"),
        (lambda f, m, o, x: f.all_reduce(x, group=1), "exchange among all"),
        (lambda f, m, o, x: m.mark_forward_method("forward"), "no such method beside forward"),
        (lambda f, m, o, x: torch.compile(m), r"fabric.setup\(torch.compile\(model\)\)"),
        (lambda f, m, o, x: f.save("a", m), "Give a dict"),
        (lambda f, m, o, x: f.save("a", {"m": m}, {"n": None}), "names n, and the state has m"),
        (lambda f, m, o, x: f.launch(3), r"fabric.launch\(main\) instead of"),
        (lambda f, m, o, x: f.strategy.model, "fabric.strategy has no model here"),
    ],
)
def test_what_cannot_be_kept_is_refused_where_it_is_called(call: Any, said: str) -> None:
    fabric = Fabric(**CPU)
    model, optimizer = parts(fabric)
    loss = model(torch.ones(2, 3)).square().mean()
    with pytest.raises((ConfigError, AttributeError), match=said):
        call(fabric, model, optimizer, loss)


def test_a_closure_is_run_once_for_a_step_and_its_loss_given_back() -> None:
    fabric = Fabric(**CPU)
    model, optimizer = parts(fabric)
    x, passes = torch.randn(4, 3), []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        fabric.backward(loss)
        passes.append(loss.item())
        return loss

    assert [float(optimizer.step(closure)) for _ in range(3)] == passes
    assert passes == sorted(passes, reverse=True)


@pytest.mark.parametrize(
    ("given", "run", "prepare"),
    [
        ({}, {}, {}),
        ({"accelerator": "gpu", "precision": 16}, {"precision": "fp16", "device": "cuda"}, {}),
        ({"precision": "bf16-mixed", "strategy": "ddp"},
         {"precision": "bf16", "strategy": {"name": "ddp"}}, {}),
        ({"plugins": [MixedPrecision("16-mixed", "cpu"), SLURMEnvironment()]},
         {"precision": "fp16"}, {}),
        ({"strategy": "ddp_find_unused_parameters_true"},
         {"strategy": {"name": "ddp", "find_unused_parameters": True}}, {}),
        ({"strategy": "deepspeed_stage_3_offload"},
         {"strategy": {"name": "zero3", "offload_optimizer": True, "pin_memory": False,
                       "offload_parameters": True}, "loss_scale": SCALE}, {"max_grad_norm": 1.0}),
        ({"strategy": DeepSpeedStrategy(config={
            "zero_optimization": {"stage": 1}, "gradient_clipping": 0.5, "bf16": {"enabled": True},
        })}, {"strategy": {"name": "zero1"}, "precision": "bf16"}, {"max_grad_norm": 0.5}),
        ({"strategy": FSDPStrategy(
            auto_wrap_policy={nn.Linear}, activation_checkpointing=[nn.Linear, nn.GRU],
            sharding_strategy="HYBRID_SHARD", device_mesh=(2, 4), cpu_offload=True,
        )}, {"strategy": {"name": "fsdp", "sharding": "hybrid", "shard_size": 4,
                          "cpu_offload": True, "wrap": ("Linear",)}},
         {"activation_checkpointing": ("GRU", "Linear")}),
        ({"strategy": FSDPStrategy(auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={nn.GRU}))},
         {"strategy": {"name": "fsdp", "wrap": ("GRU",)}}, {}),
        ({"strategy": FSDPStrategy(auto_wrap_policy=functools.partial(
            size_based_auto_wrap_policy, min_num_params=100))},
         {"strategy": {"name": "fsdp", "wrap_min_params": 100}}, {}),
    ],
)  # fmt: skip
def test_arguments_are_settings_of_the_run(given: Any, run: Any, prepare: Any) -> None:
    asked = settings.read(**{**DEFAULTS, **given})
    assert (asked.run, asked.prepare) == (run, prepare)


DEFAULTS: dict[str, Any] = {
    "accelerator": "auto", "strategy": "auto", "devices": "auto", "num_nodes": 1,
    "precision": None, "plugins": None,
}  # fmt: skip


class OwnStrategy(DDPStrategy):
    pass


class OwnEnvironment(ClusterEnvironment):
    pass


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"precision": "transformer-engine"}, "Use precision='bf16-mixed'"),
        ({"precision": "16-true", "strategy": "deepspeed"}, "Use precision='bf16-mixed'"),
        ({"precision": "32-true", "plugins": MixedPrecision("bf16-mixed")}, "Give one"),
        ({"accelerator": "tpu"}, "Use accelerator='auto'"),
        ({"strategy": "dp"}, r"Fabric\(strategy='dp'\) has no counterpart. Use one of ddp"),
        ({"strategy": OwnStrategy()}, "a class of the script's own"),
        ({"strategy": ModelParallelStrategy(print)}, "Say strategy: mesh with tp_size"),
        ({"strategy": FSDPStrategy(auto_wrap_policy=print)}, r"auto_wrap_policy=\{Block\}"),
        ({"strategy": FSDPStrategy(sharding_strategy="NO_SHARD")}, "strategy='ddp' for NO_SHARD"),
        ({"strategy": FSDPStrategy(device_mesh=(2, 2))}, "HYBRID_SHARD"),
        ({"strategy": DDPStrategy(checkpoint_io=1)}, "Leave checkpoint_io out"),
        ({"strategy": DeepSpeedStrategy(cpu_checkpointing=True)}, "Leave cpu_checkpointing out"),
        ({"strategy": DeepSpeedStrategy(config={"gradient_accumulation_steps": 2})},
         "Accumulate in the loop"),
        ({"plugins": [OwnEnvironment()]}, "launchers, which are found by themselves"),
        ({"devices": [1, 3]}, "Set CUDA_VISIBLE_DEVICES=1,3"),
        ({"devices": "many"}, "is no number"),
        ({"devices": 0}, "at least 1"),
    ],
)  # fmt: skip
def test_arguments_without_a_counterpart_are_refused(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings.read(**{**DEFAULTS, **given})
    with pytest.raises(ConfigError, match="Say devices=1"):
        SingleDeviceStrategy()


@pytest.mark.parametrize(
    ("given", "count"),
    [("auto", None), (-1, None), ("-1", None), (3, 3), ("3", 3), ("0,1", 2), ([0], 1)],
)
def test_devices_are_a_number_of_processes(given: Any, count: int | None) -> None:
    assert settings.read(**{**DEFAULTS, "devices": given}).devices == count


def test_unipar_yaml_wins_over_what_has_no_counterpart(tmp_path: Path) -> None:
    (tmp_path / "unipar.yaml").write_text("strategy: ddp\nprecision: bf16\n")
    asked = settings.read(
        **{**DEFAULTS, "precision": "bf16-true", "strategy": ModelParallelStrategy(print)}
    )
    assert asked.run == {}
    # What it clips to is no matter of the strategy.
    config = {"gradient_clipping": 0.5, "zero_optimization": {"stage": 2}}
    asked = settings.read(**{**DEFAULTS, "strategy": DeepSpeedStrategy(config=config)})
    assert (asked.run, asked.prepare) == ({"loss_scale": SCALE}, {"max_grad_norm": 0.5})


def test_what_fabric_run_was_given_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LT_STRATEGY", "fsdp")
    monkeypatch.setenv("LT_DEVICES", "2")
    asked = settings.read(**{**DEFAULTS, "devices": 2})
    assert (asked.run, asked.devices) == ({"strategy": {"name": "fsdp"}}, 2)
    with pytest.raises(ConfigError, match=r"was given 'fsdp' for it\. Say it in"):
        settings.read(**{**DEFAULTS, "strategy": "ddp"})


def test_several_processes_are_not_forgotten() -> None:
    fabric = Fabric(accelerator="cpu", devices=2)
    with pytest.raises(ConfigError, match=r"Call fabric.launch\(\) before everything else"):
        parts(fabric)
    with pytest.raises(ConfigError, match="torchrun --nnodes 2 --nproc-per-node 2"):
        Fabric(accelerator="cpu", devices=2, num_nodes=2).launch()


def test_another_number_of_processes_than_was_started_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="asks for 2 processes, and 4 were started"):
        Fabric(accelerator="cpu", devices=2).launch()


def test_frameworks_that_divide_weights_seed_again_as_processes_begin() -> None:
    for strategy, again in (("fsdp", True), ("deepspeed", True), ("ddp", False)):
        seed_everything(3, verbose=False)
        first, second = torch.rand(1), torch.rand(1)
        seed_everything(3, verbose=False)
        torch.rand(1)
        fabric = Fabric(**CPU, strategy=strategy)
        fabric._asked.run["strategy"] = {"name": "single"}
        fabric.launch()
        assert torch.equal(torch.rand(1), first if again else second)
        current.close()


def test_a_batch_sampler_of_the_scripts_own_is_not_told_of_epochs() -> None:
    class Batches(torch.utils.data.Sampler[list[int]]):
        def __init__(self) -> None:
            self.epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return 1

        def __iter__(self) -> Any:
            yield [self.epoch]

    batches = Batches()
    loader = Fabric(**CPU).setup_dataloaders(DataLoader(range(9), batch_sampler=batches))  # pyright: ignore
    for epoch in (5, 6):
        batches.set_epoch(epoch)
        assert [batch.tolist() for batch in loader] == [[epoch]]


def test_loaders_shuffle_by_the_seed_and_anew_each_time() -> None:
    fabric = Fabric(strategy="ddp", **CPU)
    data = TensorDataset(torch.arange(8))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True))
    orders = [torch.cat([batch for (batch,) in loader]).tolist() for _ in range(2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == list(range(8))
    again = fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True))
    assert torch.cat([batch for (batch,) in again]).tolist() == orders[0]
    assert is_wrapped(loader)
    assert (len(loader), loader.dataset, loader.batch_size) == (2, data, 4)


def test_what_is_set_up_is_given_back_as_it_was() -> None:
    fabric = Fabric(**CPU)
    plain, other = nn.Linear(3, 1), nn.Linear(3, 1)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.arange(8)))
    compiled: Any = torch.compile(plain)
    model, optimizer = fabric.setup(compiled, sgd)
    given = {
        "model": model,
        "rest": [optimizer, other, 3],
        "data": fabric.setup_dataloaders(loader),
    }
    found = _unwrap_objects(given)
    assert found["model"] is plain
    assert found["rest"] == [sgd, other, 3]
    assert found["data"] is loader


def test_batches_that_cannot_be_shared_are_refused() -> None:
    fabric = Fabric(strategy="ddp", **CPU)
    data = TensorDataset(torch.arange(8))
    loader = DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 2, False))
    with pytest.raises(ConfigError, match="batches of a BatchSampler, which cannot be shared"):
        fabric.setup_dataloaders(loader)
    assert len(list(fabric.setup_dataloaders(loader, use_distributed_sampler=False))) == 4


def test_what_is_saved_is_loaded_into_what_is_there(tmp_path: Path) -> None:
    fabric = Fabric(**CPU)
    model, optimizer = parts(fabric)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    fabric.backward(model(torch.ones(3, 3)).sum())
    optimizer.step()
    scheduler.step()
    path = tmp_path / "deep" / "a.ckpt"
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 3, "more": 1}
    fabric.save(path, state, filter={"model": lambda name, _: name == "weight"})
    other = nn.Linear(3, 1)
    assert list(torch.load(path)["model"]) == ["weight"]
    asked = {"model": other, "epoch": 0}
    left = fabric.load(path, asked, strict=False)
    assert (asked["epoch"], left["more"], "optimizer" in left) == (3, 1, True)
    assert torch.equal(other.weight, model.weight)
    with pytest.raises(ConfigError, match=r"holds model, .*, and not rate\. Leave these out"):
        fabric.load(path, {"rate": 1})
    torch.save(other.state_dict(), tmp_path / "raw.pt")
    fabric.load_raw(tmp_path / "raw.pt", model)
    assert torch.equal(other.bias, model.bias)


def test_loading_what_all_ranks_wrote_leaves_random_numbers_as_they_are(tmp_path: Path) -> None:
    fabric = Fabric(strategy="fsdp", **CPU)
    model, optimizer = parts(fabric)
    fabric.save(tmp_path / "all", {"model": model, "optimizer": optimizer})
    assert (tmp_path / "all").is_dir()
    draws = (lambda: torch.rand(1).item(), random.random, np.random.rand)
    seed_everything(3, verbose=False)
    expected = [[draw() for draw in draws] for _ in range(2)]
    seed_everything(3, verbose=False)
    assert [draw() for draw in draws] == expected[0]
    fabric.load(tmp_path / "all", {"model": model, "optimizer": optimizer})
    assert [draw() for draw in draws] == expected[1]


def test_callbacks_are_called_with_what_they_take() -> None:
    class Some:
        told: list[Any] = []  # noqa: RUF012

        def on_event(self, value: int, *, also: int = 0) -> None:
            self.told.append((value, also))

        def on_after_setup(self, fabric: Fabric, module: Any) -> None:
            self.told.append(is_wrapped(module))

        on_number = 3

    fabric = Fabric(callbacks=Some(), **CPU)
    parts(fabric)
    fabric.call("on_event", 1, also=2, other=3)
    fabric.call("on_nothing")
    with pytest.warns(UserWarning, match="Some.on_number is no method"):
        fabric.call("on_number")
    assert Some.told == [True, (1, 2)]


def test_loggers_write_numbers(tmp_path: Path) -> None:
    own = CSVLogger(tmp_path, prefix="a", flush_logs_every_n_steps=1)
    board = TensorBoardLogger(tmp_path, name="board")
    fabric = Fabric(loggers=[own, board], **CPU)
    fabric.log("loss", torch.tensor(0.5))
    fabric.log_dict({"loss": 0.25, "rate": 1}, step=7)
    rows = list(csv.DictReader((tmp_path / "lightning_logs/version_0/metrics.csv").open()))
    assert rows == [
        {"a-loss": "0.5", "a-rate": "", "step": "0"}, {"a-loss": "0.25", "a-rate": "1", "step": "7"}
    ]  # fmt: skip
    assert CSVLogger(tmp_path).version == 1
    board.log_hyperparams({"width": 3, "deep": {"er": [1]}})
    board.finalize("success")
    assert any(one.name.startswith("events") for one in Path(board.log_dir).iterdir())
    assert fabric.logger is own


def test_a_module_is_built_without_drawing_numbers_if_so_asked() -> None:
    fabric = Fabric(**CPU)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with fabric.init_module(empty_init=True):
        nn.Linear(2, 2)
    assert torch.equal(torch.get_rng_state(), before)
    with fabric.init_module():
        nn.Linear(2, 2)
    assert not torch.equal(torch.get_rng_state(), before)


def test_a_model_that_is_compiled_is_compiled_by_the_strategy() -> None:
    fabric = Fabric(**CPU)
    plain = nn.Linear(3, 1)
    compiled: Any = torch.compile(plain, backend="eager")
    model = fabric.setup(compiled)
    assert model.module is plain
    optimizer = fabric.setup_optimizers(torch.optim.SGD(plain.parameters(), 0.1))
    assert optimizer.training.engine.spec.compile == {"backend": "eager"}


def test_models_that_a_script_has_done_with_are_released() -> None:
    fabric = Fabric(**CPU)
    for _ in range(3):
        model, optimizer = parts(fabric)
        fabric.backward(model(torch.ones(2, 3)).mean())
        optimizer.step()
        del model, optimizer
    session = current.session
    assert session is not None
    kept = parts(fabric)
    assert (len(session.engines), len(kept)) == (1, 2)
    kept += parts(fabric)
    assert (len(session.engines), len(kept)) == (2, 4)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({"precision": "bf16-true"}, torch.bfloat16),
        ({"precision": "16-true"}, torch.float16),
        ({"plugins": DoublePrecision()}, torch.float64),
    ],
)
def test_weights_are_of_the_precision_that_is_true(given: Any, dtype: torch.dtype) -> None:
    fabric = Fabric(**CPU, **given)
    torch.manual_seed(0)
    with fabric.init_module():
        model = nn.Linear(3, 3)
    plain = copy.deepcopy(model)
    assert plain.weight.dtype == dtype
    prepared, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.5))
    x = torch.randn(4, 3)
    out = prepared(x)
    assert (out.dtype, out.tolist()) == (torch.float32, plain(x.to(dtype)).float().tolist())
    assert copy.deepcopy(prepared)(x).tolist() == out.tolist()
    fabric.backward(out.square().mean())
    optimizer.step()
    plain(x.to(dtype)).float().square().mean().backward()
    torch.optim.SGD(plain.parameters(), 0.5).step()
    assert torch.equal(prepared.module.weight, plain.weight)
    assert torch.get_default_dtype() == torch.float32


def test_helpers() -> None:
    assert rank_zero_only.rank == 0
    assert rank_zero_only(lambda: 3)() == 3
    assert suggested_max_num_workers(10_000) == 1
    fabric = Fabric(**CPU)
    assert fabric.all_gather({"a": 1.5})["a"].item() == 1.5
    assert fabric.broadcast("x") == "x"
    assert fabric.to_device((torch.ones(1), "a"))[1] == "a"
    assert (fabric.world_size, fabric.global_rank, fabric.is_global_zero) == (1, 0, True)
    assert fabric.seed_everything(5, verbose=False) == 5
    assert os.environ["PL_SEED_WORKERS"] == "1"
    with pytest.raises(ConfigError, match="NumPy takes seeds from 0"):
        seed_everything(-1)
