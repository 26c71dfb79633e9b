"""Divided experts held against whole ones, with numbers: once, in the first pass.

In the mode in which it is called, in fp32, without dropout, on a few of the tokens that a layer of
each kind was given, sent to experts of every rank: its output, and the gradients of tokens, of
weights and of each parameter. What differs is refused by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from unipar.engine import Undo, replace_forward
from unipar.engine.trials import trial
from unipar.errors import ConfigError
from unipar.world import World
from unipar_torch.expert_plan import ExpertPlan
from unipar_torch.layer_checks import TOLERANCE, _apart, _difference, _factors, _settings, visible

Dispatched = Callable[..., torch.Tensor]

_TOKENS = 64
_EXPERTS = 2
"""Of each rank: a layer's experts whole may be more than a device holds."""


def check_in_first_pass(
    model: nn.Module, plan: ExpertPlan, world: World, dispatched: Dispatched
) -> list[Undo]:
    """Have experts of each kind compared with themselves undivided, when they are first called.

    Args:
        model: the whole model, its experts divided.
        plan: which modules hold them.
        world: the joined processes.
        dispatched: computes with divided experts.
    """
    kinds: dict[Any, str] = {}
    for name in plan.experts:
        module = model.get_submodule(name)
        kinds.setdefault((type(module), _settings(module)), name)
    return [_Check(name, model, plan, world, dispatched).install() for name in kinds.values()]


def _uneven(tokens: int, k: int, experts: int) -> torch.Tensor:
    """Different experts for each token: many go to the first, and the rest evenly to the others.

    Not as the router says, which may leave almost all without any; and not evenly, for then experts
    that take only so many tokens would drop none.
    """
    rest = max(k - 1, 1)
    others = torch.arange(tokens * rest).view(tokens, rest) % (experts - 1) + 1
    if k == 1:
        return others.masked_fill((torch.arange(tokens) < (tokens + 1) // 2).unsqueeze(-1), 0)
    return torch.cat((torch.zeros_like(others[:, :1]), others), 1)


class _Check:
    def __init__(
        self, name: str, model: nn.Module, plan: ExpertPlan, world: World, dispatched: Dispatched
    ) -> None:
        self._name, self._model, self._world = name, model, world
        self._experts = experts = model.get_submodule(name)
        self._source, self._counts = plan.source, plan.counts[name]
        self._dispatched = dispatched
        # FSDP gives it another class.
        self._kind, self._whole = type(experts).__name__, type(experts).forward
        self._group = world.mesh("ep").get_group()

    def install(self) -> Undo:
        experts = self._experts
        divided = experts.forward
        done: set[bool] = set()

        def checked(*args: Any, **kwargs: Any) -> Any:
            if experts.training not in done:
                done.add(experts.training)
                if experts.training:
                    undo()
                self._compare(args, kwargs)
            return divided(*args, **kwargs)

        undo = replace_forward(experts, torch.compiler.disable(checked))
        return undo

    def _compare(self, args: Any, kwargs: Any) -> None:
        from unipar_torch.expert_parallel import routed

        found = self._problem(*routed(self._experts, args, kwargs))
        problem = next(filter(None, self._world.gather(found)), None)
        if problem:
            raise ConfigError(
                f"mesh: dividing the experts of '{self._name}' ({self._kind}; {self._source}) "
                f"changes what they compute: {problem}. Each token's output has to be the sum over "
                "its experts, each of which reads one row of the parameters, found by its number; "
                "the number of experts is read from attributes with 'expert' in their name "
                f"(here: {', '.join(self._counts) or 'none'}). Name other modules by experts=[…], "
                "or leave ep out."
            )

    def _problem(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> str:
        experts, ranks = self._experts, self._group.size()
        held: dict[str, Any] = {
            key: p for key, p in experts._parameters.items() if isinstance(p, DTensor)
        }
        number = min(_EXPERTS, *(p.to_local().shape[0] for p in held.values()))
        with _apart(self._world.device):
            own = {
                key: visible(p.detach().to_local()[:number].float(), place).clone()
                for place, (key, p) in enumerate(held.items())
            }
            whole = {key: self._gathered(part) for key, part in own.items()}
            # Of more than two, the last gets no token.
            used = max(number * ranks - 1, 2)
            k = min(index.shape[-1], used)
            tokens = hidden.detach().reshape(-1, hidden.shape[-1])[:_TOKENS].float()
            shares = weights.detach().reshape(-1, index.shape[-1])[:_TOKENS, :k].float()
            numbers = _uneven(len(tokens), k, used).to(index)

            def run(experts: Any) -> torch.Tensor:
                return self._whole(self._experts, *experts)

            def divided(*given: torch.Tensor) -> torch.Tensor:
                return self._dispatched(lambda *rows: run(rows), *given, number, self._group)

            expected = self._run(
                lambda *given: run(given), whole, number * ranks, tokens, numbers, shares
            )
            try:
                found = self._run(divided, own, number, tokens, numbers, shares)
            except ConfigError:
                raise
            except Exception as error:
                return f"divided, it raises {type(error).__name__} ({str(error)[:160]})"
            for key in own:
                name = f"the gradient of {key}"
                if name in expected:
                    total = expected[name]
                    dist.all_reduce(total, group=self._group)
                    expected[name] = total.chunk(ranks)[self._group.rank()]
        largest = max((t.abs().max().item() for t in expected.values() if t.numel()), default=0.0)
        for what, one in expected.items():
            if said := _difference(found.get(what), one, TOLERANCE * largest):
                return f"{what} {said}"
        return ""

    def _gathered(self, part: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(part) for _ in range(self._group.size())]
        dist.all_gather(parts, part.contiguous(), group=self._group)
        return torch.cat(parts)

    def _run(
        self,
        compute: Callable[..., torch.Tensor],
        parameters: dict[str, torch.Tensor],
        number: int,
        tokens: torch.Tensor,
        numbers: torch.Tensor,
        shares: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Output and gradients, by what they are."""
        wanted = {f"the gradient of {key}": p.requires_grad_() for key, p in parameters.items()}
        tokens, shares = tokens.clone().requires_grad_(), shares.clone().requires_grad_()
        wanted |= {"the gradient of tokens": tokens, "the gradient of weights": shares}
        with self._replaced(parameters, number), trial(self._model, self._world.device):
            output = compute(tokens, numbers, shares)
            seen = {"the output": output.detach()}
            total = (output * _factors(output)).sum()
            gradients = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
        for (name, one), gradient in zip(wanted.items(), gradients, strict=True):
            seen[name] = torch.zeros_like(one) if gradient is None else gradient.detach()
        return seen

    @contextlib.contextmanager
    def _replaced(self, parameters: dict[str, torch.Tensor], number: int) -> Iterator[None]:
        experts = self._experts
        held, counts = dict(experts._parameters), {k: getattr(experts, k) for k in self._counts}
        try:
            experts._parameters.update(parameters)  # pyright: ignore
            for key in counts:
                setattr(experts, key, number)
            yield
        finally:
            experts._parameters.update(held)
            for key, value in counts.items():
                setattr(experts, key, value)
