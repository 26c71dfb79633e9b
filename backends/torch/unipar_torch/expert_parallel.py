"""Experts divided over ranks: each token travels to the ranks that hold its experts, and back.

Each rank along ``ep`` has other samples. A layer's experts are divided along the first dimension
of their parameters, which become DTensors on the mesh of these ranks, so that FSDP, optimizers and
checkpoints know the whole. A layer sends each pair of a token and one of its experts to the rank
of that expert, computes there by the module's own forward, and sends the outcome back; autograd
sends gradients by the same ways. None is dropped, whatever the router says. (Lepikhin et al.,
arXiv:2006.16668, without its capacity.)
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from unipar.engine import replace_forward
from unipar.errors import ConfigError
from unipar.world import World
from unipar_torch.expert_checks import check_in_first_pass
from unipar_torch.expert_plan import TAKES, ExpertPlan

Undo = Callable[[], None]
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def divide_experts(module: nn.Module, plan: ExpertPlan, world: World) -> list[Undo]:
    """Divide a model's experts over the ranks along ``ep``.

    Args:
        module: the whole model, on the meta device too.
        plan: which modules hold them.
        world: the joined processes.

    Returns:
        What takes back what can be.
    """
    mesh = world.mesh("ep")
    undo: list[Undo] = []
    for name, number in plan.experts.items():
        part = module.get_submodule(name)
        for key, parameter in list(part._parameters.items()):
            if parameter is not None:
                divided = distribute_tensor(
                    parameter.detach(), mesh, [Shard(0)], src_data_rank=None
                )
                part._parameters[key] = nn.Parameter(divided, parameter.requires_grad)
        undo.append(_divide(part, plan.counts[name], number // mesh.size(), mesh.get_group()))
    return undo + check_in_first_pass(module, plan, world, dispatched)


def _divide(experts: nn.Module, counts: tuple[str, ...], number: int, group: Any) -> Undo:
    whole: Any = type(experts).forward

    def local(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return whole(experts, hidden, index, weights)

    # How many tokens go where is known on the device alone, and lists of sizes are the host's.
    @torch.compiler.disable
    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        hidden, index, weights = routed(experts, args, kwargs)
        with local_parameters(experts, counts, number):
            return dispatched(local, hidden, index, weights, number, group)

    return replace_forward(experts, forward)


def routed(
    experts: nn.Module, args: Any, kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, and the numbers and weights of their experts, in the order of experts' own forward.

    By place or by whatever names it has for them.

    Raises:
        ConfigError: experts were called with anything else.
    """
    try:
        bound = inspect.signature(type(experts).forward).bind(experts, *args, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"mesh: {type(experts).__name__}, whose experts ranks divide, was called otherwise "
            f"than its forward says: {error}. Call it with {', '.join(TAKES)}."
        ) from error
    given, others = bound.args[1:], bound.kwargs
    tensors = all(isinstance(one, torch.Tensor) for one in given)
    if others or len(given) != len(TAKES) or not tensors:
        raise ConfigError(
            f"mesh: experts that ranks divide take {', '.join(TAKES)}, and were called with "
            f"{', '.join(type(one).__name__ for one in (*given, *others.values()))}. Call them "
            "with these alone, and let their forward name each."
        )
    hidden, index, weights = given
    if index.is_floating_point():
        raise ConfigError(
            f"mesh: {type(experts).__name__} was called with numbers of experts of {index.dtype}. "
            f"Let its forward take {', '.join(TAKES)}, in this order."
        )
    if index.shape != weights.shape or index.shape[:-1] != hidden.shape[:-1]:
        raise ConfigError(
            "mesh: experts were called with tokens of shape "
            f"{tuple(hidden.shape)}, numbers of experts {tuple(index.shape)} and weights "
            f"{tuple(weights.shape)}. Numbers and weights are of one shape, a row for each token."
        )
    return hidden, index, weights


@contextlib.contextmanager
def local_parameters(experts: nn.Module, counts: tuple[str, ...], number: int) -> Iterator[None]:
    """Let experts find what this rank holds of their parameters, as plain tensors, and how many.

    Others who read how many experts there are (router losses) mean all of them.
    """
    held, before = dict(experts._parameters), {key: getattr(experts, key) for key in counts}
    try:
        for key in counts:
            setattr(experts, key, number)
        for key, parameter in held.items():
            if isinstance(parameter, DTensor):
                experts._parameters[key] = parameter.to_local()  # pyright: ignore
        yield
    finally:
        experts._parameters.update(held)
        for key, value in before.items():
            setattr(experts, key, value)


def dispatched(
    experts: Forward,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    number: int,
    group: Any,
) -> torch.Tensor:
    """What experts make of tokens, each on the rank that holds it. Collective.

    Args:
        experts: those of this rank, by numbers from 0.
        hidden: this rank's tokens, ``(…, width)``.
        index: the numbers of each token's experts, among those of all ranks, ``(…, k)``.
        weights: of each token's experts, ``(…, k)``.
        number: of experts on each rank.
        group: the ranks, in the order of the experts that they hold.

    Returns:
        for each token the sum over its experts, ``(…, width)``.
    """
    ranks, k = group.size(), index.shape[-1]
    chosen = index.reshape(-1)
    # Pairs of a token and an expert, by expert, so also by rank.
    order = chosen.argsort(stable=True)
    sent = torch.zeros(ranks * number, dtype=torch.long, device=chosen.device)
    sent.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=torch.long))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    # The one wait for the device in a layer: lists of sizes are what the collective takes.
    to, come = torch.stack((sent, received)).view(2, ranks, number).sum(2).tolist()

    tokens = _Exchange.apply(hidden.reshape(-1, hidden.shape[-1])[order // k], to, come, group)
    shares = _Exchange.apply(weights.reshape(-1)[order], to, come, group)
    numbers = torch.arange(number, device=chosen.device).repeat(ranks)
    own = torch.repeat_interleave(numbers, received, output_size=sum(come))
    if not sum(come):
        # Every rank's backward pass goes through the same collectives, and gives its experts
        # gradients that FSDP can reduce: nothing times what comes of a token of zeros.
        tokens = torch.cat((tokens, tokens.new_zeros(1, tokens.shape[-1])))
        shares, own = torch.cat((shares, shares.new_zeros(1))), own.new_zeros(1)
    made = experts(tokens, own.unsqueeze(-1), shares.unsqueeze(-1))[: sum(come)]
    back = _Exchange.apply(made, come, to, group)
    # In the order of tokens, so that sums are the same in every run.
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    # No view, for FSDP's hooks on it would be lost where a model adds to it in place.
    return back[places].view(*index.shape, back.shape[-1]).sum(-2)


class _Exchange(torch.autograd.Function):
    """Rows to and from all ranks; their gradients go the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, to: list[int], come: list[int], group: Any
    ) -> torch.Tensor:
        ctx.to, ctx.come, ctx.group = to, come, group
        return _exchanged(rows, to, come, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore
        return _exchanged(gradient, ctx.come, ctx.to, ctx.group), None, None, None


def _exchanged(rows: torch.Tensor, to: list[int], come: list[int], group: Any) -> torch.Tensor:
    received = rows.new_empty(sum(come), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), come, to, group=group)
    return received
