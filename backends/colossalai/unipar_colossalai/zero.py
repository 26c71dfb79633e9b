"""ZeRO-1 and ZeRO-2: each rank updates its part of every parameter, and ranks exchange the parts.

The parts are fp32. Half precision is autocast's: Colossal-AI's own would round the weights too, and
keep their fp32 originals out of its checkpoints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from unipar.engine import (
    OptimizerStepper,
    PrecisionPolicy,
    Reducer,
    build_optimizer,
    group_names,
    scale_gradients,
)
from unipar.errors import ConfigError, first_few
from unipar.state import LocalState, named_weights
from unipar.world import World
from unipar_colossalai.boosted import Boosted
from unipar_colossalai.checks import check_optimizer, check_parameters
from unipar_colossalai.divided_state import Groups, Part, PartsState
from unipar_colossalai.engine import BoosterEngine, Start
from unipar_colossalai.scaling import part_precision, total_norm_of_parts

Norm = Callable[[Sequence[torch.Tensor]], torch.Tensor]


def prepare(start: Start) -> BoosterEngine:
    """Divide the optimizer among ranks, or the gradients too, as the plugin says."""
    spec, world, module = start.spec, start.world, start.module
    check_parameters(module)
    start.send_weights()
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()
    optimizer = build_optimizer(spec, module)
    if optimizer is None:
        wrapper, _ = start.boost(None)
        return BoosterEngine(
            start, wrapper, None, None, model=Boosted(module, wrapper), undo=start.undo
        )
    check_optimizer(module, optimizer)
    # Before its groups hold parts of parameters.
    groups = group_names(module, optimizer)
    wrapper, zero = start.boost(optimizer)
    reducer = ZeROReducer(module, world, zero, partial=start.booster.plugin.stage == 2)
    precision = part_precision(spec, world)
    return BoosterEngine(
        start,
        wrapper,
        optimizer,
        zero,
        model=Boosted(module, wrapper),
        reducer=reducer,
        precision=precision,
        stepper=ZeROStepper(reducer, precision),
        state=ZeROState(module, zero, groups, world),
        undo=start.undo,
    )


class ZeROReducer(Reducer):
    """Averages gradients in buckets after a backward pass, or in ZeRO-2 while it runs.

    Args:
        module: the user's module.
        world: the joined processes.
        zero: Colossal-AI's optimizer.
        partial: whether ranks keep parts of gradients (ZeRO-2).

    Attributes:
        zero: Colossal-AI's optimizer.
        masters: this rank's fp32 part of each parameter, which is clipped, unscaled and stepped.
    """

    hides_gradients = True

    def __init__(self, module: nn.Module, world: World, zero: Any, *, partial: bool) -> None:
        super().__init__(module, world)
        self.zero, self._partial = zero, partial
        self.masters: list[torch.Tensor] = [p for g in zero.param_groups for p in g["params"]]
        self._reduces_now, self._probing = True, False
        # Backward passes of other engines may go through this model; its hooks reduce in its own.
        zero.require_grad_sync = False
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._without: set[nn.Parameter] = set()
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._without.discard) for p in self._trained
        ]

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        # ZeRO-2 keeps no whole gradient, so that it reduces each micro-batch's.
        self._reduces_now = last or self._partial
        try:
            yield
        finally:
            self._reduces_now = True

    @contextlib.contextmanager
    def probing(self) -> Iterator[None]:
        self._probing = True
        try:
            yield
        finally:
            self._probing = False

    @contextlib.contextmanager
    def synchronizing(self) -> Iterator[None]:
        """Let Colossal-AI reduce gradients, and exchange what it has updated."""
        self.zero.require_grad_sync = True
        try:
            yield
        finally:
            self.zero.require_grad_sync = False

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        # Its own `backward` would reduce at once, with no moment to look at what there is
        # (Colossal-AI 0.5.0, zero/low_level/low_level_optim.py).
        zero = self.zero
        if self._probing:
            super().backward(loss, last=last)
            return
        self._without.update(self._trained)
        if self._reduces_now and self._partial:
            # Its hooks fill buckets in the pass, and reduce those that are full.
            with self.synchronizing():
                loss.backward()
                self._check_all_have_gradients()
                zero._reduce_grad(self._partial)
            return
        with zero.no_sync():
            zero.backward(loss)
        if self._reduces_now:
            self._check_all_have_gradients()
            zero._reduce_grad(self._partial)

    def _check_all_have_gradients(self) -> None:
        """Colossal-AI pairs ranks' buckets by their order: one gradient less, and all are wrong."""
        if not self._without:
            return
        names = [name for name, p in self.module.named_parameters() if p in self._without]
        raise ConfigError(
            f"colossalai: the loss does not depend on {len(names)} of the parameters to train: "
            f"{first_few(names, 8)}. ZeRO needs a gradient of "
            "each in every backward pass. Freeze them with requires_grad_(False), or use "
            "plugin='ddp' with find_unused_parameters=true."
        )

    def finish(self) -> None:
        zero = self.zero
        for master in self.masters:
            working = zero.master_to_working_param[id(master)]
            # The tensor that `zero.step()` will take: what is done to it here, is done there.
            master.grad = zero.get_working_grad_by_param_id(id(working))
        # Colossal-AI can only average.
        scale_gradients(self.masters, self.world.layout.batch)

    def clear(self) -> None:
        super().clear()
        self.zero.zero_grad()
        for master in self.masters:
            master.grad = None

    def close(self) -> None:
        for handle in [*self._hooks, *self.zero.grad_handles]:
            handle.remove()


