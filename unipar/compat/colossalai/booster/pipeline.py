"""``execute_pipeline`` where each rank has all layers: the same micro-batches, one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from unipar.compat.colossalai.booster.boosted import BoostedModel, BoostedOptimizer
from unipar.compat.colossalai.booster.plugin import HybridParallelPlugin
from unipar.compat.run import current
from unipar.data import move_to
from unipar.errors import ConfigError


def execute(
    plugin: HybridParallelPlugin,
    data_iter: Iterator[Any],
    model: BoostedModel,
    criterion: Callable[[Any, Any], torch.Tensor],
    optimizer: BoostedOptimizer | None,
    *,
    return_loss: bool,
    return_outputs: bool,
) -> dict[str, Any]:
    """Run the micro-batches of a batch forward, and backward if there is an optimizer.

    Under ``torch.no_grad()`` they are only run forward, and of the size that they had before.

    Returns:
        ``loss``, the mean over micro-batches of what ``criterion(outputs, micro_batch)`` gives, and
        ``outputs``, those of all of them behind each other; each ``None`` unless asked for.

    Raises:
        ConfigError: the batch does not fall into such micro-batches.
    """
    batch = move_to(next(data_iter), current.device())
    sizes = {one.shape[0] for one in tree_leaves(batch) if isinstance(one, torch.Tensor)}
    size = max(sizes, default=1)
    evaluates = not torch.is_grad_enabled()
    share = plugin.microbatch_size or plugin.last_microbatch_size
    if evaluates and share is not None:
        # A last batch may be smaller, and has fewer of them.
        number = _number(size, share)
    else:
        number = plugin.num_microbatches or _number(size, plugin.microbatch_size)
        share = size // number if size % number == 0 else None
    if len(sizes) > 1 or share is None:
        raise ConfigError(
            f"execute_pipeline was given tensors of {sorted(sizes)} samples, which are not "
            f"{number} micro-batches of one size. Set num_microbatches or microbatch_size to a "
            "divisor, and drop_last=True."
        )
    plugin.last_microbatch_size = share
    total, outputs = None, []
    for begin in range(0, size, share):
        micro = tree_map(lambda one, at=begin: _part(one, at, share), batch)
        output = _called(model, micro)
        loss = criterion(output, micro) / number
        if optimizer is not None and not evaluates:
            optimizer.backward(loss)
        total = loss.detach() if total is None else total + loss.detach()
        if return_outputs:
            outputs.append(tree_map(_detached, output))
    joined = _joined(outputs) if return_outputs else None
    return {"loss": total if return_loss else None, "outputs": joined}


def _number(size: int, share: int | None) -> int:
    if share is None:
        raise ConfigError(
            "execute_pipeline wants num_microbatches or microbatch_size. Pass one of them to the "
            "plugin."
        )
    return -(-size // share)


def _part(one: Any, begin: int, share: int) -> Any:
    return one[begin : begin + share] if isinstance(one, torch.Tensor) else one


def _called(model: BoostedModel, data: Any) -> Any:
    if isinstance(data, Mapping):
        return model(**data)
    return model(*data) if isinstance(data, (list, tuple)) else model(data)


def _detached(one: Any) -> Any:
    return one.detach() if isinstance(one, torch.Tensor) else one


def _joined(outputs: list[Any]) -> Any:
    """Outputs of micro-batches behind each other; numbers and single values as a list of them."""

    def join(*parts: Any) -> Any:
        if isinstance(parts[0], torch.Tensor) and parts[0].dim():
            return torch.cat(parts)
        return list(parts)

    return tree_map(join, outputs[0], *outputs[1:])
