"""The stages of this rank, run over all micro-batches of a batch, and what goes between them.

What a stage sends may be of another shape in each micro-batch. Its shape follows from that of the
model's inputs, which all stages have: it is told, from host to host, once for each shape of those.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import keystr, tree_flatten_with_path

from unipar.engine import PassClock, StageCall, backward_pass
from unipar.errors import ConfigError
from unipar.world import World
from unipar_torch.stage_absent import absent_listed
from unipar_torch.stage_attributes import AttributeUse
from unipar_torch.stage_buffers import BufferChanges
from unipar_torch.stage_checks import NUM_COMPARED, check_loss, compare, digest, run_checked
from unipar_torch.stage_modules import Stage
from unipar_torch.stage_orders import STYLES, Action, ScheduleName, bubble, order_of
from unipar_torch.stage_plan import rank_of_stage

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_DIMS = 8
_HEADER = 4 + _MOST_DIMS + 2 * NUM_COMPARED

Kind = tuple[torch.Size, torch.dtype]
Key = tuple[int, int]
"""A stage, and the number of a micro-batch."""


class StageSchedule:
    """Runs stages as a schedule of torch's says; a :class:`unipar.engine.TimedSchedule`.

    Args:
        stages: this rank's, in their order.
        schedule: by name.
        world: the joined processes.
        before_backward: called before each backward pass of a stage, with the stage and whether
            it is its last one of the batch.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: ScheduleName,
        world: World,
        before_backward: Callable[[Stage, bool], None] | None = None,
    ) -> None:
        self.before_backward = before_backward
        self.clock: PassClock | None = None
        self.stages = {stage.index: stage for stage in stages}
        self.name: ScheduleName = schedule
        self.world = world
        layout = world.layout
        self.pp, self.num_stages = layout.pp, stages[0].plan.num_stages
        self.group = world.mesh("pp").get_group()
        ranks = rank_of_stage(self.num_stages, self.pp, STYLES.get(schedule, "loop"))
        self.peers = [dist.get_global_rank(self.group, rank) for rank in ranks]
        # Tables count ranks from the one with the first stage.
        self._place = min(self.stages)
        self.known: dict[tuple[int, Any], Kind] = {}
        """What goes into a stage, by the shapes of the model's inputs."""
        # A model may compute something else in evaluation.
        self.unchecked = {(stage, training) for stage in self.stages for training in (True, False)}
        self.changes: BufferChanges | None = None
        self.attributes: AttributeUse | None = None
        """Of the first batch of training, as the changes of buffers."""
        self._compared = False

    def run(self, calls: Sequence[StageCall], *, training: bool) -> None:
        virtual = self.num_stages // self.pp
        args = (self.name, self.pp, virtual, len(calls), self._place)
        batch = _Batch(self, calls, training=training)
        if not training or self._compared:
            batch.run(order_of(*args, training=training))
            return
        self.changes, self.attributes = BufferChanges(), AttributeUse()
        try:
            batch.run(order_of(*args, training=training))
            self.changes.check(self.stages[self._place], self.peers, self.name, self.world)
            self.attributes.check(self.world)
        finally:
            self.changes = self.attributes = None
        self._compared = True

    def bubble(self, microbatches: int) -> float | None:
        """The share of a step that each rank idles, where a formula is known."""
        return bubble(self.name, self.pp, self.num_stages // self.pp, microbatches)

    def share(self, values: torch.Tensor) -> None:
        dist.broadcast(values, self.peers[-1], group=self.group)


class _Batch:
    """One run over the micro-batches of a batch."""

    def __init__(
        self, schedule: StageSchedule, calls: Sequence[StageCall], *, training: bool
    ) -> None:
        self._schedule, self._calls, self._training = schedule, calls, training
        self._stages, self._peers = schedule.stages, schedule.peers
        self._given: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._shapes: dict[int, Any] = {}
        self._inputs: dict[Key, torch.Tensor] = {}
        """What a stage was given, and in training its gradient."""
        self._outputs: dict[Key, torch.Tensor] = {}
        """What it has computed: the hidden state, or the loss."""
        self._gradients: dict[Key, torch.Tensor] = {}
        """Of what it has computed."""
        self._told: dict[Key, list[float]] = {}
        """What the stage before has given the first block beside the hidden state."""
        self._split: dict[Key, Any] = {}
        self._arriving: dict[tuple[str, int, int], dist.Work] = {}
        self._leaving: list[tuple[dist.Work, torch.Tensor]] = []
        self._backwards = dict.fromkeys(self._stages, 0)
        self._clock = schedule.clock if training else None
        self._computing = nullcontext if self._clock is None else self._clock.computing

    def run(self, order: Sequence[Action]) -> None:
        steps = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward_of_input,
            "W": self._backward_of_weights,
            "SEND_F": self._send_forward,
            "RECV_F": self._receive_forward,
            "SEND_B": self._send_backward,
            "RECV_B": self._receive_backward,
        }
        with self._timed():
            for action in order:
                steps[action.kind](action.stage, action.microbatch)
            for work, _ in self._leaving:
                work.wait()

    def _timed(self) -> AbstractContextManager[None]:
        if self._clock is None:
            return nullcontext()
        return self._clock.batch(self._schedule.bubble(len(self._calls)))

    # -- passes ----------------------------------------------------------------------------------

    def _forward(self, index: int, number: int) -> None:
        stage, call, key = self._stages[index], self._calls[number], (index, number)
        self._wait("F", key)
        args, kwargs = self._arguments(number)
        received = self._inputs.get(key)
        if received is not None and self._training:
            received.requires_grad_()
        check = (index, self._training) in self._schedule.unchecked
        changes = self._schedule.changes
        counting = changes.counting(stage) if changes is not None else nullcontext()
        uses = self._schedule.attributes
        watching = uses.watching(stage) if uses is not None else nullcontext()
        with self._computing(), call.computing(), counting, watching:
            run = run_checked if check else Stage.run
            output = run(stage, args, kwargs, received)
            if key in self._told:
                compare(stage, self._told.pop(key))
            if stage.is_last:
                with absent_listed(one.absent for one in self._stages.values()):
                    output = call.loss(output)
                if check:
                    check_loss(stage, output, received)
        self._schedule.unchecked -= {(index, self._training)} if check else set()
        if self._training or not (stage.is_last or index + 1 in self._stages):
            self._outputs[key] = output
        if not self._training:
            self._inputs.pop(key, None)
        if index == max(self._stages):
            del self._given[number]
        if index + 1 in self._stages:
            self._hand_on(stage, number, output)

    def _hand_on(self, stage: Stage, number: int, output: torch.Tensor) -> None:
        """Give the next stage its input, on this rank."""
        after = stage.index + 1
        if (after, self._shapes[number]) not in self._schedule.known:
            self._told[after, number] = digest(stage.others)
            self._schedule.known[after, self._shapes[number]] = output.shape, output.dtype
        self._inputs[after, number] = output.detach()

    def _backward(self, index: int, number: int) -> None:
        key = index, number
        self._wait("B", key)
        output = self._outputs.pop(key)
        gradient = self._gradients.pop(key, None)
        self._backwards[index] += 1
        if self._schedule.before_backward is not None:
            last = self._backwards[index] == len(self._calls)
            self._schedule.before_backward(self._stages[index], last)
        # All that leads here may be frozen.
        if output.requires_grad:
            with self._computing(), backward_pass():
                torch.autograd.backward(output, gradient)
        self._input_done(key)

    def _backward_of_input(self, index: int, number: int) -> None:
        key = index, number
        stage = self._stages[index]
        if stage.is_first:
            # There is no gradient of an input to be early with.
            return
        self._wait("B", key)
        output, gradient = self._outputs.pop(key), self._gradients.pop(key, None)
        if output.requires_grad:
            # torch 2.13, distributed/pipelining/_backward.py, detaches what it is given in place,
            # which views cannot be.
            output = output.clone() if output._is_view() else output
            gradients = None if gradient is None else [gradient]
            first, _ = _torch_backwards()
            given, weights = [self._inputs[key]], stage.module.parameters()
            start = get_gradient_edge(output), gradient
            if gradient is None:
                start = start[0], torch.ones_like(output)
            with self._computing(), backward_pass():
                (found,), self._split[key] = first([output], gradients, given, weights)
            if found is None:
                # Torch finds weights on the way to the input, and no way leads there (the model
                # stops gradients). Then all of it is the backward pass of weights.
                self._split[key] = start
        self._input_done(key)

    def _backward_of_weights(self, index: int, number: int) -> None:
        stage = self._stages[index]
        if stage.is_first:
            self._backward(index, number)
            return
        groups = self._split.pop((index, number), None)
        if groups is None:
            return
        with self._computing(), backward_pass():
            if isinstance(groups, tuple):
                torch.autograd.backward(*groups)
            else:
                _, second = _torch_backwards()
                second(stage.module.parameters(), groups)

    def _input_done(self, key: Key) -> None:
        received = self._inputs.get(key)
        if received is None:
            return
        if received.grad is None:
            received.grad = torch.zeros_like(received)
        before = key[0] - 1, key[1]
        if before[0] in self._stages:
            self._gradients[before] = self._inputs.pop(key).grad  # pyright: ignore

    # -- between ranks ---------------------------------------------------------------------------

    def _send_forward(self, index: int, number: int) -> None:
        stage, output = self._stages[index], self._outputs[index, number].detach().contiguous()
        if not self._training:
            del self._outputs[index, number]
        after, kind = index + 1, (output.shape, output.dtype)
        known = self._schedule.known.setdefault((after, self._shapes[number]), kind)
        if known is kind:
            self._send(_header(stage, output), after)
        elif known != kind:
            raise ConfigError(
                f"mesh: {stage.name} gives {tuple(output.shape)} {output.dtype}, and gave "
                f"{tuple(known[0])} {known[1]} for inputs of the same shapes. pp needs shapes that "
                "follow from those of the model's inputs."
            )
        self._send(output, after)

    def _receive_forward(self, index: int, number: int) -> None:
        self._arguments(number)
        shapes = index, self._shapes[number]
        if shapes not in self._schedule.known:
            header = torch.empty(_HEADER, dtype=torch.float64, device="cpu")
            dist.recv(header, self._peers[index - 1], group=self._schedule.group)
            self._schedule.known[shapes], self._told[index, number] = _read(header)
        shape, dtype = self._schedule.known[shapes]
        received = torch.empty(shape, dtype=dtype, device=self._schedule.world.device)
        self._inputs[index, number] = received
        self._arriving["F", index, number] = self._receive(received, index - 1)

    def _send_backward(self, index: int, number: int) -> None:
        gradient = self._inputs.pop((index, number)).grad
        assert gradient is not None
        self._send(gradient.contiguous(), index - 1)

    def _receive_backward(self, index: int, number: int) -> None:
        gradient = torch.empty_like(
            self._outputs[index, number], memory_format=torch.contiguous_format
        )
        self._gradients[index, number] = gradient
        self._arriving["B", index, number] = self._receive(gradient, index + 1)

    def _send(self, tensor: torch.Tensor, stage: int) -> None:
        work = dist.isend(tensor, self._peers[stage], group=self._schedule.group)
        assert work is not None
        # What has been sent need not be kept.
        self._leaving = [one for one in self._leaving if not one[0].is_completed()]
        self._leaving.append((work, tensor))

    def _receive(self, tensor: torch.Tensor, stage: int) -> dist.Work:
        work = dist.irecv(tensor, self._peers[stage], group=self._schedule.group)
        assert work is not None
        return work

    def _wait(self, kind: str, key: Key) -> None:
        work = self._arriving.pop((kind, *key), None)
        if work is not None:
            work.wait()

    # -- the model's inputs ----------------------------------------------------------------------

    def _arguments(self, number: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if number not in self._given:
            self._given[number] = self._calls[number].inputs()
            self._shapes[number] = self._training, _shapes(self._given[number])
        return self._given[number]


def _shapes(given: Any) -> Any:
    """What the shapes of all that goes between stages follow from; equal on every rank."""
    leaves, structure = tree_flatten_with_path(given)
    return str(structure), tuple(_shape(keystr(path), leaf) for path, leaf in leaves)


def _shape(place: str, leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype
    if leaf is None or isinstance(leaf, numbers.Integral | str | torch.dtype):
        return type(leaf).__name__, leaf
    if isinstance(leaf, numbers.Number):
        # It may be another in each step, and shapes do not follow from fractions.
        return type(leaf).__name__
    raise ConfigError(
        f"mesh: the model is given a {type(leaf).__name__} ({place} of its args, kwargs), and the "
        "stages of a pipeline cannot tell from it, each for itself, which shapes they send each "
        "other. Give the model tensors, numbers, strings and None, in tuples, lists and dicts; in "
        "Objective(inputs=…) if there is one."
    )


def _header(stage: Stage, output: torch.Tensor) -> torch.Tensor:
    """The shape and dtype of what is sent, and the digest of what is not."""
    if output.ndim > _MOST_DIMS or output.dtype not in _DTYPES:
        raise ConfigError(
            f"mesh: {stage.name} gives a {output.dtype} tensor of {output.ndim} dimensions, and "
            f"stages send floating point numbers of {_MOST_DIMS} at most."
        )
    numbers = digest(stage.others)
    header = torch.zeros(_HEADER, dtype=torch.float64, device="cpu")
    filled = [output.ndim, _DTYPES.index(output.dtype), len(numbers), *output.shape]
    header[: len(filled)] = torch.tensor(filled, dtype=torch.float64, device="cpu")
    begin = 3 + _MOST_DIMS
    values = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    header[begin : begin + len(numbers)] = values
    return header


def _read(header: torch.Tensor) -> tuple[Kind, list[float]]:
    values = header.tolist()
    ndim, dtype, count = map(int, values[:3])
    begin = 3 + _MOST_DIMS
    shape = torch.Size(map(int, values[3 : 3 + ndim]))
    return (shape, _DTYPES[dtype]), values[begin : begin + count]


def _torch_backwards() -> tuple[Any, Any]:
    """Gradients of inputs, and of weights later."""
    # torch 2.13, distributed/pipelining/_backward.py.
    from torch.distributed.pipelining import _backward

    return _backward.stage_backward_input, _backward.stage_backward_weight
