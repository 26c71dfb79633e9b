"""What a script meets in one process: values as before, or an error that names call and remedy."""

from __future__ import annotations

import copy
import json
import sys
from collections import UserDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from unipar.compat.accelerate import (
    Accelerator,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    PartialState,
    notebook_launcher,
    state,
)
from unipar.compat.accelerate.utils import (
    AutocastKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    find_executable_batch_size,
    is_tensorboard_available,  # pyright: ignore[reportAttributeAccessIssue]
    set_seed,
)
from unipar.compat.deepspeed.runtime.lr_schedules import WarmupLR
from unipar.compat.run import current
from unipar.errors import ConfigError
from unipar.strategy import LossScale

ZERO = {"zero_optimization": {"stage": 2}}
SCALE = LossScale(initial=2.0**16, growth_interval=1000)
"""DeepSpeed's, of a run in fp16."""
pytestmark = pytest.mark.usefixtures("alone")


def parts(accelerator: Accelerator) -> Any:
    set_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerator.prepare(model, optimizer, DataLoader(torch.randn(8, 3), batch_size=2))  # pyright: ignore[reportArgumentType]


def step(accelerator: Accelerator, model: Any, optimizer: Any, x: torch.Tensor) -> float:
    loss = model(x).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_a_step_is_torchs() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = parts(accelerator)
    set_seed(0)
    plain = nn.Linear(3, 1)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x in loader:
        loss = plain(x).square().mean()
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        assert step(accelerator, model, optimizer, x) == loss.item()
    assert torch.equal(accelerator.unwrap_model(model).get_parameter("weight"), plain.weight)


def test_a_norm_and_gradients_can_be_read_before_the_step() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = parts(accelerator)
    accelerator.backward(model(next(iter(loader))).square().mean())
    expected = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.01)
    assert norm.item() == pytest.approx(float(expected))
    clipped = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert float(clipped) == pytest.approx(0.01, rel=1e-3)
    optimizer.step()
    assert f"{norm:.4f}" == f"{expected:.4f}"
    assert isinstance(norm, torch.Tensor)
    assert float(norm + 1) == pytest.approx(float(expected) + 1)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda a, m, o, x: a.backward(x, retain_graph=True), "takes a loss and nothing else"),
        (lambda a, m, o, x: o.step(), r"optimizer.step\(\) came without a gradient"),
        (
            lambda a, m, o, x: a.prepare(torch.optim.LBFGS(nn.Linear(1, 1).parameters())).step(
                lambda: x
            ),
            "LBFGS may run the model several times in a step",
        ),
        (lambda a, m, o, x: a.clip_grad_norm_(m.parameters(), 1.0), "came before accelerator"),
        (lambda a, m, o, x: a.lomo_backward(x, 0.1), "Its optimizer steps within the backward"),
        (lambda a, m, o, x: a.register_for_checkpointing(1), "was given a int, which has no"),
        (lambda a, m, o, x: a.prepare(torch.optim.SGD(m.parameters(), 1)), "two optimizers update"),
        (lambda a, m, o, x: a.save_state(), "nothing says where checkpoints are"),
        (lambda a, m, o, x: a.init_trackers("p") or a.get_tracker("x").log_images, "log_images"),
    ],
)
def test_what_cannot_be_kept_is_refused_where_it_is_called(call: Any, said: str) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = parts(accelerator)
    loss = model(next(iter(loader))).square().mean()
    with pytest.raises((ConfigError, AttributeError), match=said):
        call(accelerator, model, optimizer, loss)


