"""Which modules hold a model's experts, found before any process starts.

They are those that the user names; or those of the model's own plan (``_ep_plan`` of transformers);
or those whose forward takes what experts take.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from unipar.errors import ConfigError, did_you_mean, first_few

TAKES = ("hidden_states", "top_k_index", "top_k_weights")
"""What the forward of experts takes: tokens of shape ``(tokens, width)``, and for each token the
numbers and weights of its experts, of shape ``(tokens, k)``. By the names in transformers 5."""

_DIVIDED = "grouped_gemm"
"""How transformers calls a parameter with a row for each expert (5.23,
models/mixtral/configuration_mixtral.py, ``base_model_ep_plan``)."""


@dataclass(frozen=True)
class ExpertPlan:
    """The modules whose experts are divided.

    Attributes:
        source: who says so.
        experts: how many experts each has, by its name.
        counts: the attributes in which each keeps that number, by its name.
    """

    source: str
    experts: Mapping[str, int]
    counts: Mapping[str, tuple[str, ...]]

    def divides(self, parameter: str) -> bool:
        """Whether a parameter's first dimension is that of experts."""
        return any(parameter.startswith(f"{name}.") for name in self.experts)


def make_expert_plan(
    model: nn.Module, ep: int, given: Sequence[str] | None = None, *, efsdp: int = 1
) -> ExpertPlan:
    """Find a model's experts.

    Args:
        model: as the user has built it; on the meta device, too.
        ep: ranks that divide them.
        given: the user's own patterns of module names, in which ``*`` stands for any one part
            between dots.
        efsdp: ranks that have the same experts, and shard them.

    Raises:
        ConfigError: there are none, or they cannot be divided.
    """
    if given is not None:
        source, names = "option experts", _matched(model, given)
    elif names := _own(model):
        source = "the model's own plan (_ep_plan)"
    else:
        source = f"their forward takes {', '.join(TAKES)}"
        names = [name for name, module in model.named_modules() if name and takes_experts(module)]
    if not names:
        raise ConfigError(
            f"mesh: ep={ep} divides experts, and {type(model).__name__} has none that are known: "
            f"no module's forward takes ({', '.join(TAKES)}), and the model has no plan for them. "
            "Leave ep out; or hold all experts of a layer in one module with such a forward, whose "
            "parameters have a row for each expert, and name it by experts=[…] if its arguments "
            f"have other names.{_lists(model)}"
        )
    experts = {name: _number(name, model.get_submodule(name)) for name in names}
    for name, number in experts.items():
        if number % ep:
            divisors = [n for n in range(2, number + 1) if number % n == 0]
            raise ConfigError(
                f"mesh: ep={ep} does not divide the {number} experts of '{name}'. Set ep to "
                f"{' or '.join(map(str, divisors)) or '1'}."
            )
        for parameter in model.get_submodule(name).parameters():
            shard_dim((number // ep, *parameter.shape[1:]), efsdp)
    _refuse_shared(model, experts)
    counts = {name: _counts(model.get_submodule(name), n) for name, n in experts.items()}
    return ExpertPlan(source, experts, counts)


def takes_experts(module: nn.Module) -> bool:
    """Whether a module's forward says of itself that it is one of experts."""
    return tuple(_parameters(module))[: len(TAKES)] == TAKES


def _parameters(module: nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)[1:]


def _own(model: nn.Module) -> list[str]:
    """The modules whose parameters a model of transformers has a row for each expert in."""
    # transformers 5.23, modeling_utils.py, PreTrainedModel.post_init.
    own = getattr(model, "_ep_plan", None)
    if not isinstance(own, Mapping):
        return []
    patterns = {pattern.rpartition(".")[0] for pattern, style in own.items() if style == _DIVIDED}
    names = [name for name, _ in model.named_modules()]
    found = [name for name in names if any(_matcher(p).fullmatch(name) for p in patterns)]
    # Layers that the plan has for other sizes of the model may be dense ones in this.
    return [name for name in found if any(True for _ in model.get_submodule(name).parameters())]


def _matched(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    names = [name for name, _ in model.named_modules() if name]
    chosen: list[str] = []
    for pattern in patterns:
        found = [name for name in names if _matcher(pattern).fullmatch(name)]
        if not found:
            raise ConfigError(
                f"mesh: experts: '{pattern}' names no module of the model."
                f"{did_you_mean(pattern, names)} A * stands for one part of a name."
            )
        chosen += [name for name in found if name not in chosen]
    if not chosen:
        raise ConfigError("mesh: experts is empty. Name modules, or leave the option out.")
    return chosen


def _matcher(pattern: str) -> re.Pattern[str]:
    return re.compile(
        r"\.".join(r"[^.]+" if p == "*" else re.escape(p) for p in pattern.split("."))
    )


def _number(name: str, module: nn.Module) -> int:
    """How many experts a module has.

    Raises:
        ConfigError: it does not say.
    """
    shapes = {key: tuple(p.shape) for key, p in module.named_parameters()}
    if isinstance(module, nn.ModuleList) or not shapes:
        raise ConfigError(
            f"mesh: '{name}' ({type(module).__name__}) holds its experts as modules, or has no "
            "parameters, and what ranks divide is the first dimension of parameters. Stack the "
            "experts' parameters, and give the module that holds them a "
            f"forward({', '.join(TAKES)})."
        )
    numbers = {shape[0] for shape in shapes.values() if shape}
    if len(numbers) > 1 or not all(shapes.values()):
        said = ", ".join(f"{key} {list(shape)}" for key, shape in shapes.items())
        raise ConfigError(
            f"mesh: parameters of experts have a row for each of them, and those of '{name}' "
            f"({type(module).__name__}) do not agree on how many there are: {said}. Keep other "
            "parameters (routers, shared experts, norms) in a module of their own."
        )
    if len(shapes) != len(list(module.parameters(recurse=False))):
        raise ConfigError(
            f"mesh: experts '{name}' ({type(module).__name__}) hold parameters in modules of their "
            "own. Hold them in the module itself."
        )
    if "forward" in vars(module):
        raise ConfigError(
            f"mesh: experts '{name}' ({type(module).__name__}) have a forward of their own, set on "
            "the module itself, and ranks that divide them call the one of its class. Write it as "
            "the forward of a subclass."
        )
    (number,) = numbers
    if whole := [key for key, b in module.named_buffers() if b.shape[:1] == (number,)]:
        raise ConfigError(
            f"mesh: experts '{name}' ({type(module).__name__}) have buffers with a row for each of "
            f"them ({first_few(whole)}), and only parameters are divided. Make them parameters "
            "(with requires_grad=False where nothing is learned), or keep them in another module."
        )
    return number


def _refuse_shared(model: nn.Module, experts: Mapping[str, int]) -> None:
    seen: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = seen.setdefault(id(parameter), name)
        held = [n for n in (first, name) if any(n.startswith(f"{e}.") for e in experts)]
        if first != name and held:
            raise ConfigError(
                f"mesh: '{first}' and '{name}' are one parameter, and experts that ranks divide "
                "share none. Give them parameters of their own."
            )


def _counts(module: nn.Module, number: int) -> tuple[str, ...]:
    return tuple(
        key
        for key, value in vars(module).items()
        if "expert" in key and type(value) is int and value == number
    )


def _lists(model: nn.Module) -> str:
    """A word on what looks like experts, and is none that can be divided."""
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and "expert" in name.rpartition(".")[2]
    ]
    return f" Experts in lists of modules ({first_few(lists)}) are not divided." if lists else ""


def remarks(plan: ExpertPlan, ep: int) -> Iterator[tuple[str, str]]:
    """What a plan does, in words."""
    yield "experts divided over ep", plan.source
    for name, number in plan.experts.items():
        yield name, f"{number} experts, {number // ep} on each rank of ep={ep}"


def shard_dim(shape: Sequence[int], ranks: int) -> int:
    """The dimension along which FSDP divides a rank's part of an experts' parameter.

    The first that divides evenly: the experts themselves where there are enough of them.

    Raises:
        ConfigError: none does.
    """
    for dim, size in enumerate(shape):
        if size % ranks == 0:
            return dim
    raise ConfigError(
        f"mesh: a rank's part of experts has the shape {list(shape)}, and no dimension of it "
        f"divides by {ranks} (dp_shard / ep), the ranks that have the same experts. Set ep or "
        "dp_shard so that one does."
    )
