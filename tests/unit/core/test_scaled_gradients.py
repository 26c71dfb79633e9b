"""Gradients that are scaled in place, one by one or in the buffer that they are views of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from unipar.engine import OptimizerStepper, PrecisionPolicy, scale_gradients
from unipar.utils.host_copy import HostCopy


def weights(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size)) for size in sizes]


def views_of(buffer: torch.Tensor, parameters: list[nn.Parameter]) -> None:
    begin = 0
    with torch.no_grad():
        for one in parameters:
            one.grad = buffer[begin : begin + one.numel()]
            begin += one.numel()


def test_views_that_make_the_whole_of_a_buffer_are_scaled_once() -> None:
    parameters, buffer = weights(2, 3, 1), torch.arange(6.0)
    views_of(buffer, parameters)
    scale_gradients(parameters, 0.5)
    assert buffer.tolist() == [0, 0.5, 1, 1.5, 2, 2.5]
    assert [one.grad.tolist() for one in parameters if one.grad is not None] == [
        [0, 0.5], [1, 1.5, 2], [2.5],
    ]  # fmt: skip
    # One change, which each of the views tells of.
    assert buffer._version == 1


def test_what_else_is_in_a_buffer_stays() -> None:
    parameters, buffer = weights(2, 3), torch.arange(6.0)
    views_of(buffer, parameters)
    scale_gradients(parameters, 2.0)
    assert buffer.tolist() == [0, 2, 4, 6, 8, 5]


def test_gradients_that_overlap_are_scaled_as_often_as_they_are_there() -> None:
    parameters, buffer = weights(2, 2), torch.ones(4)
    with torch.no_grad():
        for one in parameters:
            one.grad = buffer[1:3]
    scale_gradients(parameters, 3.0)
    assert buffer.tolist() == [1, 9, 9, 1]


def test_sparse_and_missing_gradients() -> None:
    parameters = weights(3, 2, 2)
    parameters[0].grad = torch.tensor([0.0, 2.0, 4.0]).to_sparse()
    parameters[1].grad = torch.ones(2)
    scale_gradients(parameters, 0.5)
    assert parameters[0].grad.to_dense().tolist() == [0, 1, 2]
    assert parameters[1].grad.tolist() == [0.5, 0.5]
    assert parameters[2].grad is None


class Passes(TorchDispatchMode):
    """Counts operations that multiply gradients."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "mul_" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("max_norm", [0.5, 100.0, float("inf")])
def test_a_gradient_is_divided_and_clipped_in_one_pass(max_norm: float) -> None:
    own, plain = weights(3, 2), weights(3, 2)
    for one in (*own, *plain):
        one.grad = torch.arange(1.0, one.numel() + 1)
    stepper = OptimizerStepper(
        torch.optim.SGD(own, lr=1.0), PrecisionPolicy("fp32", torch.device("cpu")), own
    )
    with Passes() as passes:
        update = stepper.step(3.0, max_norm, careful=False)
    assert passes.count == 1
    for one in plain:
        assert one.grad is not None
        one.grad /= 3.0
    expected = nn.utils.clip_grad_norm_(plain, max_norm)
    assert isinstance(update.norm, HostCopy)
    assert float(update.norm.read()) == pytest.approx(expected.item())
    for one, other in zip(own, plain, strict=True):
        assert other.grad is not None
        torch.testing.assert_close(one.detach(), -other.grad)