def test_clipping_in_an_accumulation_is_refused() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, _, loader = parts(accelerator)
    x = next(iter(loader))
    with accelerator.accumulate(model):
        accelerator.backward(model(x).sum())
        with pytest.raises(ConfigError, match=r"`if accelerator.sync_gradients:` before it"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mixed_precision": "tf32"}, "Choose of no, fp8, fp16, bf16"),
        ({"log_with": "comet_ml"}, "there is no tracker 'comet_ml' here"),
        ({"log_with": "tensorboard"}, r"Accelerator\(project_dir='runs'\)"),
        ({"megatron_lm_plugin": 1}, "Use strategy: mesh"),
        ({"kwargs_handlers": [1]}, "holds int, which is no handler"),
        ({"kwargs_handlers": [AutocastKwargs(enabled=False)]}, "Models compute in the run's prec"),
        ({"kwargs_handlers": [DistributedDataParallelKwargs(dim=1)]}, "Leave dim out"),
        ({"dataloader_config": DataLoaderConfiguration(use_stateful_dataloader=True)},
         "Leave use_stateful_dataloader out"),
        ({"project_config": ProjectConfiguration(save_on_each_node=True)}, "save_on_each_node"),
        ({"dynamo_plugin": TorchDynamoPlugin(use_regional_compilation=True)}, "regional"),
        ({"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config={"optimizer": {}, **ZERO})},
         "Build the optimizer in the script"),
        ({"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config="none.json")}, "cannot be read"),
        ({"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config={})}, "has no zero_optimization"),
        ({"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=ZERO),
          "gradient_accumulation_steps": 4}, "over 1 and over 4 micro-batches. Say it once"),
    ],
)  # fmt: skip
def test_settings_without_counterpart_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Accelerator(cpu=True, **given)


def test_plugins_become_options() -> None:
    assert DistributedDataParallelKwargs(
        find_unused_parameters=True, comm_hook=DDPCommunicationHookType.BF16
    ).options() == {"find_unused_parameters": True, "compression": "bf16"}
    assert FullyShardedDataParallelPlugin(
        sharding_strategy="SHARD_GRAD_OP", cpu_offload=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap="Block,Head",
    ).options() == {"name": "fsdp", "sharding": "grad_op", "cpu_offload": True,
                    "wrap": ("Block", "Head")}  # fmt: skip
    assert DeepSpeedPlugin(
        zero_stage=3, gradient_clipping=0.5, offload_param_device="nvme",
        offload_param_nvme_path="/local",
    ).asked() == {
        "strategy": {"name": "zero3", "offload_parameters": True, "nvme_path": "/local"},
        "max_grad_norm": 0.5, "loss_scale": SCALE,
    }  # fmt: skip
    config = {"bf16": {"enabled": True}, "train_batch_size": "auto", "zero_optimization": {
        "stage": 2, "overlap_comm": False, "reduce_bucket_size": "auto"}}  # fmt: skip
    assert DeepSpeedPlugin(hf_ds_config=config).asked() == {
        "precision": "bf16", "strategy": {"name": "zero2", "overlap_comm": False},
        "accumulation": 1, "max_grad_norm": 1.0,
    }  # fmt: skip
    zero = {"stage": "auto", "offload_optimizer": {"device": "auto"}}
    config = {"gradient_clipping": "auto", "gradient_accumulation_steps": "auto",
              "zero_optimization": zero}  # fmt: skip
    assert DeepSpeedPlugin(hf_ds_config=config).asked() == {
        "strategy": {"name": "zero2"}, "max_grad_norm": 1.0, "loss_scale": SCALE,
    }  # fmt: skip
    assert DeepSpeedPlugin(
        hf_ds_config=config,
        zero_stage=1,
        gradient_clipping=0.0,
        gradient_accumulation_steps=3,
        offload_optimizer_device="cpu",
    ).asked() == {
        "strategy": {"name": "zero1", "offload_optimizer": True}, "accumulation": 3,
        "loss_scale": SCALE,
    }  # fmt: skip
    assert zero == {"stage": "auto", "offload_optimizer": {"device": "auto"}}
    assert DeepSpeedPlugin().asked() == {
        "strategy": {"name": "zero2"}, "max_grad_norm": 1.0, "loss_scale": SCALE,
    }  # fmt: skip


def moved(accelerator: Accelerator, *, clip: float | None = None) -> float:
    """How far a step by a large gradient moves weights."""
    model, optimizer, _ = parts(accelerator)
    before = [p.detach().clone() for p in model.parameters()]
    accelerator.backward(model(torch.full((4, 3), 100.0)).sum())
    if clip is not None:
        accelerator.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    pairs = zip(before, model.parameters(), strict=True)
    return float(nn.utils.get_total_norm([was - now.detach() for was, now in pairs])) / 0.1


def test_a_deepspeed_plugin_clips_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIPAR_STRATEGY", "single")
    one = {"cpu": True, "deepspeed_plugin": DeepSpeedPlugin()}
    assert moved(Accelerator(**one)) == pytest.approx(1.0, rel=1e-3)
    current.close()
    assert moved(Accelerator(**one), clip=1.0) == pytest.approx(1.0, rel=1e-3)
    current.close()
    with pytest.raises(
        ConfigError, match=r"ignores this.*DeepSpeedPlugin\(gradient_clipping=0.5\)"
    ):
        moved(Accelerator(**one), clip=0.5)
    current.close()
    accelerator = Accelerator(**one)
    model, *_ = parts(accelerator)
    accelerator.backward(model(torch.ones(2, 3)).sum())
    for clip in (
        lambda: accelerator.clip_grad_norm_([model.weight], 1.0),
        lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1),
        lambda: accelerator.clip_grad_value_(model.parameters(), 1.0),
    ):
        with pytest.raises(ConfigError, match="under a DeepSpeedPlugin"):
            clip()


def test_a_schedule_of_one_cycle_goes_on_to_its_end_where_gradients_are_accumulated() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
    model, optimizer, cycle = accelerator.prepare(model, optimizer, cycle)  # pyright: ignore
    for _ in range(40):
        with accelerator.accumulate(model):
            step(accelerator, model, optimizer, torch.ones(2, 3))
            cycle.step()
    assert cycle.scheduler.last_epoch == 20


class Best:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["best"]


def test_what_could_not_be_read_again_is_refused_where_it_is_saved(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    parts(accelerator)
    best = Best({1: [0.5, torch.ones(2)]})
    accelerator.register_for_checkpointing(best)
    accelerator.save_state(tmp_path / "plain")
    accelerator.load_state(tmp_path / "plain")
    best.value = tmp_path
    with pytest.raises(
        ConfigError, match=r"save_state: the state_dict\(\) of a Best holds objects"
    ):
        accelerator.save_state(tmp_path / "path")
    assert not (tmp_path / "path").exists()


def test_the_module_itself_computes_in_half_and_gives_fp32() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    net, x = nn.Linear(64, 3), torch.randn(2, 64)
    known = {**vars(net)}
    in_fp32 = net(x)
    model, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    expected = model(x)
    assert not torch.equal(expected, in_fp32)
    bare: Any = accelerator.unwrap_model(model)
    assert accelerator.unwrap_model(model) is bare is net
    assert torch.equal(bare(x), expected)
    assert bare(x).dtype is model(x).dtype is torch.float32
    assert torch.equal(model(x), expected)
    assert torch.equal(accelerator.unwrap_model(model, keep_fp32_wrapper=False)(x), in_fp32)
    assert vars(net).keys() == known.keys()
    assert torch.equal(model(x), expected)


def test_settings_from_outside_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unipar.yaml").write_text("precision: bf16\n")
    monkeypatch.setenv("UNIPAR_STRATEGY", "ddp")
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    assert accelerator.mixed_precision == "bf16"
    assert current.session is not None
    assert current.session.strategy.name == "ddp"
    assert Accelerator().mixed_precision == "bf16"
    with pytest.raises(ConfigError, match="the run is open with"):
        Accelerator(strategy="fsdp")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gradients_are_the_scripts_before_the_step_where_they_are_whole(strategy: str) -> None:
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model, optimizer, loader = parts(accelerator)
    before = [p.detach().clone() for p in model.parameters()]
    accelerator.backward(model(next(iter(loader))).square().mean())
    if strategy == "fsdp":
        for use in (
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            lambda: next(model.parameters()).grad.add_(1),
        ):
            with pytest.raises(ConfigError, match=r"parameter\.grad was used between"):
                use()
        return
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert norm > 1e-3
    for parameter in model.parameters():
        parameter.grad.mul_(2)
    optimizer.step()
    moved = [b - p.detach() for b, p in zip(before, model.parameters(), strict=True)]
    assert float(nn.utils.get_total_norm(moved)) == pytest.approx(2e-4, rel=1e-2)


def test_the_state_says_whether_there_is_an_accelerator() -> None:
    assert not state.is_initialized()
    PartialState(cpu=True)
    assert not state.is_initialized()
    Accelerator(cpu=True)
    assert state.is_initialized()


def test_a_face_says_what_it_has_not() -> None:
    with pytest.raises(ImportError, match=r"has no init_empty_weights\. It spreads a model"):
        from unipar.compat.accelerate import init_empty_weights  # noqa: F401  # pyright: ignore
    with pytest.raises(ImportError, match=r"has no nonsense\. It is none of the names"):
        from unipar.compat.accelerate.utils import nonsense  # noqa: F401  # pyright: ignore
    assert is_tensorboard_available()
    with pytest.raises(ConfigError, match="A notebook is one process here"):
        notebook_launcher(print, num_processes=2)


def test_an_optimizer_without_its_model_says_so() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="the model that it updates was not"):
        optimizer.step()
    model = accelerator.prepare(model)
    step(accelerator, model, optimizer, torch.ones(1, 2))


def test_a_loss_of_what_is_frozen_says_so() -> None:
    accelerator = Accelerator()
    networks = [nn.Linear(3, 3), nn.Linear(3, 3)]
    prepared: list[Any] = [
        accelerator.prepare(one, torch.optim.SGD(one.parameters(), lr=0.1)) for one in networks
    ]
    for one in networks:
        one.requires_grad_(False)
    (generator, _), (critic, _) = prepared
    with pytest.raises(ConfigError, match=r"this loss has no gradient.*requires_grad_\(False\)"):
        accelerator.backward(critic(generator(torch.ones(2, 3))).sum())


def test_gradients_that_another_loss_has_left_are_added_to() -> None:
    def play(backward: Any, first: Any, second: Any, a: Any, b: Any) -> list[list[float]]:
        x = torch.ones(1, 2)
        a.zero_grad()
        backward(second(first(x)).sum())
        a.step()
        backward(second(x).square().sum())
        b.step()
        b.zero_grad()
        return [p.flatten().tolist() for m in (first, second) for p in m.parameters()]

    def networks() -> tuple[Any, ...]:
        torch.manual_seed(0)
        both = nn.Linear(2, 2), nn.Linear(2, 1)
        return (*both, *(torch.optim.SGD(one.parameters(), lr=0.1) for one in both))

    accelerator = Accelerator(cpu=True)
    found = play(accelerator.backward, *accelerator.prepare(*networks()))
    assert found == play(torch.Tensor.backward, *networks())


def test_a_gradient_is_added_to_that_of_a_step_before_which_was_not_cleared() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = parts(accelerator)
    plain = copy.deepcopy(model.module)
    by_torch = torch.optim.SGD(plain.parameters(), **optimizer.defaults)
    x = torch.ones(2, 3)
    for number in range(5):
        accelerator.backward(model(x).sum())
        plain(x).sum().backward()
        for one in (optimizer, by_torch):
            one.step()
            if number == 2:
                one.zero_grad()
    assert [p.tolist() for p in model.parameters()] == [p.tolist() for p in plain.parameters()]


def test_deepspeeds_engine_clears_gradients_by_itself() -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=0))
    model, optimizer, _ = parts(accelerator)
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 3)).sum())
        optimizer.step()


