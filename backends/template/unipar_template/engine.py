"""The training step whose gradients this backend sums; all else of a step is StepEngine's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from unipar.engine import (
    Reducer,
    StepEngine,
    broadcast_tensors,
    build_optimizer,
    checkpoint_activations,
    compile_modules,
    offload_activations,
)
from unipar.strategy import EngineSpec, seeded_model
from unipar.utils.host_copy import to_device
from unipar.world import World

if TYPE_CHECKING:
    from unipar_template.strategy import TemplateOptions


def make_engine(spec: EngineSpec, world: World, options: TemplateOptions) -> StepEngine:
    """Make an engine of a model: all that is done to it, from top to bottom. Collective."""
    module = seeded_model(spec).to(world.device)
    undo = [
        checkpoint_activations(module, spec.activation_checkpointing),
        offload_activations(module, spec.activation_offload, world.device),
        compile_modules([module], spec.compile),
    ]
    reducer = AllReducer(module, world, bucket_bytes=round(options.bucket_mb * 2**20))
    reducer.share_weights()
    # Once the parameters have their final form.
    optimizer = build_optimizer(spec, module, may_fuse=True)
    return StepEngine(spec, world, module, optimizer, reducer=reducer, undo=undo)


class AllReducer(Reducer):
    """Sums gradients over ranks when the last backward pass of a step is through.

    Args:
        module: the user's module, with its parameters in their final form.
        world: the joined processes.
        bucket_bytes: size of what is reduced by one all-reduce.
    """

    def __init__(self, module: nn.Module, world: World, *, bucket_bytes: int) -> None:
        super().__init__(module, world)
        self._bucket_bytes = bucket_bytes

    def share_weights(self) -> None:
        """Give every rank the weights of rank 0: a user may have built another on each."""
        broadcast_tensors([*self.parameters, *self.module.buffers()], self.world)

    def begin(self, *, whole_step: bool) -> None:
        # Replicas whose buffers differ compute different functions.
        self.share_buffers()

    def finish(self) -> None:
        if self.world.size == 1:
            return
        # Each step again, for users freeze and thaw parameters between steps.
        parameters = [p for p in self.parameters if p.requires_grad]
        used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
        used = to_device(used, self.world.device)
        reductions = [dist.all_reduce(used, dist.ReduceOp.MAX, async_op=True)]
        unused = [p for p in parameters if p.grad is None]
        for parameter in unused:
            # Another rank may have used it, and its reduction waits for this one.
            parameter.grad = torch.zeros_like(parameter)
        flights = []
        for bucket in self._buckets(parameters):
            flat = torch.cat([grad.reshape(-1) for grad in bucket])
            # A sum, not a mean: the loss is divided by the items of the global batch already.
            reductions.append(dist.all_reduce(flat, async_op=True))
            flights.append((bucket, flat))
        for reduction in reductions:
            assert reduction is not None
            reduction.wait()
        for bucket, flat in flights:
            parts = flat.split([grad.numel() for grad in bucket])
            for grad, part in zip(bucket, parts, strict=True):
                grad.copy_(part.view_as(grad))
        if unused:
            somewhere = dict(zip(parameters, used.tolist(), strict=True))
            for parameter in unused:
                if not somewhere[parameter]:
                    # With zeros the optimizer would decay its weight and moments.
                    parameter.grad = None

    def _buckets(self, parameters: list[nn.Parameter]) -> Iterator[list[torch.Tensor]]:
        """Gradients of one dtype in an order that is the same on every rank."""
        bucket: list[torch.Tensor] = []
        filled = 0
        for grad in [p.grad for p in parameters if p.grad is not None]:
            size = grad.numel() * grad.element_size()
            if bucket and (bucket[0].dtype != grad.dtype or filled + size > self._bucket_bytes):
                yield bucket
                bucket, filled = [], 0
            bucket.append(grad)
            filled += size
        if bucket:
            yield bucket
