"""What is done to a module before it is wrapped: recomputed activations, compilation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from unipar.errors import ConfigError, did_you_mean

Undo = Callable[[], None]


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The model's repeated blocks: members of the outermost lists of modules of one class."""
    blocks: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        members = list(module.children())
        if (
            isinstance(module, (nn.ModuleList, nn.Sequential))
            and len(members) > 1
            and len({type(m) for m in members}) == 1
            and any(True for _ in members[0].children())
        ):
            blocks.extend(members)
            return
        for member in members:
            visit(member)

    visit(model)
    return blocks


def modules_of_classes(model: nn.Module, names: Iterable[str], option: str) -> list[nn.Module]:
    """The submodules whose class has one of these names.

    Raises:
        ConfigError: the model has no module of a named class.
    """
    present = Counter(type(m).__name__ for m in model.modules())
    for name in names:
        if name not in present:
            raise ConfigError(
                f"{option}: the model has no module of class '{name}'."
                f"{did_you_mean(name, present)} It has: {', '.join(sorted(present))}."
            )
    wanted = set(names)
    return [m for m in model.modules() if type(m).__name__ in wanted]


def checkpoint_activations(model: nn.Module, policy: str | tuple[str, ...]) -> Undo:
    """Recompute the activations of each repeated block, or of named classes, in the backward pass.

    ``forward`` is replaced on the instances, so that no parameter changes its name.

    Raises:
        ConfigError: no module fits the policy.
    """
    if policy == "off":
        return lambda: None
    if policy == "full":
        targets = repeated_blocks(model)
        if not targets:
            raise ConfigError(
                "activation_checkpointing='full' recomputes repeated blocks, and this model has no "
                "nn.ModuleList or nn.Sequential of modules of one class. Name the module classes: "
                "activation_checkpointing=('MyBlock',)."
            )
    else:
        targets = modules_of_classes(model, policy, "activation_checkpointing")
    for module in targets:
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)

    def undo() -> None:
        for module in targets:
            module.__dict__.pop("forward", None)

    return undo


def compile_modules(modules: Iterable[nn.Module], setting: bool | dict[str, Any]) -> Undo:
    """Compile each module in place, so that no parameter changes its name."""
    if setting is False:
        return lambda: None
    modules = list(modules)
    for module in modules:
        module.compile(**({} if setting is True else setting))

    def undo() -> None:
        for module in modules:
            module._compiled_call_impl = None  # pyright: ignore[reportAttributeAccessIssue]

    return undo
