"""Gemini's state in canonical form: each rank describes its part of the fp32 weights and moments.

A chunk holds tensors one after the other, and a rank an equal run of each chunk's elements, so what
a rank has of a tensor is a run of the tensor's elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unipar.engine import (
    export_scheduler,
    flat_state,
    group_states,
    import_scheduler,
    restore_groups,
)
from unipar.errors import CheckpointError
from unipar.plain import from_json, to_json
from unipar.state import EngineState, LocalState, StateSource, TensorInfo, named_weights
from unipar.world import World

Groups = list[tuple[str, ...]]


def floating(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and floating-point buffers by name, each once."""
    yield from module.named_parameters()
    yield from ((name, b) for name, b in module.named_buffers() if b.is_floating_point())


@dataclass(frozen=True)
class Part:
    """What this rank's optimizer updates of one parameter.

    Attributes:
        name: the parameter's.
        shape: the whole parameter's.
        start: its first element that is held here.
        chunk: the chunk of half-precision weights that it lives in.
        span: where in this rank's share of the chunk.
        master: the fp32 weights.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    chunk: Any
    span: slice
    master: torch.Tensor


Parts = Mapping[nn.Parameter, Part]


class Held:
    """The fp32 values behind what Gemini computes with.

    Gemini makes its fp32 weights of the half-precision ones; here they are what the user gave. It
    also rounds frozen weights and buffers, whose originals are kept beside them.

    Attributes:
        module: the user's module.
        trained: the parameters that are divided among ranks, by name.
        chunks: the chunks of half-precision weights that hold them.
    """

    def __init__(
        self, module: nn.Module, gemini: Any, originals: Mapping[str, torch.Tensor]
    ) -> None:
        self.module = module
        self._manager: Any = gemini.chunk_manager
        self.trained: dict[str, Any] = {
            name: p for name, p in module.named_parameters() if p.requires_grad
        }
        self.chunks: tuple[Any, ...] = self._manager.get_chunks(self.trained.values())
        self._exact = {name: t for name, t in originals.items() if name not in self.trained}
        for name in self.trained:
            part = self._part(name)
            part.master.copy_(originals[name].flatten()[part.start :][: part.master.numel()])

    def parts(self, gemini_optimizer: Any) -> dict[nn.Parameter, Part]:
        """The tensors that this rank's optimizer holds, and what of the model each of them is."""
        if gemini_optimizer is None:
            return {}
        names = {id(p): name for name, p in self.trained.items()}
        real = gemini_optimizer.id_to_real_params
        return {
            fake: self._part(names[id(real[number])])
            for number, fake in gemini_optimizer.id_to_fake_params.items()
        }

    def _part(self, name: str) -> Part:
        parameter = self.trained[name]
        chunk = self._manager.get_chunk(parameter)
        info = chunk.tensors_info[parameter]
        # Colossal-AI's sizes are NumPy's, which JSON does not know.
        begin, end = int(chunk.shard_begin), int(chunk.shard_end)
        first = min(max(info.offset, begin), info.end)
        last = max(min(info.end, end), first)
        span = slice(first - begin, last - begin)
        if first == last:
            span = slice(0, 0)
        master = chunk.paired_chunk.payload[span]
        return Part(name, tuple(parameter.shape), first - info.offset, chunk, span, master)

    def weights(self) -> tuple[list[LocalState], dict[str, str]]:
        """Describe the fp32 weights and the buffers, and name what is tied."""
        named, aliases = named_weights(self.module)
        self._follow_buffers()
        states = [self._weight(name, tensor) for name, tensor in named.items()]
        return states, aliases

    def _weight(self, name: str, tensor: torch.Tensor) -> LocalState:
        if name in self.trained:
            part = self._part(name)
            return flat_state(name, part.shape, part.start, part.master)
        return LocalState.of(name, self._exact.get(name, tensor))

    def _follow_buffers(self) -> None:
        for name, buffer in self.module.named_buffers():
            exact = self._exact.get(name)
            if exact is not None and not torch.equal(exact.to(buffer.dtype), buffer):
                exact.copy_(buffer)

    def round(self) -> None:
        """Make what computes of the fp32 values."""
        for chunk in self.chunks:
            chunk.optim_update()
        with torch.no_grad():
            for name, tensor in floating(self.module):
                if name in self._exact:
                    tensor.copy_(self._exact[name])


