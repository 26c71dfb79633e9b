"""What is left of a function that travels by value."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from unipar.errors import ConfigError
from unipar.launch import travel
from unipar.utils.torch_settings import set_torch, torch_settings


def made() -> Callable[[], Callable[[], None]]:
    def outer() -> Callable[[], None]:
        def inner() -> None:
            raise ValueError("the cause")

        return inner

    return outer


def test_tracebacks_have_the_files_and_lines_of_functions() -> None:
    """cloudpickle 3.1.3 takes them away, of functions within functions too."""
    arrived = pickle.loads(travel.dumps(made()))
    assert arrived.__code__ == made().__code__
    with pytest.raises(ValueError, match="the cause") as caught:
        arrived()()
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.line) == (__file__, 'raise ValueError("the cause")')


def with_hook(register: Callable[[Any], object]) -> nn.Module:
    last = nn.Linear(2, 2)
    register(last.weight)
    return nn.Sequential(nn.Linear(2, 2), last)


@pytest.mark.parametrize(
    "register",
    [
        lambda p: p.register_hook(lambda grad: grad * 2),
        lambda p: p.register_post_accumulate_grad_hook(lambda parameter: None),
    ],
)
def test_a_hook_on_a_gradient_does_not_stay_behind(
    register: Callable[[Any], object],
) -> None:
    model = with_hook(register)
    with pytest.raises(ConfigError, match=r"'1\.weight' of Sequential has a hook") as refused:
        travel.dumps(lambda: model)
    assert "Give a function that builds the model" in str(refused.value)
    # One that each process builds for itself has its hooks there.
    travel.dumps(lambda: with_hook(register))


def in_common(kind: str) -> nn.Module:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    if kind == "data":
        second.weight = nn.Parameter(first.weight.data)
    elif kind == "rows":
        second.register_buffer("rows", first.weight.detach()[1:])
    elif kind == "tied":
        second.weight = first.weight
    return nn.Sequential(first, second, nn.LSTM(3, 2, batch_first=True))


@pytest.mark.parametrize(
    ("kind", "pair"), [("data", "'0.weight' and '1.weight'"), ("rows", "'0.weight' and '1.rows'")]
)
def test_tensors_in_the_same_memory_do_not_part(kind: str, pair: str) -> None:
    with pytest.raises(ConfigError, match=f"{pair} of Sequential are different tensors in the"):
        travel.dumps({"model": in_common(kind)})


@pytest.mark.parametrize("kind", ["tied", ""])
def test_one_tensor_under_two_names_travels(kind: str) -> None:
    model = pickle.loads(travel.dumps(in_common(kind)))
    assert (model[0].weight is model[1].weight) == (kind == "tied")


def test_torch_is_set_as_where_the_function_is_from() -> None:
    before = torch_settings()
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = True
        torch.autograd.set_detect_anomaly(True)
        asked = torch_settings()
        assert [key for key in asked if asked[key] != before[key]] == [
            *("default_dtype", "matmul_precision", "fp32", "deterministic"),
            *("deterministic_warn_only", "cudnn_benchmark", "anomaly"),
        ]
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = False
        torch.autograd.set_detect_anomaly(False)
        set_torch(pickle.loads(pickle.dumps(asked)))
        assert torch_settings() == asked
    finally:
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
        set_torch(before)


SETTINGS_OF_FP32 = [
    "torch.backends.cudnn.allow_tf32 = False",
    "torch.backends.cuda.matmul.allow_tf32 = True",
    "torch.set_float32_matmul_precision('high')",
]
if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
    SETTINGS_OF_FP32 += [
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    ]


@pytest.fixture(scope="module")
def travelled() -> dict[str, list[dict[str, Any]]]:
    """What torch is set to before a setting, after it, and where that has travelled to."""
    # Torch does not let a process that has used one kind of name ask by the other; a forked one
    # imports nothing again.
    return json.loads(
        run_python(f"""
        import json, multiprocessing, torch
        from unipar.utils.torch_settings import set_torch, torch_settings

        def settings():
            return {{**torch_settings(), "default_dtype": None}}

        def after(setting, told):
            if told is not None:
                set_torch({{**told, "default_dtype": torch.float32}})
            exec(setting)
            return settings()

        def forked(setting, told=None):
            with multiprocessing.get_context("fork").Pool(1) as pool:
                return pool.apply(after, (setting, told))

        found = {{}}
        for setting in {SETTINGS_OF_FP32!r}:
            told = forked(setting)
            found[setting] = [forked(""), told, forked("", told)]
        print(json.dumps(found))
    """)
    )


@pytest.mark.parametrize("setting", SETTINGS_OF_FP32)
def test_how_fp32_is_computed_on_gpus_travels(
    setting: str, travelled: dict[str, list[dict[str, Any]]]
) -> None:
    before, told, there = travelled[setting]
    assert told != before
    assert there == told


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
