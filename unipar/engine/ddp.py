"""Gradients that PyTorch's DistributedDataParallel sums, whichever framework made it.

Left to itself it averages. A communication hook, for which it leaves the division out, makes it
sum: bucket by bucket, while the backward pass runs, and without the kernel that divides each
gradient. Hooks that average for themselves have their division taken back before the step.

Its reducer is armed by a forward pass, and reduces in the first backward pass after it; one that
was armed and saw no gradient of some parameter says so only in the next forward pass, when the
optimizer has stepped. So whole steps are checked before the optimizer steps, and a user's own loop,
where several forward passes may come before their backward passes, goes around that forward pass:
the reducer is armed in the backward pass that is known to be the last, or not at all.
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unipar.engine.inner import refuse_inner_gradients
from unipar.engine.reducer import Reducer
from unipar.engine.sparse import SparseSum, no_rows, sparse_parameters
from unipar.engine.stepper import scale_gradients
from unipar.engine.used import UsedAnywhere
from unipar.errors import ConfigError
from unipar.world import World

_BUCKET_BYTES = 25 * 2**20
_IN_FLIGHT = 2
_MAX_NAMES = 8
_ELSEWHERE = (
    "the loss of this step did not come from the model that the loss function was given, so the "
    "gradients of this rank would not be added to the others'. Call model(…) in "
    "loss(model, batch), not the module that you built or engine.module."
)


_UNSEEN = (
    "static_graph=true: DDP did not see the first backward pass. It sees it by the tensors in the "
    "model's output, and finds those in tuples, lists and dicts, but in no dataclass and no other "
    "object. Return one of these, or leave static_graph out."
)


class DDPReducer(Reducer):
    """Sums the gradients of whole replicas by a DistributedDataParallel.

    Args:
        ddp: the wrapper.
        world: the joined processes.
        allow_unused: the strategy and option that let parameters go unused, as a user writes them.
        wire_dtype: the dtype in which gradients travel; ``None``: their own.
        only_overlapped: an option under which gradients can only be reduced while the last
            backward pass runs, as a user writes it; empty: none is set.
        averages: whether the wrapper has a communication hook, which averages.
        run_backward: the backward pass itself, for a framework that has its own way.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        world: World,
        *,
        allow_unused: str,
        wire_dtype: torch.dtype | None = None,
        only_overlapped: str = "",
        averages: bool = False,
        run_backward: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        super().__init__(ddp.module, world, run_backward)
        self.ddp, self.shares_buffers = ddp, ddp.broadcast_buffers
        self._averages = averages
        self._sending = _Sending(ddp.process_group, wire_dtype)
        if not averages:
            ddp.register_comm_hook(self._sending, _sum)
        self._allow_unused = allow_unused
        self._wire_dtype, self._only_overlapped = wire_dtype, only_overlapped
        named = list(ddp.module.named_parameters())
        # In the order in which the reducer counts them.
        self._names = [name for name, p in named if p.requires_grad]
        self._known = [p for _, p in named if p.requires_grad]
        self._unknown = [p for _, p in named if not p.requires_grad]
        self._sparse = sparse_parameters(ddp.module)
        # Without views, what no rank has used in a pass that finds it unused is not written back.
        unwritten = ddp.find_unused_parameters and not ddp.gradient_as_bucket_view
        self.reopens = not (averages or ddp.static_graph or self._sparse or unwritten)
        self._passed: set[nn.Parameter] = set()
        self._armed = self._whole_step = self._stuck = False
        # What a static graph records is the first backward pass.
        self._records = ddp.static_graph
        self._undo = [ddp.register_forward_hook(self._saw_forward).remove]
        may_be_unused = ddp.find_unused_parameters or ddp.static_graph
        self._tables = [p for p in self._known if p in self._sparse] if may_be_unused else []
        for table in self._tables:
            used = table.register_post_accumulate_grad_hook(self._sending.unused.discard)
            self._undo.append(used.remove)
        if ddp.static_graph:
            # What is recorded of the first step is the first backward pass.
            self._undo.append(refuse_inner_gradients(ddp.module, "static_graph=true"))

    def _saw_forward(self, module: nn.Module, *_: Any) -> None:
        if self.ddp.require_backward_grad_sync and torch.is_grad_enabled():
            self._armed = True

    def begin(self, *, whole_step: bool) -> None:
        self._whole_step = whole_step
        self._sending.noted = not whole_step
        if self._stuck:
            raise ConfigError(
                "an error has ended an earlier step, and DDP with static_graph=true cannot begin "
                "another: it waits for the rest of that one. Start again from a checkpoint, or "
                "leave static_graph out."
            )
        # Of a backward pass that an error has ended. What other ranks, which may be behind, have
        # yet to add would be written over the gradients of this step.
        self._sending.wait()

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        if last:
            return contextlib.nullcontext()
        # The backward pass that is recorded asserts if it is not reduced.
        return self._reducing_again() if self._records else self.ddp.no_sync()

    @contextlib.contextmanager
    def _reducing_again(self) -> Iterator[None]:
        """Around a backward pass that reduces, before another that reduces what it leaves."""
        yield
        if self._armed and not self._averages:
            # Each rank keeps an equal part of what is summed, so that summing it changes nothing.
            scale_gradients(self._known, 1 / dist.get_world_size(self.ddp.process_group))

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        if not last:
            # One may be frozen before the last pass, and has this one's gradient.
            self._passed.update([p for p in self.parameters if p.requires_grad])
        if last and not self._whole_step:
            self._arm(loss)
        elif self._armed and self.ddp.find_unused_parameters and not self.ddp.static_graph:
            # The wrapper has asked what it found in the model's output, which is not all.
            self.ddp.reducer.prepare_for_backward([loss])
        if self._armed:
            # DDP asserts that a sparse gradient is there, also of a table that it has found unused
            # (torch 2.13, reducer.cpp, mark_variable_ready_sparse).
            for table in self._tables:
                if table.requires_grad and table.grad is None:
                    table.grad = no_rows(table)
                    self._sending.unused.add(table)
        super().backward(loss, last=last)

    def _arm(self, loss: torch.Tensor) -> None:
        """Let the next backward pass sum all gradients, accumulated ones too. Collective.

        Args:
            loss: what it will start from.
        """
        if self.ddp.static_graph:
            # It is recorded in a forward pass of the wrapper's.
            return
        self._sending.clear()
        # As the wrapper's own forward pass does it (torch 2.13, nn/parallel/distributed.py,
        # _pre_forward and _post_forward).
        reducer = self.ddp.reducer
        reducer.prepare_for_forward()
        reducer._rebuild_buckets()
        reducer.prepare_for_backward([loss] if self.ddp.find_unused_parameters else [])
        self._armed = True

    def finish(self) -> None:
        if not self._armed:
            if self._whole_step:
                raise ConfigError(_ELSEWHERE)
            self._reduce(list(self.ddp.module.parameters()))
            return
        if self._records and not self.ddp._static_graph_delay_allreduce_enqueued:
            # torch 2.13, nn/parallel/distributed.py, _DDPSink: it stands behind the tensors of the
            # output that are found.
            raise ConfigError(_UNSEEN)
        self._records = False
        try:
            self.ddp.reducer._check_reducer_finalized()
        except RuntimeError as error:
            raise self._unused(str(error)) from None
        self._armed = False
        self._sending.clear()
        self._drop_unused()
        if self._averages:
            scale_gradients(self._known, dist.get_world_size(self.ddp.process_group))
        # Frozen when the wrapper was made, and thawed since.
        self._reduce(self._unknown)

    def reopen(self) -> None:
        if not self._take_back_unfinished():
            self.finish()
            self._divide_again(self.parameters)

    def finish_guessed(self, *, lent: bool) -> None:
        self._take_back_unfinished()
        self.finish()
        if lent and self.ddp.gradient_as_bucket_view:
            # A loop may keep them, or change them in ways that views do not bear.
            held = [(p, p.grad) for p in self.parameters if p.grad is not None]
            own = [torch.empty_like(grad) for _, grad in held]
            _copy(own, [grad for _, grad in held])
            for (parameter, _), grad in zip(held, own, strict=True):
                parameter.grad = grad

    def _take_back_unfinished(self) -> bool:
        """Take back what was summed in a pass that gave no gradient to some parameter.

        Returns:
            Whether it is one.
        """
        try:
            self.ddp.reducer._check_reducer_finalized()
        except RuntimeError:
            self._sending.wait()
            if self.ddp.gradient_as_bucket_view:
                self._divide_again(self._sending.parameters)
            # Else sums are in buckets alone until the pass is finished.
            self._sending.clear()
            disarm(self.ddp)
            self._armed = False
            return True
        return False

    def _divide_again(self, summed: Iterable[torch.Tensor]) -> None:
        """Leave each rank an equal part of a sum, so that summing it again changes nothing."""
        scale_gradients(summed, 1 / dist.get_world_size(self.ddp.process_group))

    def clear(self) -> None:
        super().clear()
        self._passed.clear()

    def forget(self) -> None:
        if self._armed and not self.ddp.static_graph:
            disarm(self.ddp)
        self._stuck |= self._armed and self.ddp.static_graph
        self._armed = False
        self._drop_unused()

    def _drop_unused(self) -> None:
        """Leave no gradient of a table that no rank has used: by one, optimizers move moments."""
        while self._sending.unused:
            self._sending.unused.pop().grad = None

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _unused(self, said: str) -> ConfigError:
        # The reducer tells their numbers, and nothing else does (torch 2.13, reducer.cpp,
        # ensure_prior_reduction_finished).
        found = re.search(r"did not receive grad for rank \d+: ((?:\d+ ?)+)", said)
        names = [self._names[int(index)] for index in found[1].split()] if found else []
        more = len(names) - _MAX_NAMES
        listed = ", ".join(f"'{name}'" for name in names[:_MAX_NAMES])
        what = f"parameters that it trains: {listed}{f' and {more} more' if more > 0 else ''}"
        if self.ddp.static_graph:
            why = "under static_graph=true, which expects the graph of the first step in each"
            remedy = f"Leave static_graph out, and use strategy='{self._allow_unused}'"
        else:
            why = "and gradients are reduced in an order that waits for each"
            remedy = f"Use strategy='{self._allow_unused}'"
        return ConfigError(
            f"the backward pass of this step gave no gradient to some {what}; {why}. Nothing was "
            f"updated. {remedy}, which finds unused parameters in every step, or freeze what is "
            "never used before the model is prepared (parameter.requires_grad_(False))."
        )

    def _reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum gradients that only this rank has, leaving out what no rank has used."""
        parameters = [p for p in parameters if p.requires_grad or p in self._passed]
        group: Any = self.ddp.process_group
        if not parameters or dist.get_world_size(group) == 1:
            return
        if self._only_overlapped:
            raise ConfigError(
                f"{self._only_overlapped} compresses gradients while the last backward pass of a "
                "step runs, and this loop does not say which one is the last: put forward and "
                "backward of each micro-batch in `with engine.microbatch(last=…):`, or use "
                "engine.train_step(batch, loss)."
            )
        used = UsedAnywhere(parameters, group)
        flying: deque[_DenseSum | SparseSum] = deque()
        for bucket in _buckets(parameters, self._sparse):
            flying.append(self._start(bucket, group))
            if len(flying) > _IN_FLIGHT:
                flying.popleft().land()
        while flying:
            flying.popleft().land()
        for parameter in used.unused():
            parameter.grad = None

    def _start(self, bucket: list[nn.Parameter], group: dist.ProcessGroup) -> _DenseSum | SparseSum:
        if bucket[0] in self._sparse:
            (parameter,) = bucket
            return SparseSum(parameter, parameter.grad, group, self._wire_dtype)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        values = torch.cat([grad.reshape(-1) for grad in grads])
        if self._wire_dtype is not None:
            values = values.to(self._wire_dtype)
        work = dist.all_reduce(values, group=group, async_op=True)
        assert work is not None
        return _DenseSum(bucket, values, work)


def disarm(ddp: DistributedDataParallel) -> None:
    """Have the reducer not wait for a backward pass that will not come to its end.

    It would reduce in the next one, be it the last of its step or not, and what it has reduced once
    more in the last; or complain that a gradient comes twice.
    """
    # As the wrapper does it itself (torch 2.13, nn/parallel/distributed.py, _update_process_group).
    ddp.reducer._reset_state()
    ddp._has_rebuilt_buckets = False


class _Sending:
    """The buckets of a backward pass that DDP has summed, or is summing.

    Args:
        group: over which.
        wire_dtype: the dtype in which gradients travel; ``None``: their own.

    Attributes:
        noted: whether :attr:`parameters` is wanted.
        parameters: those whose gradients are in them.
        unused: sparse tables that no rank has used so far, each with a gradient without rows.
    """

    def __init__(self, group: Any, wire_dtype: torch.dtype | None) -> None:
        self.group, self.wire_dtype = group, wire_dtype
        self.noted = False
        self.parameters: list[torch.Tensor] = []
        self.unused: set[torch.Tensor] = set()
        self._landing: list[torch.futures.Future[Any]] = []

    def add(self, bucket: Any, landing: torch.futures.Future[Any]) -> None:
        if self.noted:
            self.parameters += bucket.parameters()
        self._landing.append(landing)

    def wait(self) -> None:
        """Wait until sums have landed."""
        while self._landing:
            self._landing.pop().wait()

    def clear(self) -> None:
        """Begin another pass."""
        self.parameters, self._landing = [], []


def _sum(state, bucket):
    """The communication hook. DDP reads annotations, and a string is no type to it."""
    gradients = bucket.buffer()
    if gradients.is_sparse:
        (parameter,) = bucket.parameters()
        own = None if parameter in state.unused else gradients
        gathering = SparseSum(parameter, own, state.group, state.wire_dtype)
        if gathering.used:
            state.unused.discard(parameter)
        summing = gathering.work
    else:
        gathering = None
        sent = gradients if state.wire_dtype is None else gradients.to(state.wire_dtype)
        summing = dist.all_reduce(sent, group=state.group, async_op=True)

    def land(summed):
        if gathering is not None:
            return gathering.sum()
        (values,) = summed.value()
        return values if values.dtype == gradients.dtype else gradients.copy_(values)

    assert summing is not None
    landed = summing.get_future().then(land)
    state.add(bucket, landed)
    return landed


class _DenseSum(NamedTuple):
    """Gradients on their way to being sums, in one tensor."""

    bucket: list[nn.Parameter]
    values: torch.Tensor
    work: dist.Work

    def land(self) -> None:
        """Wait for the sums, and put them in the gradients' place."""
        self.work.wait()
        parts = self.values.split([p.numel() for p in self.bucket])
        grads: list[torch.Tensor] = []
        for parameter in self.bucket:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            grads.append(parameter.grad)
        _copy(grads, [part.view_as(one) for part, one in zip(parts, grads, strict=True)])


def _copy(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    # A kernel for many tensors on a GPU, where copies one by one would be a kernel each.
    with torch.no_grad():
        torch._foreach_copy_(into, values)  # pyright: ignore[reportPrivateImportUsage]


def _buckets(
    parameters: Iterable[nn.Parameter], sparse: Collection[nn.Parameter]
) -> Iterator[list[nn.Parameter]]:
    """Parameters of one dtype whose gradients travel as one tensor; a sparse one alone."""
    bucket: list[nn.Parameter] = []
    filled = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        if parameter in sparse:
            yield [parameter]
            continue
        if bucket and (bucket[0].dtype != parameter.dtype or filled + size > _BUCKET_BYTES):
            yield bucket
            bucket, filled = [], 0
        bucket.append(parameter)
        filled += size
    if bucket:
        yield bucket
