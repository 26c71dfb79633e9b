"""The faces of PyTorch and Horovod have the real names, and say what they refuse."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import json
import os
import pickle
import random
import subprocess
import sys
import types
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from unipar.compat import adopting
from unipar.compat.horovod_names import HOROVOD
from unipar.compat.torch_names import FACE, REPLACED, holds_face
from unipar.engine.average import LossAverage
from unipar.errors import ConfigError
from unipar.world import Placement


@pytest.fixture(autouse=True)
def seen() -> None:
    """What a script builds is seen."""
    importlib.import_module(FACE)
    adopting.start()


def trained(**asked: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, **asked)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def test_a_loss_is_on_its_way_to_the_host_before_its_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the step would wait until the pass has come to its end on the device."""
    model, optimizer = trained()
    events: list[str] = []
    next(model.parameters()).register_post_accumulate_grad_hook(lambda _: events.append("backward"))
    start = LossAverage.start

    def started(*given: Any) -> None:
        events.append("loss")
        start(*given)

    monkeypatch.setattr(LossAverage, "start", started)
    step(model, optimizer)
    optimizer.zero_grad()
    for _ in range(2):
        # Which of them is the last nobody knows.
        model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    assert events == ["loss", "backward"] * 3


# -- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", REPLACED)
def test_all_names_but_those_replaced_are_torchs(module: str) -> None:
    real = importlib.import_module(module)
    face = importlib.import_module(FACE + module.removeprefix("torch"))
    own = set(REPLACED[module][1].split())
    for name in own:
        assert hasattr(real, name), f"{module}.{name} is none of torch's"
        assert getattr(face, name) is not getattr(real, name)
    for name in set(vars(real)) - own:
        if not name.startswith("__") and not isinstance(getattr(real, name), ModuleType):
            assert getattr(face, name) is getattr(real, name), name
    below = [name for name in vars(real) if holds_face(f"{module}.{name}")]
    assert all(getattr(face, name).__name__.startswith(FACE) for name in below)


@pytest.mark.parametrize("module", ["torch", "torch.nn", "torch.nn.utils"])
def test_all_names_at_once_are_those_that_torch_gives(module: str) -> None:
    real: dict[str, Any] = {}
    face: dict[str, Any] = {}
    exec(f"from {module} import *", real)
    exec(f"from {FACE}{module.removeprefix('torch')} import *", face)
    assert set(face) == set(real)
    replaced = {name for name in set(real) - {"__builtins__"} if face[name] is not real[name]}
    assert set(REPLACED[module][1].split()) & set(real) <= replaced


def test_a_name_that_is_replaced_later_is_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    face = importlib.import_module(FACE)
    assert face.manual_seed is torch.manual_seed
    # As importing torch._dynamo does.
    monkeypatch.setattr(torch, "manual_seed", lambda seed: torch.random.manual_seed(seed))
    assert face.manual_seed is torch.manual_seed