def test_micro_batches_may_be_kept_local_by_the_model_as_under_ddp() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = parts(accelerator)
    with model.no_sync():
        accelerator.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()


def test_fp16_on_a_cpu_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    assert Accelerator(cpu=True, mixed_precision="fp16").mixed_precision == "fp16"
    assert "Accelerate 1.15 computes in fp32 there" in caplog.text


def test_batches_are_cut_up_by_the_configuration_alone(caplog: pytest.LogCaptureFixture) -> None:
    assert not Accelerator(cpu=True, split_batches=True).split_batches
    assert "DataLoaderConfiguration(split_batches=True) where it is meant" in caplog.text


@pytest.mark.parametrize(
    ("asked", "shares"),
    [({}, True), ({"strategy": "ddp"}, True), ({"strategy": "fsdp"}, False)],
)
def test_buffers_are_shared_where_the_framework_would(asked: Any, shares: bool) -> None:
    Accelerator(cpu=True, **asked)
    assert current.asks_for_replicas() is shares


def test_hooks_save_and_load_weights_in_a_way_of_their_own(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = parts(accelerator)
    seen: list[Any] = []

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        seen.append((len(models), [*weights[0]], output_dir))
        own = {name: one + 1 for name, one in weights.pop().items()}
        torch.save(own, Path(output_dir) / "own.pt")

    def load(models: list[Any], input_dir: str) -> None:
        own = torch.load(Path(input_dir) / "own.pt", weights_only=True)
        accelerator.unwrap_model(models.pop()).load_state_dict(own)

    handles = [
        accelerator.register_save_state_pre_hook(save),
        accelerator.register_load_state_pre_hook(load),
    ]
    step(accelerator, model, optimizer, next(iter(loader)))
    saved = {name: one.clone() for name, one in model.state_dict().items()}
    accelerator.save_state(str(tmp_path / "a"))
    assert seen == [(1, ["weight", "bias"], str(tmp_path / "a"))]
    for kept in (1, 0):
        step(accelerator, model, optimizer, next(iter(loader)))
        accelerator.load_state(str(tmp_path / "a"))
        # By the hook, and without it from the checkpoint, which has them, too.
        for name, one in model.state_dict().items():
            assert torch.equal(one, saved[name] + kept)
        for handle in handles:
            handle.remove()
    accelerator.save_state(str(tmp_path / "b"))
    assert len(seen) == 1


@pytest.mark.parametrize("which", ["save", "load"])
def test_hooks_of_whole_weights_are_refused_where_they_are_divided(which: str) -> None:
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    with pytest.raises(ConfigError, match="they are given whole weights"):
        getattr(accelerator, f"register_{which}_state_pre_hook")(print)


def test_a_second_accelerator_has_engines_of_its_own(tmp_path: Path) -> None:
    def fold(number: int) -> Any:
        accelerator = Accelerator(cpu=True)
        model, optimizer, loader = parts(accelerator)
        schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1))
        for x in loader:
            step(accelerator, model, optimizer, x)
        accelerator.save_state(str(tmp_path / str(number)))
        # What a script may have left over when the next fold begins.
        return schedule, loader, accelerator.unwrap_model(model)

    for number in range(2):
        left, session = fold(number), current.session
        assert session is not None
        assert [*session.engines] == ["model"]
        assert left
    accelerator = Accelerator(cpu=True)
    _, optimizer, _ = parts(accelerator)
    accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    accelerator.load_state(str(tmp_path / "1"))


