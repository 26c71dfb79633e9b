"""Attributes that a block sets in its forward pass on one stage, and that another stage reads.

A stage has the modules of other stages' blocks, and does not run them. What these leave behind
(statistics, costs, maps of attention) is not there, or as it was, and a loss that adds up what it
finds would count the blocks of its own stage alone. So in the first batch of training it is noted
which attributes blocks set, and which are read of blocks that run elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from unipar.errors import ConfigError
from unipar.state import changes_of
from unipar.world import World
from unipar_torch.stage_modules import Stage

Attribute = tuple[str, str]
"""The name of a module, and that of its attribute."""
_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "forward"})


class AttributeUse:
    """Notes what blocks set in their forward passes, and what is read of blocks elsewhere."""

    def __init__(self) -> None:
        self._set: set[Attribute] = set()
        self._read: set[Attribute] = set()

    @contextmanager
    def watching(self, stage: Stage) -> Iterator[None]:
        """Around the forward pass of a stage for one micro-batch, and the loss."""
        own = set(stage.plan.blocks(stage.index))
        handles = [handle for block in own for handle in self._note_sets(stage.module, block)]
        try:
            with _noting_reads(_elsewhere(stage.module, stage.plan.chain, own), self._read):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def check(self, world: World) -> None:
        """Compare what all stages have set and read. Collective.

        Args:
            world: the joined processes.

        Raises:
            ConfigError: on every rank, if an attribute is read where it is not set.
        """
        found = world.gather((self._set, self._read))
        both = set[Attribute]().union(*(s for s, _ in found)) & set[Attribute]().union(
            *(r for _, r in found)
        )
        if both:
            name, attribute = min(both)
            raise ConfigError(
                f"mesh: '{name}' sets its attribute '{attribute}' in its forward pass, and another "
                "stage reads it, on which that block does not run: there it is missing, or as it "
                "was. So with pp a loss sees what the blocks of its own stage leave behind, and no "
                "others. Leave it out, have the last block compute it, or use dp_shard, which "
                "divides any model."
            )

    def _note_sets(self, model: nn.Module, block: str) -> Iterator[Any]:
        """Hooks of a block, which note what its forward pass sets in it."""
        module, before = model.get_submodule(block), dict[Attribute, Any]()

        def enter(*_: Any) -> None:
            before.clear()
            before.update(_attributes(block, module))

        def leave(*_: Any) -> None:
            for attribute, values in _attributes(block, module).items():
                if not _same(before.get(attribute), values):
                    self._set.add(attribute)
            before.clear()

        yield module.register_forward_pre_hook(enter)
        yield module.register_forward_hook(leave)


def _elsewhere(model: nn.Module, chain: tuple[str, ...], own: set[str]) -> dict[int, str]:
    """The modules that are in other stages' blocks alone, by id."""
    here: set[int] = set()
    there: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        block = next((b for b in chain if f"{name}.".startswith(f"{b}.")), None)
        if block is None or block in own:
            here.add(id(module))
        else:
            there[id(module)] = name
    return {key: name for key, name in there.items() if key not in here}


@contextmanager
def _noting_reads(names: dict[int, str], read: set[Attribute]) -> Iterator[None]:
    """Note each attribute that is looked up in some modules, whether it is there or not."""
    had, original = vars(nn.Module).get("__getattribute__"), nn.Module.__getattribute__

    def looked_up(module: nn.Module, key: str) -> Any:
        name = names.get(id(module))
        if name is not None:
            read.add((name, key))
        return original(module, key)

    nn.Module.__getattribute__ = looked_up
    try:
        yield
    finally:
        if had is None:
            del nn.Module.__getattribute__
        else:
            nn.Module.__getattribute__ = had


def _attributes(block: str, module: nn.Module) -> dict[Attribute, list[tuple[Any, int]]]:
    """What a block's modules have as attributes: tensors, with their counts of changes, and all."""
    return {
        (name, key): [(leaf, changes_of(leaf)) for leaf in tree_leaves(value)]
        for name, part in module.named_modules(prefix=block)
        for key, value in vars(part).items()
        if key not in _OF_EVERY_MODULE
    }


def _same(before: list[tuple[Any, int]] | None, after: list[tuple[Any, int]]) -> bool:
    return (
        before is not None
        and len(before) == len(after)
        and all(a is b and m == n for (a, m), (b, n) in zip(before, after, strict=True))
    )