@pytest.mark.parametrize(
    "name",
    [
        "torch.nn.parallel.DistributedDataParallel", "torch.distributed.init_process_group",
        "torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_",
        "torch.distributed.fsdp.FullyShardedDataParallel", "torch.distributed.fsdp.fully_shard",
        "torch.distributed.checkpoint.state_dict.get_model_state_dict",
        "torch.distributed.checkpoint.state_dict.set_state_dict", "torch.amp.GradScaler",
        "torch.save",
    ],
)  # fmt: skip
def test_what_replaces_a_name_takes_its_arguments(name: str) -> None:
    module, _, last = name.rpartition(".")
    real = getattr(importlib.import_module(module), last)
    face = getattr(importlib.import_module(FACE + module.removeprefix("torch")), last)
    wanted = inspect.signature(real).parameters
    call = face.__new__ if last.startswith("Fully") else face
    own = inspect.signature(call).parameters
    loose = any(one.kind is one.VAR_KEYWORD for one in own.values())
    assert loose or set(wanted) <= set(own)
    positional = [
        n for n, one in own.items() if one.kind is one.POSITIONAL_OR_KEYWORD and n != "cls"
    ]
    expected = [n for n, one in wanted.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    shared = [n for n in positional if n in expected]
    assert shared == expected[: len(shared)]


def test_modules_of_fsdp_share_weights_also_after_these_were_put_on_a_device() -> None:
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    model[1].weight = model[0].weight
    importlib.import_module(f"{FACE}.distributed.fsdp").fully_shard(model)
    model.to_empty(device="cpu")
    assert model[1].weight is model[0].weight
    assert model[1].weight.device.type == "cpu"


def test_state_dicts_name_modules_that_are_recomputed_as_torchs_do(alone: None) -> None:
    states = importlib.import_module(f"{FACE}.distributed.checkpoint.state_dict")
    model: Any = nn.Sequential(checkpoint_wrapper(nn.Linear(4, 3)), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = list(states.get_optimizer_state_dict(model, optimizer)["state"])
    step(model, optimizer)
    weights, state = states.get_state_dict(model, optimizer)
    assert before == list(weights) == list(state["state"]) == state["param_groups"][0]["params"]
    assert before == ["0.weight", "0.bias", "1.weight", "1.bias"]
    moment = state["state"]["0.weight"]["exp_avg"].clone()
    step(model, optimizer)
    states.set_optimizer_state_dict(model, optimizer, state)
    found = optimizer.state[model[0].weight]["exp_avg"]
    assert torch.equal(found, moment)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({"cast_forward_inputs": False}, "cast_forward_inputs=False"),
        ({"cast_forward_inputs": False, "param_dtype": None}, None),
        ({"cast_root_forward_inputs": False}, "cast_root_forward_inputs=False"),
        ({"cast_root_forward_inputs": False, "cast_forward_inputs": True}, None),
        ({"keep_low_precision_grads": True}, None),
    ],
)
def test_inputs_that_fsdp_is_to_leave_as_they_are_are_refused(
    alone: None, policy: dict[str, Any], said: str | None
) -> None:
    fsdp = importlib.import_module(f"{FACE}.distributed.fsdp")
    first = {"cast_root_forward_inputs", "keep_low_precision_grads"} & policy.keys()
    kind = fsdp.MixedPrecision if first else fsdp.MixedPrecisionPolicy
    given = kind(**{"param_dtype": torch.bfloat16, **policy})

    def wrap() -> None:
        if first:
            fsdp.FullyShardedDataParallel(nn.Linear(2, 2), mixed_precision=given)
        else:
            fsdp.fully_shard(nn.Linear(2, 2), mp_policy=given)

    if said is None:
        wrap()
        return
    with pytest.raises(ConfigError, match=said):
        wrap()


def test_buffers_that_keep_their_dtype_are_told_of(
    alone: None, caplog: pytest.LogCaptureFixture
) -> None:
    fsdp = importlib.import_module(f"{FACE}.distributed.fsdp")
    half = fsdp.MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    for module in (nn.Linear(2, 2), nn.BatchNorm1d(2)):
        fsdp.FullyShardedDataParallel(module, mixed_precision=half)
        told = [one for one in caplog.messages if "leaves buffers (running_mean" in one]
        assert len(told) == isinstance(module, nn.BatchNorm1d)


