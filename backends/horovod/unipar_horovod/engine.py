"""The training step whose gradients Horovod sums."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from unipar.engine import Reducer, StepEngine, build_optimizer, share_buffers, sparse_parameters
from unipar.errors import ConfigError
from unipar.strategy import EngineSpec
from unipar.world import World
from unipar_horovod.processes import import_horovod

if TYPE_CHECKING:
    from unipar_horovod.strategy import HorovodOptions

_NEVER = 1 << 60
"""So many backward passes that none of them starts to reduce a gradient."""

DTYPES = frozenset({torch.float16, torch.float32, torch.float64})


def make_engine(
    spec: EngineSpec,
    world: World,
    module: nn.Module,
    undo: list[Callable[[], None]],
    options: HorovodOptions,
) -> StepEngine:
    """An engine over a module whose weights become those of rank 0. Collective."""
    check_dtypes(module)
    import_horovod().broadcast_parameters(
        {f"{spec.name}.{name}": p.data for name, p in module.named_parameters()}, root_rank=0
    )
    share_buffers(module.buffers(), world)
    optimizer = build_optimizer(spec, module)
    reducer = None
    if optimizer is not None and world.size > 1:
        reducer = HorovodReducer(module, world, spec.name, options)
    return StepEngine(spec, world, module, optimizer, reducer=reducer, undo=undo)


class HorovodReducer(Reducer):
    """Sums gradients by Horovod, each as soon as the last backward pass has added to it.

    The update itself is done by the user's own optimizer: Horovod would make a new one of its
    class, whose arguments other than hyperparameters are lost.

    Args:
        module: the user's module; a gradient is summed over ranks under its parameter's name.
        world: the joined processes.
        name: of the engine: reductions meet by name, and engines of one session must not meet.
        options: of the strategy.

    Attributes:
        optimizer: Horovod's DistributedOptimizer.
    """

    def __init__(self, module: nn.Module, world: World, name: str, options: HorovodOptions) -> None:
        super().__init__(module, world)
        self._hvd = import_horovod()
        self._name, self._options = name, options
        self.shares_buffers = options.broadcast_buffers
        self._all_parameters = list(module.parameters())
        self.optimizer = self._make_optimizer()
        self._reducing = False
        self._used = torch.ones(len(self._all_parameters), device=world.device)

    def _make_optimizer(self) -> Any:
        options = self._options
        sparse = list(sparse_parameters(self.module).values())
        if sparse and options.num_groups is not None:
            raise ConfigError(
                f"horovod: num_groups={options.num_groups} was given, and '{sparse[0]}' has sparse "
                "gradients, which Horovod does not reduce in groups. Leave num_groups out."
            )
        compression = getattr(self._hvd.Compression, options.compression)
        if options.gradient_predivide_factor != 1.0:
            # Horovod 0.28.1 refuses the factor beside a sum, and leaves it out of groups.
            compression = Predivided(compression, options.gradient_predivide_factor)
        return self._hvd.DistributedOptimizer(
            torch.optim.SGD(self._all_parameters, lr=0.0),
            named_parameters=[
                (f"{self._name}.{name}", p) for name, p in self.module.named_parameters()
            ],
            compression=compression,
            backward_passes_per_step=_NEVER,
            op=self._hvd.Sum,
            groups=None if sparse else self._groups(),
            sparse_as_dense=options.sparse_as_dense,
        )

    def _groups(self) -> list[list[nn.Parameter]]:
        """The gradients that are reduced together, in about the order in which they form.

        Left to itself Horovod fuses what happens to be there, and over more than two ranks the
        order of a sum, so the last bit of it, depends on what else is in the buffer.
        """
        parameters = [p for p in self._all_parameters[::-1] if p.requires_grad]
        if self._options.num_groups is not None:
            size = -(-len(parameters) // self._options.num_groups)
            return [parameters[at : at + size] for at in range(0, len(parameters), size)]
        groups: list[list[nn.Parameter]] = []
        limit, filled = self._options.fusion_bytes, 0
        for parameter in parameters:
            size = parameter.numel() * parameter.element_size()
            same = groups and groups[-1][0].dtype is parameter.dtype
            if same and filled + size <= limit:
                groups[-1].append(parameter)
                filled += size
            else:
                groups.append([parameter])
                filled = size
        return groups

    def begin(self, *, whole_step: bool) -> None:
        if whole_step and self.shares_buffers:
            self.share_buffers()

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        if last:
            self._reducing = True
            self.optimizer.set_backward_passes_per_step(1)
        super().backward(loss, last=last)

    def finish(self) -> None:
        optimizer = self.optimizer
        begin = time.monotonic()
        try:
            unused = self._start_telling_unused()
            if optimizer._groups is None:
                self._complete_each()
            else:
                self._complete_groups()
            optimizer.synchronize()
            unused = self._hvd.synchronize(unused)
        except self._hvd.HorovodInternalError as error:
            patience = self.world.placement.timeout
            # Horovod looks for stalls now and then, and says the same of them as of a lost rank.
            stalled = time.monotonic() - begin > 0.9 * patience
            what = f"timed out after {patience:g} s" if stalled else "connection closed"
            raise dist.DistNetworkError(f"Horovod's reduction of gradients: {what}") from error
        self._reducing = False
        # Backward passes of other engines may go through this model before its own next one.
        optimizer.set_backward_passes_per_step(_NEVER)
        if not unused.all():
            for parameter, used in zip(self._all_parameters, unused.tolist(), strict=True):
                if not used:
                    # Horovod gives zeros, with which an optimizer would decay weight and moments.
                    parameter.grad = None

    def discard(self) -> None:
        if self._reducing:
            # What a backward pass has begun to reduce before it failed comes to its end first.
            self.finish()
        super().discard()

    def _start_telling_unused(self) -> int:
        """Begin to find the parameters that got a gradient on some rank."""
        self._used.fill_(1.0)
        for index, parameter in enumerate(self._all_parameters):
            if parameter.grad is None:
                self._used[index] = 0.0
        # As a tensor like the gradients, it travels in one buffer with them.
        return self._hvd.allreduce_async_(self._used, name=f"{self._name}..used")

    def _complete_groups(self) -> None:
        """Reduce as groups, too, those of which some parameter got no gradient on this rank.

        Horovod 0.28.1 would reduce their parameters one by one, and wait forever for the ranks
        that reduce the group (horovod/torch/optimizer.py, ``synchronize``).
        """
        optimizer = self.optimizer
        for parameter in self._all_parameters:
            if parameter.requires_grad and parameter not in optimizer._p_to_group:
                # It was frozen when the groups were made.
                optimizer._p_to_group[parameter] = (parameter,)
                optimizer._group_counts[parameter,] = 0
        for group in optimizer._group_counts:
            if group in optimizer._handles:
                continue
            for parameter in group:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                optimizer._handles.pop(parameter, None)
            optimizer._handles[group] = optimizer._grouped_allreduce_grad_async(group)
            optimizer._group_counts[group] = 0

    def _complete_each(self) -> None:
        """The same where each gradient is reduced by itself, since some are sparse."""
        optimizer, sparse = self.optimizer, set(sparse_parameters(self.module).values())
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                optimizer._requires_update.add(parameter)
                if parameter.grad is None and name in sparse:
                    # Horovod would give dense zeros, and wait for the ranks that send indices.
                    parameter.grad = torch.zeros_like(parameter).to_sparse(1)


class Predivided:
    """A compression of Horovod's over gradients that are divided before it.

    Sparse gradients that Horovod gathers instead of reducing go past it both ways.
    """

    def __init__(self, inner: Any, factor: float) -> None:
        self._inner, self._factor = inner, factor

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        compressed, context = self._inner.compress(tensor / self._factor)
        return compressed, (context,)

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        if context is None:
            return tensor
        return self._inner.decompress(tensor, context[0]) * self._factor


def check_dtypes(module: nn.Module) -> None:
    """Refuse parameters that Horovod's collectives cannot carry."""
    for name, parameter in module.named_parameters():
        if parameter.dtype not in DTYPES:
            raise ConfigError(
                f"horovod: parameter '{name}' is {parameter.dtype}, which Horovod's collectives "
                "do not know. Keep the model's parameters in float32; precision='bf16' computes "
                "in bfloat16 all the same."
            )
