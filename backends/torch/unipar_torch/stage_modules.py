"""A stage: the whole model, of which other stages' tensors are missing.

Its forward is the model's own, called with the model's own inputs, so that masks, positions and
whatever else is made from them are made on every stage. Blocks of earlier stages are passed by; the
first block of the stage takes what the stage before has sent in the place of its input; where the
next stage's first block is called, the stage is over. Tensors of other stages are stood in for by
one number each, which costs no memory, and which nothing that counts is computed from: it is not a
number, so what comes to depend on it later shows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from unipar.engine import replace_forward
from unipar.errors import ConfigError
from unipar.state import is_dtensor
from unipar_torch.sequences import HIDDEN, hidden_of, with_hidden
from unipar_torch.stage_absent import AbsentTensors
from unipar_torch.stage_plan import StagePlan

Undo = Callable[[], None]


class _StageOver(Exception):
    """The next stage's first block was called."""

    def __init__(self, hidden: torch.Tensor, others: Any) -> None:
        super().__init__()
        self.hidden, self.others = hidden, others


class Stage:
    """One stage of a model.

    Args:
        module: the whole model; its parameters of other stages go.
        plan: where the model is cut.
        index: of the stage.
        device: where the stage computes.
        casts: the dtype that parameters are cast to before they are computed with; ``None``: their
            own.

    Attributes:
        module: the model, called by :meth:`run` alone.
        device: where it computes.
        others: what a pass has given the next stage's first block beside the hidden state, after a
            pass; the arguments with the hidden state taken out.
        entered: what a pass has given this stage's first block likewise.
        runs: how many passes there were.
        stand_ins: one number for each tensor of another stage, by name.
        absent: those tensors, as a loss function finds them.
        ends: nodes of autograd's graph by which the loss may depend on blocks, in a checked pass.
        at_entry: called where a pass comes to the stage's first block.
        copies: what is computed with in the place of a parameter, by pairs, where that is another
            tensor.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: StagePlan,
        index: int,
        device: torch.device,
        casts: torch.dtype | None = None,
    ) -> None:
        self.module, self.plan, self.index, self.device = module, plan, index, device
        self._casts = casts
        self.is_first, self.is_last = index == 0, index == plan.num_stages - 1
        self.others: Any = None
        self.entered: Any = None
        self.runs = 0
        self.stand_ins: dict[str, torch.Tensor] = {}
        self.absent = AbsentTensors(device)
        self.ends: tuple[Any, ...] = ()
        self.at_entry: Callable[[], None] | None = None
        self.copies: Callable[[], Iterable[tuple[nn.Parameter, torch.Tensor]]] = tuple
        self._received: torch.Tensor | None = None
        self._inside = self._over = False
        self._leave_out(device)

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"stage {self.index} ({', '.join(self.plan.blocks(self.index))})"

    def owns(self, name: str) -> bool:
        """Whether a parameter or buffer is one of this stage's."""
        return self.index in self.plan.owners[name]

    def install(self) -> list[Undo]:
        """Have the forward pass begin and end with the stage, once all else is done to it."""
        undo: list[Undo] = []
        first = self.plan.firsts[self.index]
        end = first + len(self.plan.blocks(self.index))
        for number, name in enumerate(self.plan.chain):
            block = self.module.get_submodule(name)
            if number < first:
                undo.append(replace_forward(block, functools.partial(self._pass_by, name)))
            elif number == first:
                # Before the hooks of FSDP and others, which look at what a block is given.
                enter = functools.partial(self._enter, name)
                hook = block.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
                undo.append(hook.remove)
            elif number == end:
                undo.append(replace_forward(block, functools.partial(self._end, name)))
        undo.append(replace_forward(self.module, self._until_over(self.module.forward)))
        return undo

    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], received: torch.Tensor | None
    ) -> Any:
        """The stage's forward pass.

        Args:
            args: of the model.
            kwargs: of the model.
            received: what the stage before has computed; ``None`` on the first.

        Returns:
            What goes to the next stage, or on the last one what the model returns.

        Raises:
            ConfigError: the model does not go through its blocks once, in their order.
        """
        self._received, self._inside, self._over = received, False, False
        self.others = self.entered = None
        self.runs += 1
        try:
            output = self.module(*args, **kwargs)
        finally:
            self._received = None
        if not self._inside or self._over == self.is_last:
            missing = self.plan.blocks(self.index)[0] if not self._inside else self._next
            raise ConfigError(
                f"mesh: {self.name} of the model came to an end without a call of '{missing}'. pp "
                "needs a model that calls all of its blocks, once and in their order, in every "
                "forward pass. Leave out what drops layers, or use dp_shard, which divides any "
                "model."
            )
        return output

    @contextmanager
    def standing_in(self, value: float, given: float | None = None) -> Iterator[None]:
        """Let a number stand in for what other stages have.

        Args:
            value: the number.
            given: another one for what the blocks of earlier stages give.
        """
        self._fill_in(value)
        if given is not None:
            self._fill = given
        try:
            yield
        finally:
            self._fill_in(math.nan)

    _fill = math.nan

    def _fill_in(self, value: float) -> None:
        self._fill = value
        for one in self.stand_ins.values():
            # Counters and masks cannot be what is not a number.
            one.fill_(value if _is_inexact(one) else not math.isnan(value))

    @property
    def _next(self) -> str:
        return self.plan.chain[self.plan.firsts[self.index + 1]]

    def _leave_out(self, device: torch.device) -> None:
        for prefix, part in list(self.module.named_modules(remove_duplicate=False)):
            for key, value in list(part._parameters.items()):
                name = f"{prefix}.{key}" if prefix else key
                if value is not None and not self.owns(name):
                    self.absent.add(part, part._parameters, key, name)
                    del part._parameters[key]
                    # In the instance's dictionary it is found before parameters are looked up.
                    part.__dict__[key] = self._stand_in(name, value, device)
            for key, value in list(part._buffers.items()):
                name = f"{prefix}.{key}" if prefix else key
                # Others' may be what positions or masks are made of, outside of blocks.
                within = any(name.startswith(f"{block}.") for block in self.plan.chain)
                if value is not None and within and not self.owns(name):
                    self.absent.add(part, part._buffers, key, name)
                    delattr(part, key)
                    part.__dict__[key] = self._stand_in(name, value, device)

    def _stand_in(self, name: str, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        if name not in self.stand_ins:
            dtype = value.dtype
            if isinstance(value, nn.Parameter) and value.is_floating_point():
                dtype = self._casts or dtype
            one = torch.zeros((), dtype=dtype, device=device)
            self.stand_ins[name] = one.fill_(math.nan) if _is_inexact(one) else one
        return self.stand_ins[name].expand(value.shape)

    # -- on the way through the model ------------------------------------------------------------

    def _pass_by(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            raise _out_of_order(name)
        hidden = hidden_of(args, kwargs)
        if not isinstance(hidden, torch.Tensor):
            return hidden
        dtype = hidden.dtype if hidden.is_floating_point() else torch.get_default_dtype()
        return torch.full_like(hidden, self._fill, dtype=dtype)

    def _enter(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._inside:
            raise _out_of_order(name)
        self._inside = True
        if self.at_entry is not None:
            self.at_entry()
        if self._received is None:
            return None
        self.entered = _checked(name, args, kwargs)
        return with_hidden(args, kwargs, self._received)

    def _end(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if not self._inside:
            raise _out_of_order(name)
        others = _checked(name, args, kwargs)
        raise _StageOver(hidden_of(args, kwargs), others)

    def _until_over(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def until_over(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            except _StageOver as over:
                self._over, self.others = True, over.others
                return over.hidden

        return until_over


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a DTensor; a plain tensor is itself."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _checked(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a block is given beside its input."""
    hidden = hidden_of(args, kwargs)
    if not isinstance(hidden, torch.Tensor) or not hidden.is_floating_point():
        found = f"{hidden.dtype}" if isinstance(hidden, torch.Tensor) else type(hidden).__name__
        raise ConfigError(
            f"mesh: pp cuts the model before '{name}', whose first argument (or {HIDDEN}=…) has to "
            f"be a tensor of floating point numbers, and it is given a {found}. Cut it elsewhere "
            "by stages=[[…], […]], or use dp_shard, which divides any model."
        )
    # New lists and mappings, as the block may change those that it is given.
    return tree_map(lambda leaf: leaf, with_hidden(args, kwargs, None))


def _out_of_order(name: str) -> ConfigError:
    return ConfigError(
        f"mesh: the model calls '{name}' out of order, or twice. pp needs a model that calls its "
        "blocks once and in their order, in every forward pass. If the model recomputes its blocks "
        "itself (torch.utils.checkpoint), which calls them again in the backward pass, turn that "
        "off and set activation_checkpointing='full'. Else cut it elsewhere by stages=[[…], […]], "
        "or use dp_shard, which divides any model."
    )
