"""Sequence parallelism: between divided layers each rank has a part of the sequence.

The sequence is divided where the first repeated block begins, and gathered where the last one ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from unipar.engine import replace_forward
from unipar.errors import ConfigError
from unipar_torch.layer_cuts import SEQUENCE, Activations, is_gathered
from unipar_torch.tensor_plan import TensorPlan

Undo = Callable[[], None]
HIDDEN = "hidden_states"
"""What models of transformers call a block's input, where they pass it by name."""


def divide_sequences(blocks: Mapping[str, nn.Module], activations: Activations) -> list[Undo]:
    """Divide sequences before the first block, and gather them after the last.

    Args:
        blocks: of the model, in the order in which they run.
        activations: how they go between ranks.

    Raises:
        ConfigError: there are none.
    """
    if not blocks:
        raise ConfigError(
            "mesh: sequence_parallel=true divides sequences between the model's repeated blocks, "
            "and it has none (an nn.ModuleList or nn.Sequential of modules of one class). Leave "
            "sequence_parallel out."
        )
    chain = _Chain(blocks, activations)
    return [
        replace_forward(block, chain.around(number, block.forward))
        for number, block in enumerate(blocks.values())
    ]


def holders_of(blocks: Mapping[str, nn.Module], plan: TensorPlan) -> dict[str, nn.Module]:
    """Modules within blocks that hold layers divided by columns; and one of these layers.

    What such a module computes may go by the length of its input, so that is gathered before.
    """
    found: dict[str, nn.Module] = {}
    for name, block in blocks.items():
        for layer, style in plan.styles.items():
            holder = layer.rpartition(".")[0]
            if holder.startswith(f"{name}.") and style.startswith("colwise"):
                found.setdefault(holder, block.get_submodule(layer[len(name) + 1 :]))
    return found


def enter_before(name: str, holder: nn.Module, layer: nn.Module, activations: Activations) -> Undo:
    """Gather the sequence before a module that holds divided layers is called.

    Args:
        name: of the module.
        holder: the module.
        layer: one of these layers.
        activations: how they go between ranks.
    """
    forward = holder.forward

    def entered(*args: Any, **kwargs: Any) -> Any:
        if not is_gathered(layer.weight):
            return forward(*args, **kwargs)
        hidden = hidden_of(args, kwargs)
        if not isinstance(hidden, torch.Tensor):
            raise ConfigError(
                f"mesh: sequence_parallel=true gathers the sequence before '{name}', and neither "
                f"its first argument nor {HIDDEN}=… is a tensor. Leave sequence_parallel out."
            )
        args, kwargs = with_hidden(args, kwargs, activations.enter(hidden))
        return forward(*args, **kwargs)

    return replace_forward(holder, entered)


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A block's input among its arguments."""
    return args[0] if args else kwargs.get(HIDDEN)


def with_hidden(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], hidden: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A block's arguments with another input."""
    return ((hidden, *args[1:]), dict(kwargs)) if args else ((), {**kwargs, HIDDEN: hidden})


def mapped(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A block's output, of which the first tensor is what goes into the next one."""
    if isinstance(output, tuple):
        return (change(output[0]), *output[1:])
    return change(output)


class _Chain:
    """Blocks that hand on parts of sequences to one another."""

    def __init__(self, blocks: Mapping[str, nn.Module], activations: Activations) -> None:
        self._names, self._activations = list(blocks), activations
        self._handed_on: torch.Tensor | None = None
        self._first_pass = True

    def around(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A block's forward, on parts of sequences."""
        last = len(self._names) - 1

        def divided(*args: Any, **kwargs: Any) -> Any:
            hidden = hidden_of(args, kwargs)
            self._check(number, hidden)
            if number == 0:
                args, kwargs = with_hidden(args, kwargs, self._split(hidden))
            output = forward(*args, **kwargs)
            if number == last:
                self._handed_on, self._first_pass = None, False
                return mapped(output, self._activations.gather_sequence)
            if self._first_pass:
                self._handed_on = output[0] if isinstance(output, tuple) else output
            return output

        return divided

    def _split(self, hidden: torch.Tensor) -> torch.Tensor:
        tp = self._activations.mesh.size()
        if hidden.shape[SEQUENCE] % tp:
            raise ConfigError(
                f"mesh: sequence_parallel=true divides sequences among tp={tp} ranks, and "
                f"'{self._names[0]}' was given some of length {hidden.shape[SEQUENCE]} (an input "
                f"of shape {tuple(hidden.shape)}). Pad them to a multiple of {tp}, or leave "
                "sequence_parallel out."
            )
        return self._activations.split_sequence(hidden)

    def _check(self, number: int, hidden: Any) -> None:
        if not isinstance(hidden, torch.Tensor) or hidden.ndim < 3:
            found = tuple(hidden.shape) if isinstance(hidden, torch.Tensor) else type(hidden)
            raise ConfigError(
                f"mesh: sequence_parallel=true needs blocks whose first argument (or {HIDDEN}=…) "
                f"is of shape (batch, sequence, width), and '{self._names[number]}' was given "
                f"{found}. Leave sequence_parallel out."
            )
        before = self._handed_on
        if number and self._first_pass and before is not None and not _same(before, hidden):
            raise ConfigError(
                f"mesh: sequence_parallel=true has '{self._names[number - 1]}' hand on a part of "
                f"the sequence, and what '{self._names[number]}' is given is not that: the model "
                "does something between its blocks, which may need the whole. Leave "
                "sequence_parallel out."
            )


def _same(before: torch.Tensor, now: torch.Tensor) -> bool:
    """Whether a tensor is another, or a view or a conversion of it, as FSDP makes them."""
    if before.shape != now.shape or before.dtype != now.dtype:
        return before.shape == now.shape
    return before.data_ptr() == now.data_ptr()
