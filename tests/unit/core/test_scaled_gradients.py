"""Gradients that are scaled in place, one by one or in the buffer that they are views of."""

from __future__ import annotations

import torch
from torch import nn

from unipar.engine import scale_gradients


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
