"""How fp32 is computed on GPUs, and where loss scales lie, as far as a CPU shows it."""

from __future__ import annotations

from typing import Any

import torch

from unipar.engine import keep_scale_on_host
from unipar.utils.torch_versions import exact_products, precision_of_fp32


def test_products_convolutions_and_recurrent_layers_are_exact_within_the_block() -> None:
    before, cudnn = precision_of_fp32(), torch.backends.cudnn
    # What PyTorch has by default.
    assert cudnn.allow_tf32
    with exact_products():
        assert not cudnn.allow_tf32
        assert "tf32" not in precision_of_fp32().values()
        with cudnn.flags(enabled=True, allow_tf32=True):
            pass
    assert precision_of_fp32() == before
    assert cudnn.allow_tf32


def test_a_scale_on_the_host_is_there_whatever_the_default_device_is() -> None:
    scaler: Any = torch.amp.GradScaler("cpu")
    with torch.device("meta"):
        keep_scale_on_host(scaler)
    assert scaler._scale.is_cpu
    assert scaler.get_scale() == 2.0**16
