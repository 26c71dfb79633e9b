"""Gemini's state in canonical form: each rank describes its part of the fp32 weights and moments.

A chunk holds tensors one after the other, and a rank an equal run of each chunk's elements, so what
a rank has of a tensor is a run of the tensor's elements.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unipar.state import LocalState, named_weights
from unipar.world import World
from unipar_colossalai.divided_state import Groups, Part, Parts, PartsState


def floating(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and floating-point buffers by name, each once."""
    yield from module.named_parameters()
    yield from ((name, b) for name, b in module.named_buffers() if b.is_floating_point())


@dataclass(frozen=True)
class ChunkPart(Part):
    """This rank's part of one parameter.

    Attributes:
        chunk: the chunk of half-precision weights that it lives in.
        span: where in this rank's share of the chunk.
    """

    chunk: Any
    span: slice


class Held:
    """The fp32 values behind what Gemini computes with.

    Gemini makes its fp32 weights of the half-precision ones; here they are what the user gave. It
    also rounds frozen weights and buffers, whose originals are kept beside them.

    Args:
        module: the user's module.
        wrapper: what Colossal-AI has made of it.
        optimizer: what Colossal-AI has made of the optimizer, if there is one.
        originals: parameters and floating-point buffers as they were.

    Attributes:
        module: the user's module.
        trained: the parameters that are divided among ranks, by name.
        chunks: the chunks of half-precision weights that hold them.
        optimized: the tensors that this rank's optimizer holds, and what of the model each is.
    """

    def __init__(
        self,
        module: nn.Module,
        wrapper: Any,
        optimizer: Any,
        originals: Mapping[str, torch.Tensor],
    ) -> None:
        self.module = module
        self._manager: Any = wrapper.chunk_manager
        self.trained: dict[str, Any] = {
            name: p for name, p in module.named_parameters() if p.requires_grad
        }
        self.chunks: tuple[Any, ...] = self._manager.get_chunks(self.trained.values())
        self._exact = {name: t for name, t in originals.items() if name not in self.trained}
        for name in self.trained:
            part = self._part(name)
            part.held.copy_(originals[name].flatten()[part.start :][: part.held.numel()])
        self.optimized = self._optimized(optimizer)

    def _optimized(self, optimizer: Any) -> dict[nn.Parameter, ChunkPart]:
        if optimizer is None:
            return {}
        names = {id(p): name for name, p in self.trained.items()}
        real = optimizer.id_to_real_params
        return {
            fake: self._part(names[id(real[number])])
            for number, fake in optimizer.id_to_fake_params.items()
        }

    def _part(self, name: str) -> ChunkPart:
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
        held = chunk.paired_chunk.payload[span]
        return ChunkPart(name, tuple(parameter.shape), first - info.offset, held, chunk, span)

    def states(self) -> list[LocalState]:
        """Describe the fp32 weights and the buffers."""
        named, _ = named_weights(self.module)
        self._follow_buffers()
        return [self._weight(name, tensor) for name, tensor in named.items()]

    def _weight(self, name: str, tensor: torch.Tensor) -> LocalState:
        if name in self.trained:
            part = self._part(name)
            return part.state(name, part.held)
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


class GeminiState(PartsState):
    """Chunks of weights, and the optimizer over this rank's part of each.

    Args:
        held: the fp32 values.
        optimizer: the user's, over the parts, if there is one.
        groups: the names of the parameters of each of its groups.
        world: the joined processes.
    """

    def __init__(
        self, held: Held, optimizer: Optimizer | None, groups: Groups, world: World
    ) -> None:
        _, aliases = named_weights(held.module)
        super().__init__(optimizer, groups, aliases, world)
        self.held = held

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.held.module.parameters())

    @property
    def trained(self) -> Collection[str]:
        return self.held.trained

    def weights(self) -> list[LocalState]:
        return self.held.states()

    def parts(self) -> Parts:
        return self.held.optimized.items()

    def follow_weights(self) -> None:
        self.held.round()
