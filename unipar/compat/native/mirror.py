"""Modules with PyTorch's names, of which some are the face's."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

from unipar.compat import adopting
from unipar.compat.torch_names import FACE, REPLACED, holds_face

_REAL = "torch"


def real_name(face: str) -> str:
    """The module of PyTorch that a module of the face stands for."""
    return _REAL + face.removeprefix(FACE)


def fill(module: ModuleType, real: str) -> None:
    """Give a module of the face the names of PyTorch's.

    Args:
        module: of the face.
        real: the name of PyTorch's.
    """
    found = vars(importlib.import_module(real))
    below = {name for name in found if holds_face(f"{real}.{name}")}
    own = {k: v for k, v in found.items() if k not in below and not k.startswith("__")}
    vars(module).update({k: v for k, v in own.items() if k not in vars(module)})
    where, names = REPLACED.get(real, ("", ""))
    for name in names.split():
        vars(module)[name] = getattr(importlib.import_module(where), name)


def find(real: str, name: str) -> Any:
    """A name that is not there yet: a module below, or what PyTorch itself makes on demand.

    Raises:
        AttributeError: PyTorch has no such name.
    """
    if holds_face(f"{real}.{name}"):
        return importlib.import_module(f"{FACE}{real.removeprefix(_REAL)}.{name}")
    found = importlib.import_module(real)
    if not hasattr(found, name):
        with contextlib.suppress(ModuleNotFoundError):
            # What `import torch.utils.tensorboard` would have imported.
            return importlib.import_module(f"{real}.{name}")
    return getattr(found, name)


class _Mirror(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return find(real_name(self.__name__), name)


class _Mirrors(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules below the face."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if not fullname.startswith(f"{FACE}."):
            return None
        if importlib.util.find_spec(real_name(fullname)) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _Mirror(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        fill(module, real_name(module.__name__))


sys.meta_path.append(_Mirrors())
adopting.start()
