"""ZeRO's state in canonical form: each rank describes what lies in its flat partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from unipar.engine import flat_state, group_states, restore_groups
from unipar.errors import CheckpointError, first_few
from unipar.state import EngineState, LocalState, StateSource, TensorState, named_weights
from unipar.utils.json_state import from_json, to_json
from unipar.world import World
from unipar_deepspeed.engine import Initialized
from unipar_deepspeed.layout import Share, flats, is_stage_3, part, shares
from unipar_deepspeed.swapped import SwappedWeight, Swapping, is_in_file
from unipar_deepspeed.tensor_parallel import LayerParts


class ZeROState:
    """Of a module and an optimizer that ZeRO has divided.

    Args:
        module: the user's module.
        deepspeed: has DeepSpeed's optimizer.
        swapping: brings what is in files.
        groups: the names of the parameters of each of the optimizer's groups, in whose place ZeRO
            puts its flat partitions.
        world: the joined processes.
        parts: how ranks divide layers; ``None`` where they have whole ones.
        take_over: has DeepSpeed take over what was done to weights by hand.
    """

    def __init__(
        self,
        module: nn.Module,
        deepspeed: Initialized,
        swapping: Swapping,
        groups: Sequence[tuple[str, ...]],
        world: World,
        parts: LayerParts | None,
        take_over: Callable[[], None],
    ) -> None:
        self._module, self._deepspeed, self._swapping = module, deepspeed, swapping
        self._groups, self._rank = groups, world.layout.coordinate("batch", world.rank)
        self._parts, self._take_over = parts, take_over

    @property
    def num_parameters(self) -> int:
        if self._parts is not None:
            return self._parts.num_parameters
        # Stage 3 leaves nothing of a parameter in the module but what it was.
        return sum(getattr(p, "ds_numel", p.numel()) for p in self._module.parameters())

    def export_state(self) -> EngineState:
        zero, swapping = self._deepspeed.zero, self._swapping
        self._take_over()
        weights, aliases = named_weights(self._module)
        state = EngineState(
            [self._placed(name, _weight(name, t, self._rank)) for name, t in weights.items()],
            aliases=aliases,
        )
        moments: list[TensorState] = []
        scalars: dict[str, dict[str, Any]] = {}
        for name, share, flat in self._named_shares():
            for key, value in zero.optimizer.state.get(flat, {}).items():
                full = f"{name}.{key}"
                if isinstance(value, torch.Tensor) and value.ndim and swapping.is_away(share.flat):
                    moments.append(swapping.state(full, key, share, value.dtype))
                elif isinstance(value, torch.Tensor) and value.ndim:
                    moments.append(self._placed(name, share.state(full, value)))
                elif isinstance(value, torch.Tensor):
                    moments.append(LocalState.of(full, value))
                elif value is not None:
                    scalars.setdefault(name, {})[key] = to_json(value, f"optimizer state '{full}'")
        state.optimizer = moments
        state.groups = group_states(self._groups, zero.optimizer)
        state.extra["scalars"] = scalars
        return state

    def import_weights(self, source: StateSource) -> None:
        """Fill the weights, and the partitions that the optimizer updates. Collective."""
        zero, swapping = self._deepspeed.zero, self._swapping
        weights, _ = named_weights(self._module)
        if not is_stage_3(zero):
            source.fill_weights(
                [self._placed(name, LocalState.of(name, t)) for name, t in weights.items()]
            )
            zero.refresh_fp32_params()
            return
        whole = zero.persistent_parameters
        if whole:
            whole[0].partition(whole)
        source.fill_weights(
            [self._placed(name, _weight(name, t, self._rank)) for name, t in weights.items()]
        )
        with torch.no_grad():
            for number, used in enumerate(zero.fp16_partitioned_groups_flat):
                away = swapping.is_away(number)
                updated = swapping.bring(number, change=True) if away else flats(zero)[number]
                if used is None:
                    # DeepSpeed 0.19.8, zero/stage3.py.
                    zero._swap_in_sub_group_to_flat_buffer(updated, number)
                else:
                    updated.copy_(used)
        swapping.settle()
        if whole:
            whole[0].all_gather(whole)

    def import_optimizer(self, source: StateSource) -> None:
        """Make the optimizer's state as it is stored, and fill it. Collective."""
        zero, swapping = self._deepspeed.zero, self._swapping
        self._refuse_strangers(source)
        counters: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
        states: list[TensorState] = []
        partitions = flats(zero)
        for number, flat in enumerate(partitions):
            if swapping.is_away(number):
                swapping.forget(number)
            else:
                zero.optimizer.state.pop(flat, None)
        for name, share, flat in self._named_shares():
            for key, info in source.optimizer.get(name, {}).items():
                full = f"{name}.{key}"
                if info.shape == ():
                    counter = torch.zeros((), dtype=info.dtype)
                    counters.setdefault((share.flat, key), {})[name] = counter
                    states.append(LocalState.of(full, counter))
                elif info.shape == self._shape(name, share):
                    held, away = zero.optimizer.state[flat], swapping.is_away(share.flat)
                    if key not in held:
                        like = swapping.bring(share.flat, change=True) if away else flat
                        held[key] = torch.zeros_like(like, dtype=info.dtype, requires_grad=False)
                    states.append(
                        swapping.state(full, key, share, info.dtype)
                        if away
                        else self._placed(name, share.state(full, held[key]))
                    )
                else:
                    raise CheckpointError(
                        f"optimizer state '{full}' has shape {info.shape} and its parameter has "
                        f"{self._shape(name, share)}: ZeRO lays state out as it does parameters. "
                        "Resume under a strategy that keeps the optimizer whole."
                    )
        source.fill_optimizer(states)
        swapping.settle()
        for (number, key), by_name in counters.items():
            zero.optimizer.state[partitions[number]][key] = _agreed(key, by_name)
        for name, _, flat in self._named_shares():
            for key, value in source.extra.get("scalars", {}).get(name, {}).items():
                zero.optimizer.state[flat][key] = from_json(value)
        restore_groups(source.groups, self._groups, zero.optimizer)

    def _placed(self, name: str, state: TensorState) -> TensorState:
        """What is a state of this rank's part of a parameter, as one of the user's parameter."""
        return state if self._parts is None else self._parts.place(name, state)

    def _shape(self, name: str, share: Share) -> tuple[int, ...]:
        return share.shape if self._parts is None else self._parts.shapes[name]

    def _refuse_strangers(self, source: StateSource) -> None:
        known = {name for name, _, _ in self._named_shares()}
        strangers = sorted(set(source.optimizer) - known)
        if strangers:
            raise CheckpointError(
                f"the checkpoint holds optimizer state of {len(strangers)} parameters that this "
                f"model does not train: {first_few(strangers, 8)}."
            )

    def _named_shares(self) -> Iterator[tuple[str, Share, torch.Tensor]]:
        zero = self._deepspeed.zero
        names = {id(p): name for name, p in self._module.named_parameters()}
        partitions = flats(zero)
        for share in shares(zero, self._rank):
            yield names[id(share.parameter)], share, partitions[share.flat]


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


def _weight(name: str, tensor: Any, rank: int) -> TensorState:
    if not hasattr(tensor, "ds_tensor"):
        return LocalState.of(name, tensor)
    if is_in_file(tensor):
        return SwappedWeight.of(name, tensor, rank)
    held = tensor.ds_tensor.detach().view(-1)
    start, stop = part(tensor, rank, held.numel())
    return flat_state(name, tuple(tensor.ds_shape), start, held[: stop - start])