def test_memory_that_is_freed_makes_room() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = parts(accelerator)
    step(accelerator, model, optimizer, next(iter(loader)))
    session = current.session
    assert session is not None
    assert accelerator.free_memory(model, optimizer) == [None, None]
    assert not session.engines
    kept = parts(accelerator)
    assert ([*session.engines], len(kept)) == (["model"], 3)
    accelerator.clear()
    assert not session.engines


def test_on_one_process_functions_of_any_rank_are_called() -> None:
    state = PartialState()
    assert state.on_process(lambda: 3, process_index=1)() == 3
    assert state.on_local_process(lambda: 4, local_process_index=2)() == 4


class Rows:
    """A ``datasets.Dataset``, as far as it is split."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, indices: list[int]) -> Rows:
        return Rows([self.rows[at] for at in indices])

    def __repr__(self) -> str:
        return f"Rows({self.rows})"


def split(kind: Any, rank: int, ranks: int) -> list[str]:
    """What a rank gets of data of several kinds, and what they are afterwards."""
    stands = {
        "__init__": lambda self: None, "num_processes": ranks, "process_index": rank,
        "use_distributed": True, "device": torch.device("cpu"),
    }  # fmt: skip
    found, state = [], type("Standing", (kind,), stands)()
    for padded, data in (
        *((padded, data) for padded in (False, True) for data in (
            [*"abcd"], Rows([1, 2, 3, 4]), Rows([7]), "abcd",
            {"x": [*"abcd"], "y": Rows([1, 2, 3, 4]), "z": "abcd"},
            {"x": {"a": [1, 2, 3], "b": Rows([4, 5, 6])}, "y": ["c", "d"]},
        )),
        (False, ("a", "b", "c")), (False, torch.arange(8).view(4, 2)), (False, []),
        (False, UserDict(x=[1, 2, 3])),
    ):  # fmt: skip
        with state.split_between_processes(data, apply_padding=padded) as part:
            found.append(f"{part} of {data}")
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_data_are_split_among_ranks_as_by_accelerate(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = pytest.importorskip("accelerate.state")
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(Dataset=Rows))
    monkeypatch.setattr(theirs, "is_datasets_available", lambda: True)
    for rank in range(ranks):
        expected = split(theirs.PartialState, rank, ranks)
        assert split(PartialState, rank, ranks) == expected


def test_a_part_that_is_padded_is_by_the_last_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    state, found = PartialState(), []
    monkeypatch.setattr(type(state), "num_processes", 3)
    monkeypatch.setattr(type(state), "use_distributed", True)
    for rank in range(3):
        monkeypatch.setattr(type(state), "process_index", rank)
        with state.split_between_processes(torch.arange(4), apply_padding=True) as part:
            found.append(part.tolist())
    assert found == [[0, 1], [2, 3], [3, 3]]


def sizes_tried(decorate: Any, fits: int, smaller: list[int] | None = None) -> list[Any]:
    """The sizes that two calls try, and what they end by."""
    found: list[Any] = []

    def train(batch_size: int) -> None:
        found.append(batch_size)
        if batch_size > fits:
            raise RuntimeError("CUDA out of memory. Tried to allocate")

    given = {} if smaller is None else {"reduce_batch_size_fn": iter(smaller).__next__}
    call = decorate(train, starting_batch_size=8, **given)
    for _ in range(2):
        try:
            call()
        except RuntimeError:
            found.append("none fits")
    return found


def test_a_batch_size_that_was_found_is_kept_for_later_calls() -> None:
    theirs = pytest.importorskip("accelerate.utils.memory").find_executable_batch_size
    cases: list[tuple[Any, ...]] = [(6,), (0,), (-1, [4, -1]), (0, [0])]
    for given in cases:
        assert sizes_tried(find_executable_batch_size, *given) == sizes_tried(theirs, *given)
    assert sizes_tried(find_executable_batch_size, 6) == [8, 7, 6, 6]


OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


class OfOne(torch.optim.Adam):
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        pass


@pytest.mark.parametrize(
    ("make", "used"),
    [
        (torch.optim.Adam, ""),
        (torch.optim.AdamW, ""),
        (torch.optim.Adagrad, ""),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), ""),
        (lambda p: torch.optim.AdamW(p, weight_decay=0.1), ""),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1, decoupled_weight_decay=True), "Adam"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "Adam"),
        (lambda p: torch.optim.Adam(p, maximize=True), "Adam"),
        (lambda p: torch.optim.Adagrad(p, lr_decay=0.1), "Adagrad"),
        (OfOne, "Adam"),
        (torch.optim.SGD, "Adam"),
        (torch.optim.RMSprop, "Adam"),
    ],
)
def test_an_optimizer_that_accelerate_would_replace_is_refused(
    make: Any, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIPAR_STRATEGY", "single")
    for config, refused in (
        ({"zero_optimization": OFFLOADED}, bool(used)),
        ({"zero_optimization": OFFLOADED, "zero_force_ds_cpu_optimizer": False}, False),
        (ZERO, False),
    ):
        accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        model = nn.Linear(3, 1)
        optimizer = make(model.parameters())
        if refused:
            with pytest.raises(ConfigError, match=f"trains by DeepSpeedCPU{used} in its place"):
                accelerator.prepare(model, optimizer)
        else:
            model, optimizer = accelerator.prepare(model, optimizer)  # pyright: ignore
            step(accelerator, model, optimizer, torch.ones(2, 3))
        current.close()
    plugin = DeepSpeedPlugin(offload_optimizer_device="cpu")
    assert plugin.replaces_optimizers()


@pytest.mark.parametrize("called", [True, False])
def test_a_schedule_of_deepspeeds_steps_with_the_weights(
    called: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIPAR_STRATEGY", "single")
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, deepspeed_plugin=DeepSpeedPlugin(zero_stage=0)
    )
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    warmup = WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear")
    model, optimizer, schedule = accelerator.prepare(model, optimizer, warmup)  # pyright: ignore
    rates = []
    for _ in range(6):
        with accelerator.accumulate(model):
            step(accelerator, model, optimizer, torch.ones(2, 3))
            if called:
                schedule.step()
        rates += schedule.get_last_lr()
    # As Accelerate 1.15.0 has them with DeepSpeed 0.19.8.
    assert rates == pytest.approx([0.0, 0.0, 0.0, 0.025, 0.025, 0.05])
    accelerator.save_state("at")
    warmup.last_batch_iteration = 0
    accelerator.load_state("at")
    assert warmup.last_batch_iteration == 2
    alone = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert accelerator.prepare(alone) is alone


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.again.weight = self.first.weight


def test_an_index_names_what_its_files_hold(tmp_path: Path) -> None:
    model = Tied()
    Accelerator(cpu=True).save_model(model, tmp_path, max_shard_size=2 * 64)
    assert [one.name for one in tmp_path.iterdir()] == ["model.safetensors"]
    Accelerator(cpu=True).save_model(model, tmp_path, max_shard_size=64)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * 64
    assert index["weight_map"] == {
        "first.weight": "model-00001-of-00002.safetensors",
        "last.weight": "model-00002-of-00002.safetensors",
    }
    for name, file in index["weight_map"].items():
        held = load_file(tmp_path / file)
        assert torch.equal(held.pop(name), model.get_parameter(name))
        assert not held


def test_what_is_reduced_has_a_gradient() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = parts(accelerator)
    loss = model(next(iter(loader))).square().mean()
    accelerator.backward(accelerator.reduce(loss, "mean"))  # pyright: ignore[reportArgumentType]
    optimizer.step()


def test_powers_of_gradients_are_of_pytorchs_rank() -> None:
    hook = DDPCommunicationHookType.POWER_SGD
    assert DistributedDataParallelKwargs(comm_hook=hook).options()["powersgd_rank"] == 1
    given = DistributedDataParallelKwargs(
        comm_hook=hook, comm_state_option={"matrix_approximation_rank": 2}
    )
    assert given.options()["powersgd_rank"] == 2
