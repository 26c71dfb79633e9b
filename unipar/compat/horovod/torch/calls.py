"""Horovod's functions, made of the run and of ``torch.distributed``.

A step is on Horovod's average: the mean over ranks of the sum of the losses since the last step.
Whatever collective is asynchronous there is done here when it is called.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from unipar.compat.adopting import adoption, close, start
from unipar.compat.delayed import Delay, DelayedOptimizer
from unipar.compat.engine_steps import LEFT_TO_RANKS
from unipar.compat.horovod_names import CALLS
from unipar.compat.routed import engines_side
from unipar.compat.run import current
from unipar.errors import ConfigError

Average, Sum, Min, Max, Product = range(5)
_OPS = {
    Average: dist.ReduceOp.SUM, Sum: dist.ReduceOp.SUM, Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX, Product: dist.ReduceOp.PRODUCT,
}  # fmt: skip
global_process_set: Any = None


class HorovodInternalError(RuntimeError):
    """Raised by nothing: where a rank is lost, the run ends."""


class _AsIs:
    """Nothing is compressed."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _InHalf:
    """Floating-point tensors travel in half precision."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        half = tensor.half() if tensor.is_floating_point() else tensor
        return half, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class Compression:
    """How tensors travel."""

    none = _AsIs
    fp16 = _InHalf


# -- processes -----------------------------------------------------------------------------------


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the processes. Collective."""
    if comm or process_sets:
        CALLS.refuse("process_set=…", "hvd.init of some ranks")
    start()
    adoption.note_aware()
    current.world(asked=False)


def shutdown() -> None:
    """End the run."""
    close()


def is_initialized() -> bool:
    """Whether the processes are joined."""
    return adoption.aware


def size() -> int:
    """How many processes there are."""
    return current.placement().size


def rank() -> int:
    """The number of this one."""
    return current.placement().rank


def local_rank() -> int:
    """Its number on its node."""
    return current.placement().local_rank


def local_size() -> int:
    """How many there are on this node."""
    return current.placement().local_size


def cross_rank() -> int:
    """The number of this node."""
    return current.placement().node_rank


def cross_size() -> int:
    """How many nodes there are."""
    return current.placement().num_nodes


def barrier(process_set: Any = None) -> None:
    """Wait for all. Collective."""
    _check_set(process_set)
    current.world().barrier()


def join(device: int = -1) -> int:
    """The number of the last rank, on one; refused on several."""
    if size() > 1:
        CALLS.refuse("join()", "hvd.join()")
    return 0


def start_timeline(*args: Any, **kwargs: Any) -> None:
    """Nothing."""


def stop_timeline() -> None:
    """Nothing."""


# -- training ------------------------------------------------------------------------------------


class _Distributed:
    """What is put before the class of an optimizer that Horovod averages for."""

    def synchronize(self) -> None:
        """Average gradients over ranks. Collective."""
        adopted = engines_side(self)
        if isinstance(adopted, DelayedOptimizer):
            with adoption.engine_calls():
                adopted.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A block of steps that average nothing by themselves."""
        delay = adoption.delays.get(self)
        if delay is None:
            yield
            return
        delay.synchronizes = False
        try:
            yield
        finally:
            delay.synchronizes = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Leave gradients to each rank until so many passes are done from now on."""
        if self in adoption.delays:
            adoption.delays[self].begin(passes)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Take over state, and count passes anew."""
        super().load_state_dict(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if self in adoption.delays:
            adoption.delays[self].begin()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and say what else Horovod does with it."""
        super().add_param_group(param_group)  # pyright: ignore[reportAttributeAccessIssue]
        if size() > 1:
            adoption.tell(
                "add_param_group came after hvd.DistributedOptimizer, which leaves the gradients "
                "of the new parameters to each rank, so that replicas drift apart, and has its "
                "class's defaults for what the group leaves out, such as lr. Here they are "
                "averaged over ranks as all others are, with the script's own defaults. Add the "
                "group before, and both do the same."
            )


