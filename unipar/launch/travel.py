"""Functions that travel by value, and keep the names of the files that they are from."""

from __future__ import annotations

import io
from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import Any, ClassVar

import cloudpickle


def dumps(value: Any) -> bytes:
    """Pickle ``value`` as ``cloudpickle.dumps`` does.

    cloudpickle 3.1.3 (cloudpickle.py, _code_reduce) calls every file ``<dynamic-code>``, so that
    neither a traceback nor a profile would say where a line of the user's stands.
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