def export_state(
    held: Held,
    parts: Parts,
    optimizer: Optimizer | None,
    groups: Groups,
    scheduler: LRScheduler | None,
    world: World,
) -> EngineState:
    """Describe weights, optimizer and scheduler; no tensor is gathered. Collective."""
    weights, aliases = held.weights()
    exported = EngineState(weights, aliases=aliases)
    if optimizer is not None:
        own: dict[str, LocalState] = {}
        scalars: dict[str, dict[str, Any]] = {}
        for fake, part in parts.items():
            for key, value in optimizer.state.get(fake, {}).items():
                full = f"{part.name}.{key}"
                if isinstance(value, torch.Tensor) and value.ndim:
                    own[full] = flat_state(full, part.shape, part.start, value)
                elif isinstance(value, torch.Tensor):
                    own[full] = LocalState.of(full, value)
                elif value is not None:
                    where = f"optimizer state '{full}'"
                    scalars.setdefault(part.name, {})[key] = to_json(value, where)
        listed: dict[str, TensorInfo] = {}
        known = [(state.name, state.shape, state.dtype) for state in own.values()]
        for infos, more in world.gather((known, scalars)):
            listed.update({name: TensorInfo(shape, dtype) for name, shape, dtype in infos})
            scalars.update(more)
        exported.optimizer = [
            own.get(name) or LocalState.absent(name, *listed[name]) for name in sorted(listed)
        ]
        exported.groups = group_states(groups, optimizer)
        exported.extra["scalars"] = scalars
    export_scheduler(scheduler, exported)
    return exported


def import_weights(source: StateSource, held: Held) -> None:
    """Fill the fp32 weights, and round them to what computes. Collective."""
    states, _ = held.weights()
    source.fill_weights(states)
    held.round()


def import_optimizer(
    source: StateSource,
    held: Held,
    parts: Parts,
    optimizer: Optimizer,
    groups: Groups,
    scheduler: LRScheduler | None,
) -> None:
    """Make this rank's part of the optimizer's state as it is stored, and fill it. Collective."""
    strangers = sorted(set(source.optimizer) - set(held.trained))
    if strangers:
        raise CheckpointError(
            f"the checkpoint holds optimizer state of {len(strangers)} parameters that this model "
            f"does not train: {', '.join(strangers[:8])}{', …' if len(strangers) > 8 else ''}."
        )
    states: list[LocalState] = []
    for fake, part in parts.items():
        values: dict[str, Any] = {
            key: from_json(value)
            for key, value in source.extra.get("scalars", {}).get(part.name, {}).items()
        }
        for key, info in source.optimizer.get(part.name, {}).items():
            full = f"{part.name}.{key}"
            if info.shape == () and (key == "step" or part.shape):
                values[key] = torch.zeros((), dtype=info.dtype)
                states.append(LocalState.of(full, values[key]))
            elif info.shape == part.shape:
                values[key] = torch.zeros_like(part.master, dtype=info.dtype)
                states.append(flat_state(full, part.shape, part.start, values[key]))
            else:
                raise CheckpointError(
                    f"optimizer state '{full}' has shape {info.shape} and its parameter has "
                    f"{part.shape}: Gemini divides state as it does parameters. Resume under a "
                    "strategy that keeps the optimizer whole."
                )
        optimizer.state.pop(fake, None)
        if values:
            optimizer.state[fake] = values
    source.fill_optimizer(states)
    restore_groups(source.groups, groups, optimizer)
    import_scheduler(scheduler, source)