def DistributedOptimizer(
    optimizer: Any,
    named_parameters: Any = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
) -> Any:
    """The optimizer itself, whose steps are on the average over ranks.

    Raises:
        ConfigError: another operation is asked for, a part of the ranks, or a compressor of the
            script's own.
    """
    _check_set(process_set)
    if op not in (Average, Sum):
        raise ConfigError("DistributedOptimizer takes op=hvd.Average or hvd.Sum.")
    if compression not in (Compression.none, Compression.fp16):
        CALLS.refuse("DistributedOptimizer(compression=…)", "DistributedOptimizer(compression=…)")
    if compression is Compression.fp16:
        adoption.compresses.add(optimizer)
    adoption.note_optimizer(optimizer)
    adoption.note_wrapped(optimizer)
    if op == Sum:
        adoption.sums.add(optimizer)
    # Horovod builds another optimizer from the groups, without the state.
    optimizer.state.clear()
    optimizer.__class__ = _class_of(type(optimizer))
    if size() > 1:
        # As Horovod 0.28.1 does then (torch/optimizer.py, synchronize), also of those that are
        # frozen later, for it has hooks on what is trained now.
        trained = [[p.requires_grad for p in one["params"]] for one in optimizer.param_groups]
        adoption.delays[optimizer] = delay = Delay(backward_passes_per_step, trained)
        optimizer.register_step_pre_hook(delay.zero_unused)
        adoption.of_thawed[optimizer] = LEFT_TO_RANKS.format(
            call="hvd.DistributedOptimizer", name="Horovod", what="optimizer"
        )
    return optimizer


@functools.cache
def _class_of(kind: type) -> type:
    told = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (_Distributed, kind), told)


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Give all ranks one rank's weights. Collective."""
    named = sorted(params.items()) if hasattr(params, "items") else params
    for one in named:
        tensor = one[1] if isinstance(one, tuple) else one
        if isinstance(tensor, torch.Tensor):
            broadcast_(tensor.data, root_rank)


def broadcast_optimizer_state(optimizer: Any, root_rank: int, model: Any = None) -> None:
    """Give all ranks one rank's optimizer state. Collective.

    Where there is none yet, Horovod takes a step on gradients of zero, which makes some, counts as
    the first, and decays weights; and so does this.
    """
    adopted = optimizer.__dict__.get("_unipar")
    if adopted is not None and adopted.divided:
        # Each rank has a part, which no call of one rank alone changes.
        return
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    if not optimizer.state_dict()["state"]:
        for one in parameters:
            one.grad = torch.zeros_like(one) if one.requires_grad else None
        with adoption.engine_calls(), _alone(optimizer):
            optimizer.step()
        for one in parameters:
            one.grad = None
    if size() > 1 and optimizer.state_dict()["state"]:
        mine = rank() == root_rank
        sent = [optimizer.state_dict() if mine else None]
        dist.broadcast_object_list(sent, src=root_rank)
        if not mine:
            optimizer.load_state_dict(sent[0])


def _alone(optimizer: Any) -> contextlib.AbstractContextManager[None]:
    """Around a step that ranks may take or not, each by itself."""
    if isinstance(optimizer, _Distributed):
        return optimizer.skip_synchronize()
    return contextlib.nullcontext()


# -- exchange ------------------------------------------------------------------------------------


