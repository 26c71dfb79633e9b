"""Modules with PyTorch's names, of which some are the face's."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from functools import partial
from types import ModuleType
from typing import Any

from unipar.compat import adopting
from unipar.compat.torch_names import FACE, REPLACED, holds_face

_REAL = "torch"


def real_name(face: str) -> str:
    """The module of PyTorch that a module of the face stands for."""
    return _REAL + face.removeprefix(FACE)


def fill(module: ModuleType, real: str) -> None:
    """Give a module of the face the names that it has in the place of PyTorch's.

    The others are looked up in PyTorch whenever they are asked for, since it replaces some later:
    importing ``torch._dynamo`` replaces ``torch.manual_seed`` (torch 2.13, _dynamo/__init__.py).

    Args:
        module: of the face.
        real: the name of PyTorch's.
    """
    where, names = REPLACED.get(real, ("", ""))
    for name in names.split():
        vars(module)[name] = getattr(importlib.import_module(where), name)
    found = importlib.import_module(real)
    vars(module)["__getattr__"] = partial(_find, found, real)
    vars(module)["__dir__"] = lambda: sorted({*vars(module), *dir(found)})


def _find(found: ModuleType, real: str, name: str) -> Any:
    """A name that the face has not itself: a module below, or what PyTorch has by now."""
    if not hasattr(found, name):
        if name == "__all__":
            # Else `from … import *` would give what is in the face's module alone.
            return [public for public in vars(found) if not public.startswith("_")]
        with contextlib.suppress(ModuleNotFoundError):
            # As `import torch.utils.tensorboard` would have done.
            importlib.import_module(f"{real}.{name}")
    value = getattr(found, name)
    if isinstance(value, ModuleType) and holds_face(f"{real}.{name}"):
        return importlib.import_module(f"{FACE}{real.removeprefix(_REAL)}.{name}")
    return value


class _Mirrors(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules below the face."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if not fullname.startswith(f"{FACE}."):
            return None
        if importlib.util.find_spec(real_name(fullname)) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> None:
        """Have Python make it."""

    def exec_module(self, module: ModuleType) -> None:
        fill(module, real_name(module.__name__))


sys.meta_path.append(_Mirrors())
adopting.start()
