"""What a loss function may return."""

from __future__ import annotations

import pytest
import torch

from unipar.errors import ConfigError
from unipar.loss import LossSum, check_loss


def test_a_sum_is_checked_by_its_total():
    with pytest.raises(ConfigError, match=r"shape \(3,\), and must be a scalar"):
        check_loss(LossSum(torch.zeros(3), 3), training=False)
    with pytest.raises(ConfigError, match="does not require grad"):
        check_loss(LossSum(torch.zeros(()), 3), training=True)
    check_loss(LossSum(torch.zeros(()), 3), training=False)


def test_a_complex_loss_is_refused():
    with pytest.raises(ConfigError, match=r"the loss is of torch.complex64, and must be a real"):
        check_loss(torch.ones((), dtype=torch.complex64, requires_grad=True), training=True)
