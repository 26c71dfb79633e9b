"""Methods of a script's own classes, where an engine does what torch's own would do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_DOES = "_unipar_does"


def run_own(
    one: Any, kind: type, base: type, name: str, does: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a method as the class of an object has it, with an engine in the place of torch's.

    A class of the script's own may do more than torch's, which it calls by ``super()``.

    Args:
        one: the object.
        kind: its class, as the script has it.
        base: torch's class.
        name: of the method.
        does: what stands for torch's.
        args: of the method.
        kwargs: likewise.
    """
    method = getattr(kind, name)
    if method is getattr(base, name):
        return does(*args, **kwargs)
    # Neither the object's class changes nor torch's, which the engine may call itself meanwhile.
    view = object.__new__(_standing_in(type(one), base, name))
    object.__setattr__(view, "__dict__", one.__dict__)
    object.__setattr__(view, _DOES, does)
    return method(view, *args, **kwargs)


@functools.cache
def _standing_in(kind: type, base: type, name: str) -> type:
    """A class that has a method behind its own ones, and in front of torch's."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, _DOES)(*args, **kwargs)

    behind = type(base.__name__, (base,), {name: method})
    # Attributes are the object's; what stands in is not among them, and lets go of none of them.
    own = {"__slots__": (_DOES,), "__del__": lambda self: None}
    return type(kind.__name__, (kind, behind), own)