def test_what_fsdp_gives_has_the_dtype_that_is_asked_for(alone: None) -> None:
    fsdp = importlib.import_module(f"{FACE}.distributed.fsdp")
    model: Any = nn.Linear(4, 1)
    fsdp.fully_shard(model, mp_policy=fsdp.MixedPrecisionPolicy(output_dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    output = model(torch.ones(2, 4))
    output.float().mean().backward()
    optimizer.step()
    assert output.dtype == torch.bfloat16
    assert model.weight.dtype == torch.float32


def test_every_name_of_horovods_has_one_fate() -> None:
    pytest.importorskip("horovod")
    listing = (
        "import json, types, horovod.torch as hvd\n"
        "print(json.dumps([n for n in dir(hvd) if not n.startswith('_')]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", listing], capture_output=True, text=True, check=True, timeout=60
    )
    names = json.loads(done.stdout.splitlines()[-1])
    assert len(names) > 40
    face = importlib.import_module("unipar.compat.horovod.torch")
    for name in names:
        row = HOROVOD.find(name)
        assert row is not None, f"{name} is in none of the rows"
        if row.fate == "refused":
            with pytest.raises(ImportError, match=f"has no {name}. "):
                exec(f"from {face.__name__} import {name}", {})
        else:
            assert hasattr(face, name)


def test_horovods_face_imports_nothing_of_horovod() -> None:
    code = (
        "import sys, unipar.compat.horovod.torch\n"
        "print([n for n in sys.modules if n.split('.')[0] == 'horovod'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["[]"]


# -- training ------------------------------------------------------------------------------------


def test_a_model_is_taken_over_when_it_is_called_and_stays_what_it_was() -> None:
    model, optimizer = trained(momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    first = step(model, optimizer)
    assert adopting.adoption.trained
    assert step(model, optimizer) < first
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert isinstance(model, nn.Sequential)
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].shape == (3, 4)


def test_copies_and_files_are_of_the_scripts_own_class() -> None:
    model, optimizer = trained()
    step(model, optimizer)
    copied = copy.deepcopy(model)
    assert type(copied) is nn.Sequential
    file = io.BytesIO()
    torch.save([model, optimizer], file)
    file.seek(0)
    loaded, again = torch.load(file, weights_only=False)
    assert type(loaded) is nn.Sequential
    assert again.param_groups[0]["lr"] == 0.1
    assert torch.equal(loaded.state_dict()["0.weight"], model.state_dict()["0.weight"])


def test_gradients_are_taken_of_parameters_that_can_be_gone_through_once() -> None:
    model, optimizer = trained()
    step(model, optimizer)
    loss = model(torch.ones(2, 4)).square().mean()
    once: Any = (one for one in [loss]), model.parameters()
    found = torch.autograd.grad(*once, retain_graph=True)
    adopting.stop()
    expected = torch.autograd.grad(loss, list(model.parameters()))
    assert [one.tolist() for one in found] == [one.tolist() for one in expected]


class Plain(torch.optim.Adagrad):
    """A class of a script's own, which steps as torch's does."""


def test_a_closure_is_run_by_optimizers_derived_from_torchs() -> None:
    model = nn.Linear(4, 1)
    optimizer: Any = Plain(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step(lambda: model(torch.ones(2, 4)).square().mean().backward())
    assert adopting.adoption.trained


def losses_of_closures() -> list[float]:
    """Losses of steps by closures, all but the first where no gradients are noted around them."""
    model = trained()[0]
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    with torch.no_grad():
        rest = [optimizer.step(closure) for _ in range(2)]
    return [float(one) for one in (first, *rest)]


def test_a_closure_is_run_once_and_its_loss_given_back() -> None:
    face = losses_of_closures()
    assert adopting.adoption.trained
    adopting.stop()
    assert face == losses_of_closures()


class Twice(torch.optim.SGD):
    """It runs the closure more often than PyTorch's own do."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


def test_a_closure_that_may_be_run_again_is_refused() -> None:
    model = nn.Linear(4, 1)
    optimizer = Twice(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).square().mean().backward()
    with pytest.raises(ConfigError, match="Twice may run the model several times in a step"):
        optimizer.step(lambda: None)


def test_two_networks_train_by_turns() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, two)]
    before = [each.weight.clone() for each in (one, two)]
    two.zero_grad()
    two(one(torch.ones(3, 2)).detach()).mean().backward()
    optimizers[1].step()
    assert torch.equal(one.weight, before[0])
    one.zero_grad()
    two(one(torch.ones(3, 2))).mean().backward()
    after = two.weight.clone()
    optimizers[0].step()
    assert not torch.equal(one.weight, before[0])
    assert torch.equal(two.weight, after)


def test_what_belongs_to_no_engine_is_torchs() -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    weight.sum().backward(retain_graph=True)
    optimizer.step()
    assert weight.tolist() == [0.5, 0.5]
    model = nn.Linear(1, 1)
    closing = torch.optim.LBFGS(model.parameters())

    def closure() -> torch.Tensor:
        closing.zero_grad()
        loss = model(torch.ones(1, 1)).square().sum()
        loss.backward()
        return loss

    closing.step(closure)  # pyright: ignore[reportArgumentType]
    assert not adopting.adoption.trained


@pytest.mark.parametrize(
    ("model", "optimizer", "said"),
    [
        (nn.Linear, torch.optim.LBFGS, "trained by LBFGS, which computes the loss several"),
        (lambda *size: torch.jit.script(nn.Linear(*size)), torch.optim.SGD, "is a scripted module"),
    ],
)
def test_what_no_engine_trains_on_several_ranks_is_said(
    monkeypatch: pytest.MonkeyPatch, model: Any, optimizer: Any, said: str
) -> None:
    made = model(1, 1)
    _built = optimizer(made.parameters(), lr=0.1)
    monkeypatch.setattr(adopting.current, "placement", lambda *args: Placement(size=2))
    monkeypatch.setattr(adopting.adoption, "aware", True)
    with pytest.raises(ConfigError, match=said):
        made(torch.ones(1, 1))


def test_two_networks_of_one_optimizer_train_on_each_rank_if_all_have_all_batches(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    coarse, fine = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*coarse.parameters(), *fine.parameters()], lr=0.1)
    monkeypatch.setattr(adopting.current, "placement", lambda *args: Placement(size=2))
    before = fine.bias.item()
    (coarse(torch.ones(1, 1)) + fine(torch.ones(1, 1))).sum().backward()
    optimizer.step()
    assert fine.bias.item() == pytest.approx(before - 0.1)
    assert "each of 2 ranks trains by itself what it updates, without the" in caplog.text
    monkeypatch.setattr(adopting.adoption, "aware", True)
    with pytest.raises(ConfigError, match="this SGD updates no module that was called"):
        optimizer.step()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("loss(model).backward(gradient=torch.ones(2))", "takes a loss and nothing else"),
        ("with torch.autocast('cpu', torch.bfloat16): loss(model)", "in one precision"),
        ("scaler.scale(loss(model)).backward(); utils.clip_grad_norm_(model.parameters(), 1.0)",
         "before scaler.unscale_"),
        ("DDP(model).register_comm_hook", "is DDP's own"),
        ("DDP(model, process_group=object())", "process_group=…"),
    ],
)  # fmt: skip
def test_what_no_engine_does_is_refused_where_it_is_called(code: str, said: str) -> None:
    model, optimizer = trained()
    step(model, optimizer)
    optimizer.zero_grad()
    face = importlib.import_module(FACE)
    names = {
        "model": model, "optimizer": optimizer, "step": step, "torch": torch,
        "utils": face.nn.utils, "DDP": face.nn.parallel.DistributedDataParallel,
        "scaler": face.amp.GradScaler("cpu"),
        "loss": lambda model: model(torch.ones(2, 4)).square().mean(),
    }  # fmt: skip
    with pytest.raises(ConfigError, match=said):
        exec(code, names)


def test_ranks_join_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    face = importlib.import_module(FACE)
    model = face.nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    with model.join(divide_by_initial_world_size=False):
        pass
    monkeypatch.setattr(adopting.current, "placement", lambda *args: Placement(size=2))
    with pytest.raises(ConfigError, match="Use a DistributedSampler, which pads"):
        model.join()


def test_a_norm_that_is_clipped_to_can_be_read_after_the_step() -> None:
    model, optimizer = trained()
    utils = importlib.import_module(f"{FACE}.nn.utils")
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    norm = utils.clip_grad_norm_(model.parameters(), 1e-3)
    before = [one.detach().clone() for one in model.parameters()]
    optimizer.step()
    moved = [(a - b).square().sum() for a, b in zip(before, model.parameters(), strict=True)]
    assert torch.stack(moved).sum().sqrt().item() == pytest.approx(1e-4, rel=1e-3)
    assert float(norm) > 1e-3


BY_HAND = {
    "values are clipped": "utils.clip_grad_value_(model.parameters(), 0.01)",
    "by another norm": "utils.clip_grad_norm_(model.parameters(), 0.01, 1)",
    "of some": "utils.clip_grad_norm_(model[0].parameters(), 0.01)",
    "twice": "[utils.clip_grad_norm_(model.parameters(), limit) for limit in (1.0, 0.01)]",
    "values after a norm": "utils.clip_grad_norm_(model.parameters(), 0.1); "
    "utils.clip_grad_value_(model.parameters(), 0.01)",
    "scaled": "[p.grad.mul_(3.0) for p in model.parameters()]",
    "replaced": "for p in model.parameters(): p.grad = p.grad * 2 + 1",
    "data": "[p.grad.data.clamp_(-0.01, 0.01) for p in model.parameters()]",
    "without one": "model[0].weight.grad = None",
    "read": "seen.append(sum(p.grad.square().sum().item() for p in model.parameters()))",
    "read before a norm": "seen.append(model[2].weight.grad.norm().item()); "
    "seen.append(utils.clip_grad_norm_(model.parameters(), 0.1).item())",
    "read after a norm": "utils.clip_grad_norm_(model.parameters(), 0.1); "
    "seen.append(model[2].weight.grad.norm().item())",
    "a second loss": "[p.grad.mul_(0.5) for p in model.parameters()]; "
    "model(torch.eye(4)).square().mean().backward()",
    "a second loss of one graph": "out = model(torch.eye(4)); "
    "out.mean().backward(retain_graph=True); out.square().mean().backward()",
    "read after the step": "optimizer.step(); seen.append(model[2].weight.grad.norm().item()); "
    "optimizer.zero_grad(); model(torch.eye(4)).square().mean().backward()",
    "two steps": "optimizer.step(); model(torch.eye(4)).square().mean().backward()",
    "cleared by hand": "optimizer.step(); [setattr(p, 'grad', None) for p in model.parameters()]; "
    "model(torch.eye(4)).square().mean().backward()",
    "given up": "\nfor p in model.parameters(): p.grad.zero_()\noptimizer.zero_grad()\n"
    "model(torch.eye(4)).square().mean().backward()",
    "thawed": "optimizer.step(); optimizer.zero_grad(); extra.grad = None; "
    "optimizer.add_param_group({'params': [extra], 'lr': 0.5}); "
    "model(torch.eye(4)).square().mean().backward()",
}


@pytest.mark.parametrize("code", BY_HAND.values(), ids=BY_HAND)
def test_gradients_are_there_as_pytorch_has_them(code: str) -> None:
    utils = importlib.import_module(f"{FACE}.nn.utils")

    def run(utils: Any) -> list[float]:
        model: Any = trained()[0]
        rest = [p for p in model.parameters() if p is not model[2].bias]
        optimizer = torch.optim.SGD(rest, lr=0.1, momentum=0.9)
        seen: list[float] = []
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        names = {"model": model, "optimizer": optimizer, "torch": torch, "utils": utils,
                 "seen": seen, "extra": model[2].bias}  # fmt: skip
        exec(code, names)
        optimizer.step()
        return [*seen, *(x for p in model.parameters() for x in p.flatten().tolist())]

    face = run(utils)
    adopting.stop()
    assert face == pytest.approx(run(nn.utils), rel=1e-6)


def test_a_gradient_from_before_a_parameter_was_the_optimizers_is_refused() -> None:
    model: Any = trained()[0]
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ConfigError, match="have a gradient from backward passes before"):
        optimizer.add_param_group({"params": list(model[2].parameters())})
    assert len(optimizer.param_groups) == 1


# -- losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpu", "moves"), [(True, True), (False, False)])
def test_what_gloo_joins_may_compute_on_gpus_where_there_are_any(
    gpu: bool, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unipar.compat import run
    from unipar.compat.native import calls

    asked: list[Any] = []

    def join(placement: Placement, *, may_move: bool) -> Any:
        asked.append((placement.device_type, may_move))
        return types.SimpleNamespace(leave=lambda: None)

    own = run.Run()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(run, "join", join)
    monkeypatch.setattr(calls, "detect", lambda: object())
    monkeypatch.setattr(calls, "adoption", types.SimpleNamespace(note_aware=lambda: None))
    monkeypatch.setattr(calls, "current", own)
    calls.init_process_group("gloo")
    assert asked == [("cpu", moves)]
    # It is the model that decides.
    assert own.device_type({}) == ("cuda" if gpu else "cpu")
    assert own.device_type({"device": "cpu"}) == "cpu"
    own.close()


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("tcp://localhost:99999?rank=0&world_size=2", "MASTER_PORT='99999' is not a port"),
        ("tcp://localhost:port?rank=0&world_size=2", "MASTER_PORT='port' is not a port"),
        ("tcp://localhost?rank=0&world_size=2", "MASTER_PORT='localhost' is not a port"),
        ("tcp://localhost:29500?rank=first&world_size=2", "rank=first, world_size=2.*torchrun"),
        ("tcp://localhost:29500?rank=0&world_size=0", "WORLD_SIZE=0, but .* at least 1"),
    ],
)
def test_where_nobody_can_meet_is_named(
    method: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unipar.compat.native import calls

    monkeypatch.setattr(os, "environ", {**os.environ})
    with pytest.raises(ConfigError, match=said):
        calls.init_process_group("gloo", init_method=method)


def test_what_an_engine_has_joined_for_itself_the_script_has_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    face: Any = importlib.import_module("unipar.compat.torch.distributed")
    monkeypatch.setattr(os, "environ", {**os.environ})
    first = step(*trained())
    assert not face.is_initialized()
    for call in (face.get_rank, face.get_world_size):
        # torch's own, without a group.
        with pytest.raises(ValueError, match="Default process group has not been initialized"):
            call()
    at = {"init_method": "tcp://localhost:29500", "rank": 0}
    with pytest.raises(ConfigError, match=r"world_size=2.* a run of 1 already. Call it before"):
        face.init_process_group("gloo", **at, world_size=2)
    face.init_process_group("gloo", **at, world_size=1)
    assert face.is_initialized()
    assert (face.get_rank(), face.get_world_size()) == (0, 1)
    face.destroy_process_group()
    assert not face.is_initialized()
    assert step(*trained()) == first


def test_a_scaler_has_the_state_that_scripts_read() -> None:
    face: Any = importlib.import_module("unipar.compat.torch")
    scaler = face.amp.GradScaler("cpu")
    own = torch.amp.GradScaler("cpu").state_dict()
    assert scaler.state_dict() == own
    assert scaler.get_scale() == own["scale"]
    assert face.amp.GradScaler("cpu", enabled=False).state_dict() == {}


def test_a_scaler_that_no_engine_is_beside_goes_on_with_the_scale_that_it_has_saved() -> None:
    face: Any = importlib.import_module("unipar.compat.torch")
    weight = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = face.amp.GradScaler("cpu", 64.0, growth_interval=1)
    seen: list[float] = []
    weight.register_hook(lambda grad: seen.append(grad[0].item()))
    for _ in range(2):
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert seen == [64.0, 128.0]
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0]
    other = face.amp.GradScaler("cpu")
    other.load_state_dict(scaler.state_dict())
    other.scale(weight.sum()).backward()
    assert seen[2] == 256.0
    other.load_state_dict(face.amp.GradScaler("cpu").state_dict())
    assert other.state_dict() == torch.amp.GradScaler("cpu").state_dict()


def test_scalers_take_what_torchs_do() -> None:
    face: Any = importlib.import_module("unipar.compat.torch")
    assert not face.cuda.amp.GradScaler(64.0, 4.0, 0.5, 100, False).is_enabled()
    assert face.amp.GradScaler("cpu", 64.0, 4.0, 0.25).get_growth_factor() == 4.0
    from unipar.compat.native.scaling import ShardedGradScaler

    scaler = ShardedGradScaler("cpu", 64.0, 0.25, 4.0, process_group=None)
    assert scaler.get_growth_factor() == 4.0


def test_a_module_that_a_framework_has_hooked_is_not_pickled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from unipar.compat.native import calls

    model = nn.Linear(2, 2)
    calls.save(model, tmp_path / "whole.pt")
    assert (tmp_path / "whole.pt").stat().st_size
    model.register_forward_hook(lambda *_: None)
    # Without a strategy it is the script's own doing, and torch's error.
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        calls.save(model, tmp_path / "model.pt")
    named = types.SimpleNamespace(strategy=types.SimpleNamespace(name="zero2"))
    monkeypatch.setattr(calls, "current", types.SimpleNamespace(session=named, placement=Placement))
    with pytest.raises(ConfigError, match="strategy 'zero2' has hung functions on it") as refused:
        calls.save(model, tmp_path / "model.pt")
    assert "torch.save(model.state_dict(), …)" in str(refused.value)


@pytest.mark.parametrize(
    ("asked", "joined", "told"),
    [
        ("gloo", "cpu:gloo,cuda:nccl", "gloo"),
        ("nccl", "cpu:gloo,cuda:nccl", "nccl"),
        # It runs on CPUs, whatever it was written for.
        ("nccl", "gloo", "gloo"),
        (None, "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
    ],
)
def test_a_script_finds_the_backend_that_it_has_asked_for(
    asked: str | None, joined: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unipar.compat.native import calls

    monkeypatch.setattr(calls.current, "backend", asked)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group=None: joined)
    face = importlib.import_module("unipar.compat.torch.distributed")
    assert face.get_backend() == told
    assert face.get_backend(object()) == joined


@pytest.mark.parametrize(
    ("wraps", "device"),
    [
        (lambda face, model: model, "cpu"),
        # FSDP moves a model to the GPU itself.
        (lambda face, model: face.fully_shard(model), None),
        (lambda face, model: face.FullyShardedDataParallel(model, device_id=0), None),
        (
            lambda face, model: face.FullyShardedDataParallel(model, device_id=torch.device("cpu")),
            "cpu",
        ),
        (
            lambda face, model: face.fully_shard(
                model, mesh=types.SimpleNamespace(device_type="cpu", size=lambda: 1)
            ),
            "cpu",
        ),
    ],
    ids=["plain", "fully_shard", "FSDP", "FSDP on a CPU", "mesh of CPUs"],
)
def test_where_a_model_on_the_host_is_trained(
    wraps: Any, device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unipar.compat import adopting
    from unipar.compat.native import fsdp

    own = adopting.Adoption()
    own.aware = True
    asked: dict[str, Any] = {}

    class Opened(Exception):
        pass

    def opened(settings: dict[str, Any]) -> None:
        asked.update(settings)
        raise Opened

    monkeypatch.setattr(fsdp, "adoption", own)
    monkeypatch.setattr(adopting.current, "open", opened)
    model = wraps(fsdp, nn.Linear(2, 2))
    with pytest.raises(Opened):
        own._open(model)
    assert asked.get("device") == device


def test_ranks_whose_models_are_on_unlike_devices_are_refused() -> None:
    from unipar.compat import run

    own = run.Run()
    world = types.SimpleNamespace(gather=lambda kind: [kind, "cpu"])
    own._placement = Placement(size=2, local_size=2)
    with pytest.raises(ConfigError, match="that of rank 0 on cuda, that of rank 1 on cpu"):
        own._move(world, "cuda")  # pyright: ignore[reportArgumentType]
    own._move(world, "cpu")  # pyright: ignore[reportArgumentType]
    assert own._placement.device_type == "cpu"


@pytest.mark.parametrize(
    ("wraps", "said"),
    [
        (lambda fsdp, ddp, model, mesh: fsdp.fully_shard(model, mesh=mesh), "over a mesh of 3 of"),
        (lambda fsdp, ddp, model, mesh: fsdp.FullyShardedDataParallel(model, device_mesh=mesh),
         "over a mesh of 3 of"),
        (lambda fsdp, ddp, model, mesh: fsdp.fully_shard(model).set_gradient_divide_factor(1.0),
         "set_gradient_divide_factor: the engine sums gradients"),
        (lambda fsdp, ddp, model, mesh: ddp.DistributedDataParallel(model, init_sync=False),
         r"DistributedDataParallel\(init_sync=False\)"),
    ],
)  # fmt: skip
def test_what_wrappers_cannot_keep_is_refused(
    wraps: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unipar.compat import adopting
    from unipar.compat.native import fsdp, wrappers

    monkeypatch.setattr(fsdp, "adoption", adopting.Adoption())
    mesh = types.SimpleNamespace(device_type="cpu", size=lambda: 3)
    with pytest.raises(ConfigError, match=said):
        wraps(fsdp, wrappers, nn.Linear(2, 2), mesh)


@pytest.mark.parametrize("converts", ["none", "all", "a part", "another"])
def test_batch_norms_are_converted_where_the_script_does(
    converts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unipar.compat import adopting
    from unipar.compat.native import wrappers

    own = adopting.Adoption()
    monkeypatch.setattr(wrappers, "adoption", own)
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    given = {"all": model, "a part": model[0], "another": nn.BatchNorm1d(2)}.get(converts)
    if given is not None:
        assert wrappers.SyncBatchNorm.convert_sync_batchnorm(given) is given
    if converts in ("none", "all"):
        own._check_synchronized(model)
    else:
        with pytest.raises(ConfigError, match="not all of this Sequential's"):
            own._check_synchronized(model)
    own._check_synchronized(nn.Sequential(nn.Linear(2, 2)))


def test_buffers_are_broadcast_as_ddp_is_told_by_either_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from unipar.compat import adopting
    from unipar.compat.native import wrappers

    monkeypatch.setattr(wrappers, "adoption", own := adopting.Adoption())
    for name in ("broadcast_buffers", "forward_sync_buffers"):
        wrapped = wrappers.DistributedDataParallel(nn.Linear(2, 2), **{name: False})
        assert not wrapped.broadcast_buffers
        wrapped.broadcast_buffers = True
        assert wrapped.forward_sync_buffers
    # It is of one model, and no option of the run's.
    assert own.asked["strategy"] == {"name": "ddp"}


def test_generators_that_a_script_has_seeded_are_left_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from unipar.compat import common_draws

    def drawn() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), np.random.rand()

    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    seeds = torch.manual_seed, random.seed, np.random.seed
    of_seed = {}
    for seed in (1, 2, 3):
        for one in seeds:
            one(seed)
        of_seed[seed] = common_draws._states(), drawn()
    for seeded in ((), (0,), (1,), (2,), (1, 2), (0, 1, 2)):
        draws = common_draws.CommonDraws(Placement())
        (draws._own, own), (draws._given, given) = of_seed[1], of_seed[2]
        common_draws._set_states(draws._given)
        torch.manual_seed(2)
        assert drawn() == given
        for number in seeded:
            seeds[number](3)
        draws.give_back()
        found = drawn()
        assert found == tuple(
            of_seed[3][1][number] if number in seeded else own[number] for number in range(3)
        )


@pytest.mark.parametrize(
    ("wrap", "moved"),
    [
        (lambda face, model: face.DistributedDataParallel(model, device_ids=[0]), True),
        (lambda face, model: face.DistributedDataParallel(model), False),
        (lambda face, model: face.DataParallel(model), True),
    ],
    ids=["device_ids", "DDP", "DataParallel"],
)
def test_inputs_go_to_the_device_where_the_wrapper_takes_them_there(wrap: Any, moved: bool) -> None:
    from unipar.compat.native import wrappers

    class Told(nn.Linear):
        def forward(self, input: Any) -> Any:
            return input["x"].device.type

    model = wrap(wrappers, Told(2, 2, device="meta"))
    assert model({"x": torch.ones(2)}) == ("meta" if moved else "cpu")
    assert wrap(wrappers, Told(2, 2))({"x": torch.ones(2)}) == "cpu"


@pytest.mark.parametrize("half", [True, False])
def test_an_evaluation_is_under_the_autocast_that_the_script_asks_for(half: bool) -> None:
    """And training's outputs have the dtype that its autocast gives them."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        output = model(x)
    assert output.dtype is (torch.bfloat16 if half else torch.float32)
    output.float().square().mean().backward()
    optimizer.step()
    plain = nn.Linear(4, 4)
    plain.load_state_dict(model.state_dict())
    for asked in (True, False):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=asked):
            assert torch.equal(model(x), plain(x))
            assert model(x).dtype is (torch.bfloat16 if asked else torch.float32)
