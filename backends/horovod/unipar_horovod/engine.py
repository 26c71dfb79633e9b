"""The training step whose gradients Horovod sums."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from unipar.batch import Batch
from unipar.engine import ModuleEngine, sparse_parameters
from unipar.errors import ConfigError
from unipar.loss import LossFn
from unipar.strategy import EngineSpec, StepResult
from unipar.world import World
from unipar_horovod.processes import import_horovod

if TYPE_CHECKING:
    from unipar_horovod.strategy import HorovodOptions

_NEVER = 1 << 60
"""So many backward passes that none of them starts to reduce a gradient."""

DTYPES = frozenset({torch.float16, torch.float32, torch.float64})


class HorovodEngine(ModuleEngine):
    """A replica on each rank; gradients are summed while the last backward pass goes on.

    Attributes:
        reducer: Horovod's DistributedOptimizer, which sums the gradients. The update itself is
            done by the user's own optimizer: Horovod would make a new one of its class, whose
            arguments other than hyperparameters are lost.
    """

    def __init__(
        self,
        spec: EngineSpec,
        world: World,
        module: nn.Module,
        undo: list[Callable[[], None]],
        options: HorovodOptions,
    ) -> None:
        self._hvd = import_horovod()
        self._options = options
        check_dtypes(module)
        self._hvd.broadcast_parameters(
            {f"{spec.name}.{name}": p.data for name, p in module.named_parameters()}, root_rank=0
        )
        super().__init__(spec, world, module, undo=undo)
        self._sync_buffers()
        self.reducer: Any = None
        if self.optimizer is not None and world.size > 1:
            self.reducer = self._build_reducer()

    def _build_reducer(self) -> Any:
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
        reducer = self._hvd.DistributedOptimizer(
            torch.optim.SGD(self._all_parameters, lr=0.0),
            # Reductions meet by name, and engines of one session must not meet.
            named_parameters=[
                (f"{self.spec.name}.{name}", p) for name, p in self.module.named_parameters()
            ],
            compression=compression,
            backward_passes_per_step=_NEVER,
            op=self._hvd.Sum,
            groups=None if sparse else self._groups(),
            sparse_as_dense=options.sparse_as_dense,
        )
        self._used = torch.ones(len(self._all_parameters), device=self._device)
        return reducer

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

    def train_step(self, batch: Batch, loss_fn: LossFn) -> StepResult:
        self._share_buffers()
        return super().train_step(batch, loss_fn)

    def _begin_by_hand(self) -> None:
        self._share_buffers()

    def _share_buffers(self) -> None:
        if self._options.broadcast_buffers:
            self._sync_buffers()

    def _add(self, loss: torch.Tensor, weight: float, count: Any, *, last: bool, **known) -> None:
        if last and self.reducer is not None:
            # Each gradient is summed as soon as this backward pass has added to it.
            self.reducer.set_backward_passes_per_step(1)
        super()._add(loss, weight, count, last=last, **known)

    def _finish_gradients(self) -> None:
        reducer = self.reducer
        if reducer is None:
            return
        begin = time.monotonic()
        try:
            unused = self._start_telling_unused()
            if reducer._groups is None:
                self._complete_each()
            else:
                self._complete_groups()
            reducer.synchronize()
            unused = self._hvd.synchronize(unused)
        except self._hvd.HorovodInternalError as error:
            patience = self.world.placement.timeout
            # Horovod looks for stalls now and then, and says the same of them as of a lost rank.
            stalled = time.monotonic() - begin > 0.9 * patience
            what = f"timed out after {patience:g} s" if stalled else "connection closed"
            raise dist.DistNetworkError(f"Horovod's reduction of gradients: {what}") from error
        # Backward passes of other engines may go through this model before its own next one.
        reducer.set_backward_passes_per_step(_NEVER)
        if not unused.all():
            for parameter, used in zip(self._all_parameters, unused.tolist(), strict=True):
                if not used:
                    # Horovod gives zeros, with which an optimizer would decay weight and moments.
                    parameter.grad = None

    def _start_telling_unused(self) -> int:
        """Begin to find the parameters that got a gradient on some rank."""
        self._used.fill_(1.0)
        for index, parameter in enumerate(self._all_parameters):
            if parameter.grad is None:
                self._used[index] = 0.0
        # As a tensor like the gradients, it travels in one buffer with them.
        return self._hvd.allreduce_async_(self._used, name=f"{self.spec.name}..used")

    def _complete_groups(self) -> None:
        """Reduce as groups, too, those of which some parameter got no gradient on this rank.

        Horovod 0.28.1 would reduce their parameters one by one, and wait forever for the ranks
        that reduce the group (horovod/torch/optimizer.py, ``synchronize``).
        """
        reducer = self.reducer
        for parameter in self._all_parameters:
            if parameter.requires_grad and parameter not in reducer._p_to_group:
                # It was frozen when the groups were made.
                reducer._p_to_group[parameter] = (parameter,)
                reducer._group_counts[parameter,] = 0
        for group in reducer._group_counts:
            if group in reducer._handles:
                continue
            for parameter in group:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                reducer._handles.pop(parameter, None)
            reducer._handles[group] = reducer._grouped_allreduce_grad_async(group)
            reducer._group_counts[group] = 0

    def _complete_each(self) -> None:
        """The same where each gradient is reduced by itself, since some are sparse."""
        reducer, sparse = self.reducer, set(sparse_parameters(self.module).values())
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                reducer._requires_update.add(parameter)
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
