"""ZeRO's state in canonical form: each rank describes what lies in its flat partitions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from unipar.engine import (
    export_scheduler,
    flat_state,
    group_states,
    import_scheduler,
    restore_groups,
)
from unipar.errors import CheckpointError, first_few
from unipar.plain import from_json, to_json
from unipar.state import EngineState, LocalState, StateSource, TensorState, named_weights
from unipar_deepspeed.layout import Share, flats, is_stage_3, part, shares
from unipar_deepspeed.swapped import SwappedWeight, Swapping, is_in_file

Groups = list[tuple[str, ...]]


def export_state(
    module: nn.Module,
    zero: Any,
    swapping: Swapping,
    groups: Groups,
    scheduler: LRScheduler | None,
    rank: int,
) -> EngineState:
    """Describe weights, optimizer and scheduler; nothing is gathered."""
    weights, aliases = named_weights(module)
    state = EngineState(
        [_weight(name, tensor, rank) for name, tensor in weights.items()], aliases=aliases
    )
    moments: list[TensorState] = []
    scalars: dict[str, dict[str, Any]] = {}
    for name, share, flat in _named_shares(module, zero, rank):
        for key, value in zero.optimizer.state.get(flat, {}).items():
            full = f"{name}.{key}"
            if isinstance(value, torch.Tensor) and value.ndim and swapping.is_away(share.flat):
                moments.append(swapping.state(full, key, share, value.dtype))
            elif isinstance(value, torch.Tensor) and value.ndim:
                moments.append(share.state(full, value))
            elif isinstance(value, torch.Tensor):
                moments.append(LocalState.of(full, value))
            elif value is not None:
                scalars.setdefault(name, {})[key] = to_json(value, f"optimizer state '{full}'")
    state.optimizer = moments
    state.groups = group_states(groups, zero.optimizer)
    state.extra["scalars"] = scalars
    export_scheduler(scheduler, state)
    return state


def import_weights(
    source: StateSource, module: nn.Module, zero: Any, swapping: Swapping, rank: int
) -> None:
    """Fill the weights, and the partitions that the optimizer updates. Collective."""
    weights, _ = named_weights(module)
    if not is_stage_3(zero):
        source.fill_weights([LocalState.of(name, tensor) for name, tensor in weights.items()])
        zero.refresh_fp32_params()
        return
    whole = zero.persistent_parameters
    if whole:
        whole[0].partition(whole)
    source.fill_weights([_weight(name, tensor, rank) for name, tensor in weights.items()])
    with torch.no_grad():
        for number, used in enumerate(zero.fp16_partitioned_groups_flat):
            away = swapping.is_away(number)
            updated = swapping.bring(number, change=True) if away else flats(zero)[number]
            if used is None:
                zero._swap_in_sub_group_to_flat_buffer(updated, number)
            else:
                updated.copy_(used)
    swapping.settle()
    if whole:
        whole[0].all_gather(whole)


def import_optimizer(
    source: StateSource,
    module: nn.Module,
    zero: Any,
    swapping: Swapping,
    groups: Groups,
    scheduler: LRScheduler | None,
    rank: int,
) -> None:
    """Make the optimizer's state as it is stored, and fill it. Collective."""
    known = {name for name, _, _ in _named_shares(module, zero, rank)}
    strangers = sorted(set(source.optimizer) - known)
    if strangers:
        raise CheckpointError(
            f"the checkpoint holds optimizer state of {len(strangers)} parameters that this model "
            f"does not train: {first_few(strangers, 8)}."
        )
    counters: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    states: list[TensorState] = []
    partitions = flats(zero)
    for number, flat in enumerate(partitions):
        if swapping.is_away(number):
            swapping.forget(number)
        else:
            zero.optimizer.state.pop(flat, None)
    for name, share, flat in _named_shares(module, zero, rank):
        for key, info in source.optimizer.get(name, {}).items():
            full = f"{name}.{key}"
            if info.shape == ():
                counter = torch.zeros((), dtype=info.dtype)
                counters.setdefault((share.flat, key), {})[name] = counter
                states.append(LocalState.of(full, counter))
            elif info.shape == share.shape:
                held, away = zero.optimizer.state[flat], swapping.is_away(share.flat)
                if key not in held:
                    like = swapping.bring(share.flat, change=True) if away else flat
                    held[key] = torch.zeros_like(like, dtype=info.dtype, requires_grad=False)
                states.append(
                    swapping.state(full, key, share, info.dtype)
                    if away
                    else share.state(full, held[key])
                )
            else:
                raise CheckpointError(
                    f"optimizer state '{full}' has shape {info.shape} and its parameter has "
                    f"{share.shape}: ZeRO lays state out as it does parameters. Resume under a "
                    "strategy that keeps the optimizer whole."
                )
    source.fill_optimizer(states)
    swapping.settle()
    for (number, key), by_name in counters.items():
        zero.optimizer.state[partitions[number]][key] = _agreed(key, by_name)
    for name, _, flat in _named_shares(module, zero, rank):
        for key, value in source.extra.get("scalars", {}).get(name, {}).items():
            zero.optimizer.state[flat][key] = from_json(value)
    restore_groups(source.groups, groups, zero.optimizer)
    import_scheduler(scheduler, source)


def _agreed(key: str, by_name: dict[str, torch.Tensor]) -> torch.Tensor:
    """One counter for all parameters of a partition, which have one in common under ZeRO."""
    first = next(iter(by_name.values()))
    others = [name for name, value in by_name.items() if not torch.equal(value, first)]
    if others:
        raise CheckpointError(
            f"the optimizer's '{key}' is {first.item():g} for '{next(iter(by_name))}' and "
            f"{by_name[others[0]].item():g} for '{others[0]}', and ZeRO counts once for all "
            "parameters of a group. Put them in groups of their own, or resume under ddp or fsdp."
        )
    return first


def _named_shares(
    module: nn.Module, zero: Any, rank: int
) -> Iterator[tuple[str, Share, torch.Tensor]]:
    names = {id(p): name for name, p in module.named_parameters()}
    partitions = flats(zero)
    for share in shares(zero, rank):
        yield names[id(share.parameter)], share, partitions[share.flat]


def _weight(name: str, tensor: Any, rank: int) -> TensorState:
    if not hasattr(tensor, "ds_tensor"):
        return LocalState.of(name, tensor)
    if is_in_file(tensor):
        return SwappedWeight.of(name, tensor, rank)
    held = tensor.ds_tensor.detach().view(-1)
    start, stop = part(tensor, rank, held.numel())
    return flat_state(name, tuple(tensor.ds_shape), start, held[: stop - start])
