"""Transforms of a module before it is wrapped: parts of it, compilation, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from unipar.errors import ConfigError, did_you_mean, first_few
from unipar.strategy import Parallelize
from unipar.utils.gradient_hooks import gradient_hooks
from unipar.utils.shared_memory import sharing_memory
from unipar.world import World

Undo = Callable[[], None]


def last_first(undo: list[Undo]) -> Undo:
    """One for all of these, which takes back the last one first; once, however often it is called.

    Args:
        undo: emptied by it.
    """

    def take_back() -> None:
        while undo:
            undo.pop()()

    return take_back


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called; lists and dicts of modules only hold others."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def parallelize(module: nn.Module, divide: Parallelize, world: World) -> None:
    """Let a user divide parts of the model.

    Args:
        module: the whole model.
        divide: the user's function.
        world: the joined processes.

    Raises:
        ConfigError: a parameter has another shape afterwards: checkpoints and optimizers know
            parts of tensors as DTensors only.
    """
    before = {name: tuple(p.shape) for name, p in module.named_parameters()}
    divide(module, world)
    after = {name: tuple(p.shape) for name, p in module.named_parameters()}
    if before != after:
        changed = sorted({name for name, _ in before.items() ^ after.items()})
        raise ConfigError(
            f"parallelize(module, world) has changed the names or shapes of parameters: "
            f"{first_few(changed)}. Divide them as DTensors, which keep both: by "
            "torch.distributed.fsdp.fully_shard(part, mesh=world.mesh(…)), or "
            "torch.distributed.tensor.distribute_tensor."
        )


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The model's repeated blocks: members of the outermost lists of modules of one class.

    A member that cannot be called, such as an ``nn.ModuleDict``, gives way to what it holds.
    """
    blocks: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        members = list(module.children())
        if (
            isinstance(module, (nn.ModuleList, nn.Sequential))
            and len(members) > 1
            and len({type(m) for m in members}) == 1
            and any(True for _ in members[0].children())
        ):
            blocks.extend(part for member in members for part in _callable_parts(member))
            return
        for member in members:
            visit(member)

    visit(model)
    return blocks


def _callable_parts(module: nn.Module) -> list[nn.Module]:
    """The module; or, where it cannot be called, the outermost in it that can and have weights."""
    if has_forward(module):
        return [module]
    parts = [part for child in module.children() for part in _callable_parts(child)]
    return [part for part in parts if any(True for _ in part.parameters())]


def modules_of_classes(model: nn.Module, names: Iterable[str], option: str) -> list[nn.Module]:
    """The submodules whose class has one of these names.

    Raises:
        ConfigError: the model has no module of a named class, or it is one that cannot be called.
    """
    classes = {type(m).__name__: m for m in model.modules()}
    usable = sorted(name for name, module in classes.items() if has_forward(module))
    for name in names:
        if name not in classes:
            raise ConfigError(
                f"{option}: the model has no module of class '{name}'."
                f"{did_you_mean(name, usable)} It has: {', '.join(usable)}."
            )
        if name not in usable:
            raise ConfigError(
                f"{option}: a '{name}' has no forward of its own, so nothing can be done around "
                f"it. Name classes of what it holds. The model has: {', '.join(usable)}."
            )
    wanted = set(names)
    return [m for m in model.modules() if type(m).__name__ in wanted]


def refuse_copies(model: nn.Module, strategy: str) -> Undo:
    """Make copying, pickling and converting a divided model say what to do instead.

    A copy would hold one rank's part at best, and be an error of the framework's at worst.
    """
    # Looked up on the instance, so these go before what a framework has given the class.
    refused = {
        "__deepcopy__": partial(_refuse_copy, "copied (deepcopy)", strategy),
        "__reduce_ex__": partial(_refuse_copy, "pickled (torch.save of a module)", strategy),
    }
    modules = list(model.modules())
    for module in modules:
        module.__dict__.update(refused, _apply=partial(_refuse_conversion, module, strategy))

    def undo() -> None:
        for module in modules:
            for name in (*refused, "_apply"):
                module.__dict__.pop(name, None)

    return undo


def _refuse_copy(what: str, strategy: str, argument: Any) -> NoReturn:
    raise ConfigError(
        f"a module cannot be {what} under strategy '{strategy}': each rank holds only its part of "
        "the weights. For all of them save a checkpoint (fit: checkpoint={'every_steps': …}; a "
        "session: session.save(…) on every rank), and read it into a model of your own by "
        "unipar.load_model(path, model). A callback has the path in on_checkpoint. A script that "
        "runs behind a face of unipar.compat has whole weights in its state dicts: torch.save("
        "model.state_dict(), …)."
    )


def _refuse_conversion(module: Any, strategy: str, fn: Any, recurse: bool = True) -> Any:
    """Stand in for ``nn.Module._apply``, by which ``to()``, ``cpu()`` and ``half()`` convert."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        with torch.no_grad():
            made = fn(tensor)
        if made is not tensor:
            raise ConfigError(
                f"the model is prepared, and '{name}' would be converted by this call of to(), "
                f"cpu(), half() or the like: from {tensor.dtype} on {tensor.device} to "
                f"{made.dtype} on {made.device}. Under strategy '{strategy}' each rank holds its "
                "part of it, for the framework to train. Convert the model before it is prepared "
                "(in a script behind a face: before it is first called); to move whole weights, "
                "convert those of its state dict."
            )
    return module


def refuse_shared_memory(module: nn.Module, strategy: str) -> None:
    """Refuse different tensors in the same memory, which would be apart when they are divided.

    Raises:
        ConfigError: there are some.
    """
    if (pair := sharing_memory(module)) is not None:
        raise ConfigError(
            f"{strategy}: '{pair[0]}' and '{pair[1]}' of the model are different tensors in the "
            "same memory, and would be apart when the strategy divides them. Where they are to be "
            "one parameter, assign that itself and not its data (b.weight = a.weight). Else use "
            "strategy='ddp'."
        )


def refuse_parameter_hooks(module: nn.Module, strategy: str) -> None:
    """Refuse hooks on parameters that would be left behind when these are divided.

    Raises:
        ConfigError: a parameter has one.
    """
    for name, parameter in module.named_parameters():
        if gradient_hooks(parameter):
            raise ConfigError(
                f"{strategy}: parameter '{name}' has a hook on its gradient, which would not be "
                "called: the strategy puts parts of parameters in their place. Take the hook away, "
                "or use strategy='ddp'."
            )


def has_hooks(module: nn.Module) -> bool:
    """Return whether a user has hung something on a module's own passes."""
    # torch 2.13, nn/modules/module.py.
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)
