"""Recurrent layers one by one, with the dropout between them seen.

Their kernels drop elements where nobody sees it. On a CPU they are the same operations: a layer of
``torch.nn`` after another (torch 2.13, ATen/native/RNN.cpp, ``apply_layer_stack``).
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import _VF, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

KINDS = (nn.RNN, nn.LSTM, nn.GRU)


def drops_within(module: nn.RNNBase, x: Any) -> bool:
    """Whether a call of a layer drops elements, and can be done layer by layer."""
    return (
        module.training
        and module.dropout > 0
        and module.num_layers > 1
        and not isinstance(x, PackedSequence)
        and x.dim() == 3
        and x.device.type == "cpu"
    )


def by_layers(module: Any, x: torch.Tensor, hx: Any = None) -> tuple[torch.Tensor, Any]:
    """What a layer's own ``forward`` gives, of batches that are not packed.

    Args:
        module: an ``nn.RNN``, ``nn.LSTM`` or ``nn.GRU``.
        x: of shape (length, samples, features), or with ``batch_first`` (samples, length,
            features).
        hx: the state before it; for an LSTM two.
    """
    is_lstm, directions = module.mode == "LSTM", 1 + module.bidirectional
    if hx is None:
        samples = x.size(0 if module.batch_first else 1)
        sizes = [module.proj_size or module.hidden_size, module.hidden_size][: 1 + is_lstm]
        begun = [x.new_zeros(module.num_layers * directions, samples, size) for size in sizes]
    else:
        module.check_forward_args(x, hx, None)
        begun = list(hx) if is_lstm else [hx]
    weights = module._flat_weights
    each = len(weights) // module.num_layers
    states: list[list[torch.Tensor]] = []
    for layer in range(module.num_layers):
        if layer:
            x = functional.dropout(x, module.dropout, training=True)
        own = [one[layer * directions : (layer + 1) * directions] for one in begun]
        x, *state = getattr(_VF, module.mode.lower())(
            x, own if is_lstm else own[0], weights[layer * each : (layer + 1) * each], module.bias,
            1, 0.0, module.training, module.bidirectional, module.batch_first,
        )  # fmt: skip
        states.append(state)
    ended = [torch.cat(list(one)) for one in itertools.zip_longest(*states)]
    return x, tuple(ended) if is_lstm else ended[0]
