"""Functions that travel by value, and keep the names of the files that they are from."""

from __future__ import annotations

import io
from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import Any, ClassVar

import cloudpickle
from torch import nn

from unipar.errors import ConfigError
from unipar.utils.gradient_hooks import gradient_hooks
from unipar.utils.shared_memory import sharing_memory


def dumps(value: Any) -> bytes:
    """Pickle ``value`` as ``cloudpickle.dumps`` does.

    cloudpickle 3.1.3 (cloudpickle.py, _code_reduce) calls every file ``<dynamic-code>``, so that
    neither a traceback nor a profile would say where a line of the user's stands.

    Raises:
        ConfigError: it holds a model of which a part would not travel: hooks on gradients, or
            tensors that are in the same memory.
    """
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


_known: Any = cloudpickle.CloudPickler.dispatch_table


def _reduce(code: CodeType) -> tuple[Callable[..., CodeType], tuple[Any, ...]]:
    builder, args = _known[CodeType](code)
    return _build, (code.co_filename, builder, args)


def _build(filename: str, builder: Callable[..., CodeType], args: tuple[Any, ...]) -> CodeType:
    return builder(*args).replace(co_filename=filename)


class _Pickler(cloudpickle.CloudPickler):
    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _reduce}, _known)

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._checked: set[int] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module) and id(obj) not in self._checked:
            _check_module(obj)
            self._checked.update(map(id, obj.modules()))
        return super().reducer_override(obj)


def _check_module(module: nn.Module) -> None:
    """Refuse what pickling a module leaves out without a word (torch 2.13, nn/parameter.py)."""
    remedy = "Give a function that builds the model: each process calls it."
    for name, parameter in module.named_parameters():
        hooks = gradient_hooks(parameter)
        if any(not getattr(hook, "__torch_unserializable__", False) for hook in hooks):
            raise ConfigError(
                f"parameter '{name}' of {type(module).__name__} has a hook on its gradient, which "
                f"would not travel to the processes that are started. {remedy}"
            )
    if (pair := sharing_memory(module)) is not None:
        raise ConfigError(
            f"'{pair[0]}' and '{pair[1]}' of {type(module).__name__} are different tensors in the "
            "same memory, and would be apart in the processes that are started. Where they are to "
            "be one parameter, assign that itself and not its data (b.weight = a.weight). "
            f"Else: {remedy[0].lower()}{remedy[1:]}"
        )