class ZeROStepper(OptimizerStepper):
    """Steps each rank's parts, and has ranks exchange them.

    Args:
        reducer: whose parts.
        precision: what unscales and steps them.
        norm: of the whole gradient.
    """

    def __init__(
        self, reducer: ZeROReducer, precision: PrecisionPolicy, norm: Norm = total_norm_of_parts
    ) -> None:
        super().__init__(reducer.zero, precision, reducer.masters, norm)
        self.reducer = reducer

    def update(self) -> bool:
        self._take_over_weights()
        with self.reducer.synchronizing():
            return super().update()

    def _take_over_weights(self) -> None:
        """Have what was done to weights by hand since the last step, such as clamping them.

        Else they would be what this rank's fp32 parts say, which are equal if nothing was done.
        """
        zero, world = self.reducer.zero, self.reducer.world
        rank = world.layout.coordinate("batch", world.rank)
        own, given = [], []
        for master in self.reducer.masters:
            working = zero.master_to_working_param[id(master)].detach().view(-1)
            if master.device == working.device:
                share = working[rank * master.numel() :][: master.numel()]
                own.append(master.detach()[: share.numel()])
                given.append(share)
        if own:
            torch._foreach_copy_(own, given)  # pyright: ignore[reportPrivateImportUsage]


class ZeROState(PartsState):
    """Whole weights, and an optimizer over equal parts of each parameter that is trained.

    Args:
        module: the user's module.
        zero: Colossal-AI's optimizer.
        groups: the names of the parameters of each of its groups.
        world: the joined processes.
    """

    def __init__(self, module: nn.Module, zero: Any, groups: Groups, world: World) -> None:
        _, aliases = named_weights(module)
        super().__init__(zero.optim, groups, aliases, world)
        self.module, self.zero = module, zero

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def trained(self) -> Collection[str]:
        return [part.name for _, part in self.parts()]

    def weights(self) -> list[LocalState]:
        weights, _ = named_weights(self.module)
        return [LocalState.of(*named) for named in weights.items()]

    def follow_weights(self) -> None:
        with torch.no_grad():
            self.zero.update_master_params(self.module)

    def parts(self) -> Iterator[tuple[torch.Tensor, Part]]:
        masters = self.zero.get_working_to_master_map()
        for name, parameter in self.module.named_parameters():
            if id(parameter) in masters:
                master = masters[id(parameter)]
                start = min(self.world.rank * master.numel(), parameter.numel())
                yield master, Part(name, tuple(parameter.shape), start, master)
