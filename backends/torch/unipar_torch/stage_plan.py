"""Where a model is cut into stages, and which stage has which of its tensors.

A model is cut before some of its blocks. Which blocks there are, and what comes before and after
them, is said by the user, by the model (transformers' ``base_model_pp_plan``), or by the order in
which modules stand in the model. What is planned here is held against numbers in the first pass
(:mod:`unipar_torch.stage_checks`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from unipar.engine import has_forward, repeated_blocks
from unipar.errors import ConfigError, did_you_mean, first_few

Stages = Sequence[Sequence[str]]
"""Names of the modules of each stage, as a user gives them."""


@dataclass(frozen=True)
class StagePlan:
    """A model cut into stages.

    Attributes:
        source: who says what comes before and after the blocks.
        chain: the names of the blocks, in the order in which they run.
        firsts: the index of each stage's first block; each stage but the first begins before it.
        owners: the stages that have a parameter or buffer, by each of its names. A parameter with
            several owners is tied.
    """

    source: str
    chain: tuple[str, ...]
    firsts: tuple[int, ...]
    owners: Mapping[str, tuple[int, ...]]

    @property
    def num_stages(self) -> int:
        return len(self.firsts)

    def blocks(self, stage: int) -> tuple[str, ...]:
        """The names of the blocks of a stage."""
        ends = (*self.firsts[1:], len(self.chain))
        return self.chain[self.firsts[stage] : ends[stage]]


def plan_stages(model: nn.Module, num_stages: int, given: Stages | None, pp: int) -> StagePlan:
    """Cut a model.

    Args:
        model: the whole, on the meta device too.
        num_stages: how many parts there are to be.
        given: the user's own cut; ``None``: by the sizes of parameters.
        pp: how many ranks hold stages, for messages.

    Raises:
        ConfigError: it cannot be cut into so many, or not as the user says.
    """
    chain = _chain(model, given)
    if given is None and len(chain) < num_stages:
        most = len(chain) * pp // num_stages
        raise ConfigError(
            f"mesh: the model has {len(chain)} repeated blocks ({first_few(list(chain), 4)}), and "
            f"pp={pp} needs one for each of {num_stages} stages. Set pp to {most} at most, lower "
            "virtual_stages, or name the parts of each stage by stages=[[…], […]]."
        )
    source, sides = _sides(model, chain)
    if given is not None:
        if len(given) != num_stages:
            raise ConfigError(
                f"mesh: stages names {len(given)} stages, and pp={pp} makes {num_stages}. Name the "
                f"modules of {num_stages} stages."
            )
        return _as_given(model, chain, sides, given)
    firsts = _balanced(*_weights(model, chain, sides), num_stages)
    return StagePlan(source, chain, firsts, _owners(model, chain, firsts, sides, {}))


def describe(model: nn.Module, plan: StagePlan, pp: int, style: str) -> list[tuple[str, str]]:
    """Say of each stage what it has, and how much that is, for a dry run."""
    ranks = rank_of_stage(plan.num_stages, pp, style)
    sizes = [0] * plan.num_stages
    others: list[list[str]] = [[] for _ in sizes]
    for name, parameter in model.named_parameters():
        for stage in plan.owners[name]:
            sizes[stage] += parameter.nbytes
            holder = name.rpartition(".")[0] or name
            if not _within(name, plan.chain) and holder not in others[stage]:
                others[stage].append(holder)
    said = [("cut into stages", plan.source)]
    for stage, size in enumerate(sizes):
        blocks = plan.blocks(stage)
        named = blocks[0] if len(blocks) == 1 else f"{blocks[0]} to {blocks[-1]}"
        beside = f", with {', '.join(others[stage])}" if others[stage] else ""
        said.append(
            (f"stage {stage}, pp {ranks[stage]}", f"{named}{beside}: {size:,} bytes of parameters")
        )
    for name, stages in plan.owners.items():
        if len(stages) > 1 and name in dict(model.named_parameters()):
            said.append(("tied", f"{name} is on stages {', '.join(map(str, stages))}"))
    return said


def rank_of_stage(num_stages: int, pp: int, style: str) -> list[int]:
    """Where along ``pp`` each stage is; the last one always where the loss is, on the last rank.

    Args:
        num_stages: a multiple of ``pp``.
        pp: how many ranks hold stages.
        style: ``"loop"`` goes around the ranks; ``"v"`` there and back, from the last to the last.
    """
    if style == "loop":
        return [stage % pp for stage in range(num_stages)]
    return [pp - 1 - stage if stage < pp else stage - pp for stage in range(num_stages)]


def _chain(model: nn.Module, given: Stages | None) -> tuple[str, ...]:
    names = {id(module): name for name, module in model.named_modules()}
    found = [names[id(block)] for block in repeated_blocks(model)]
    if given is not None:
        wanted = [name for stage in given for name in stage]
        modules = dict(model.named_modules())
        if not set(wanted) & set(found):
            # A chain of modules that are not alike.
            found = [n for n in wanted if n in modules and has_forward(modules[n])]
        return tuple(dict.fromkeys(found))
    holders = {name.rpartition(".")[0] for name in found}
    if not found:
        raise ConfigError(
            f"mesh: pp cuts a model between its repeated blocks, and {type(model).__name__} has "
            "none (an nn.ModuleList or nn.Sequential of modules of one class that hold others). "
            "Name the modules of each stage, in the order in which they run: "
            "stages=[['first', 'second'], ['third', 'head']]."
        )
    if len(holders) > 1:
        raise ConfigError(
            f"mesh: the model has several rows of repeated blocks ({first_few(sorted(holders))}), "
            "and pp cuts one. Name the modules of each stage by stages=[[…], […]]; but where the "
            "blocks of one row are given more of another than the hidden state, as decoder blocks "
            "are given the encoder's output, no cut will do. Then use dp_shard, which divides any "
            "model."
        )
    if twice := sorted({name for name in found if found.count(name) > 1}):
        raise ConfigError(
            f"mesh: '{twice[0]}' stands several times in the model's row of blocks, and the stages "
            "of a pipeline each have blocks of their own. Use dp_shard, which divides any model."
        )
    return tuple(found)


def _sides(model: nn.Module, chain: Sequence[str]) -> tuple[str, dict[str, int]]:
    """Who says it; and of each tensor outside of blocks, -1 if it comes before them, 1 if after."""
    planned = _model_plan(model, chain)
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    begin = min(order[name] for name in chain)
    sides: dict[str, int] = {}
    for name in _tensor_names(model):
        holder = name.rpartition(".")[0]
        # Another name of a module that is shared is in no order.
        sides[name] = -1 if order.get(holder, begin + 1) < begin else 1
        for module, said in planned.items():
            if f"{name}.".startswith(f"{module}."):
                sides[name] = said
    said = "the model's own plan" if planned else "the order of its modules"
    return said, sides


def _model_plan(model: nn.Module, chain: Sequence[str]) -> dict[str, int]:
    """What a model of transformers says itself: before the blocks, or after them."""
    holder = chain[0].rpartition(".")[0]
    found: dict[str, int] = {}
    for prefix, module in model.named_modules():
        # transformers 5.23, modeling_utils.py, PreTrainedModel.post_init.
        plan = getattr(module, "_pp_plan", None)
        if not isinstance(plan, Mapping):
            continue
        names = [f"{prefix}.{name}" if prefix else name for name in plan]
        # A model's head comes before its body's parts in what the two have put together.
        beside = holder.rpartition(".")[0]
        names = [name for name in names if name.rpartition(".")[0] == beside]
        if holder in names:
            at = names.index(holder)
            found.update({name: -1 if number < at else 1 for number, name in enumerate(names)})
            found.pop(holder)
    return found


def _weights(
    model: nn.Module, chain: Sequence[str], sides: Mapping[str, int]
) -> tuple[list[int], int, int]:
    """Bytes of parameters of each block, before them, and after."""
    at = {name: number for number, name in enumerate(chain)}
    blocks, before, after = [0] * len(chain), 0, 0
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = _within(name, chain)
        if block is not None:
            blocks[at[block]] += parameter.nbytes
        elif sides[name] < 0:
            before += parameter.nbytes
        else:
            after += parameter.nbytes
    return blocks, before, after


def _balanced(blocks: list[int], before: int, after: int, num_stages: int) -> tuple[int, ...]:
    """The first block of each stage, such that the largest stage is as small as can be."""
    count = len(blocks)
    sizes = [*blocks]
    sizes[0] += before
    sizes[-1] += after
    sums = [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    # best[end] of one stage more at a time: its largest stage, and where its last one begins.
    best: list[tuple[float, tuple[int, ...]]] = [(sums[end], (0,)) for end in range(count + 1)]
    for stage in range(1, num_stages):
        best = [
            min(
                (
                    (max(best[begin][0], sums[end] - sums[begin]), (*best[begin][1], begin))
                    for begin in range(stage, end)
                ),
                default=(math.inf, ()),
            )
            for end in range(count + 1)
        ]
    return best[count][1]


def _as_given(
    model: nn.Module, chain: tuple[str, ...], sides: Mapping[str, int], given: Stages
) -> StagePlan:
    known = [*dict(model.named_modules()), *_tensor_names(model)]
    named: dict[str, set[int]] = {}
    for stage, names in enumerate(given):
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"mesh: stages names '{name}', which is no module or parameter of the model."
                    f"{did_you_mean(name, known)} Its blocks: {first_few(list(chain), 8)}."
                )
            named.setdefault(name, set()).add(stage)
    order: list[int] = []
    for block in chain:
        stages = named.get(block, set())
        if len(stages) != 1:
            raise ConfigError(
                f"mesh: stages names block '{block}' {len(stages)} times. Name each of these once, "
                f"in their order: {first_few(list(chain), 16)}."
            )
        order.append(min(stages))
    if order != sorted(order) or set(order) != set(range(len(given))):
        raise ConfigError(
            f"mesh: stages has to name the blocks in their order, at least one for each stage: "
            f"{first_few(list(chain), 16)}."
        )
    firsts = tuple(order.index(stage) for stage in range(len(given)))
    return StagePlan("stages=", chain, firsts, _owners(model, chain, firsts, sides, named))


def _owners(
    model: nn.Module,
    chain: Sequence[str],
    firsts: tuple[int, ...],
    sides: Mapping[str, int],
    named: Mapping[str, set[int]],
) -> dict[str, tuple[int, ...]]:
    at = {name: number for number, name in enumerate(chain)}
    own: dict[str, set[int]] = {}
    tensors: dict[str, int] = {}
    for name, tensor in _tensors(model):
        tensors[name] = id(tensor)
        block = _within(name, chain)
        # The longest name that the user gave goes before the others.
        said = max((n for n in named if f"{name}.".startswith(f"{n}.")), key=len, default=None)
        if block is not None:
            own[name] = {max(s for s, first in enumerate(firsts) if first <= at[block])}
        elif said is not None:
            own[name] = set(named[said])
        else:
            own[name] = {0 if sides[name] < 0 else len(firsts) - 1}
    shared: dict[int, set[int]] = {}
    for name, stages in own.items():
        shared.setdefault(tensors[name], set()).update(stages)
    return {name: tuple(sorted(shared[tensors[name]])) for name in own}


def _within(name: str, chain: Sequence[str]) -> str | None:
    """The block that a tensor belongs to."""
    return next((block for block in chain if name.startswith(f"{block}.")), None)


def _tensors(model: nn.Module) -> Iterator[tuple[str, object]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _tensor_names(model: nn.Module) -> list[str]:
    return [name for name, _ in _tensors(model)]