class _Exchange(torch.autograd.Function):
    """What ranks exchange, with the gradient that Horovod gives it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, exchange: Any, back: Any) -> torch.Tensor:
        ctx.back = back
        return exchange(tensor.detach())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        return ctx.back(grad_outputs[0].detach()), None, None


def allreduce(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None,
    compression: Any = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: Any = None,
) -> torch.Tensor:  # fmt: skip
    """One tensor made of all ranks', whose gradient is made likewise. Collective."""
    _check_set(process_set)
    op = op if op is not None else Sum if average is False else Average

    def reduce(one: torch.Tensor) -> torch.Tensor:
        result = one.clone(memory_format=torch.contiguous_format)
        result = result * prescale_factor if prescale_factor != 1 else result
        if size() > 1:
            current.world()
            dist.all_reduce(result, _OPS[op])
        if op == Average and size() > 1:
            result = result / size() if result.is_floating_point() else result // size()
        return result * postscale_factor if postscale_factor != 1 else result

    small, ctx = compression.compress(tensor)
    return compression.decompress(_Exchange.apply(small, reduce, reduce), ctx)


def allreduce_async(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None,
    op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: Any = None,
) -> torch.Tensor:  # fmt: skip
    """Likewise, without gradient; :func:`synchronize` gives the result."""
    return allreduce(
        tensor.detach(), average, name, Compression.none, op, prescale_factor, postscale_factor,
        process_set,
    )  # fmt: skip


def allreduce_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Likewise, in place; of the arguments of :func:`allreduce_async`."""
    with torch.no_grad():
        return tensor.copy_(allreduce_async(tensor, *args, **kwargs))


allreduce_async_ = allreduce_


def grouped_allreduce(tensors: Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """:func:`allreduce` of each."""
    return [allreduce(one, *args, **kwargs) for one in tensors]


def grouped_allreduce_(tensors: Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """Likewise, in place."""
    return [allreduce_(one, *args, **kwargs) for one in tensors]


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: Any = None
) -> torch.Tensor:
    """All ranks' tensors, one behind the other. Collective, and so is its backward pass."""
    _check_set(process_set)
    own = tensor if tensor.dim() else tensor[None]
    parts = current.world().gather(own.detach().cpu())
    first = sum(len(one) for one in parts[: rank()])

    def back(grad: torch.Tensor) -> torch.Tensor:
        return allreduce(grad)[first : first + len(own)]

    return _Exchange.apply(own, lambda one: torch.cat(parts).to(one.device), back)


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: Any = None
) -> torch.Tensor:
    """Likewise, without gradient; :func:`synchronize` gives the result."""
    return allgather(tensor.detach(), name, process_set)


def grouped_allgather(tensors: Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """:func:`allgather` of each."""
    return [allgather(one, *args, **kwargs) for one in tensors]


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """All ranks' objects. Collective."""
    return current.world().gather(obj)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> torch.Tensor:
    """One rank's tensor. Collective, and so is its backward pass."""

    def back(grad: torch.Tensor) -> torch.Tensor:
        return allreduce(grad) * (rank() == root_rank)

    return _Exchange.apply(
        tensor, lambda one: broadcast_(one.clone(), root_rank, name, process_set), back
    )


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> torch.Tensor:
    """Likewise, in place."""
    _check_set(process_set)
    if size() > 1:
        current.world()
        with torch.no_grad():
            whole = tensor.contiguous()
            dist.broadcast(whole, src=root_rank)
            if whole is not tensor:
                tensor.copy_(whole)
    return tensor


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> torch.Tensor:
    """Likewise, without gradient; :func:`synchronize` gives the result."""
    return broadcast(tensor.detach(), root_rank, name, process_set)


broadcast_async_ = broadcast_


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: Any = None
) -> Any:
    """One rank's object. Collective."""
    _check_set(process_set)
    sent = [tree_map_only(torch.Tensor, lambda one: one.cpu(), obj)]
    if size() > 1:
        current.world()
        dist.broadcast_object_list(sent, src=root_rank)
    return obj if rank() == root_rank else sent[0]


def synchronize(handle: Any) -> Any:
    """The result of an operation, which is there already."""
    return handle


def poll(handle: Any) -> bool:
    """Whether an operation is done, which it is."""
    return True


def _check_set(process_set: Any) -> None:
    if process_set is not None:
        CALLS.refuse("process_set=…", "hvd's process_set")
