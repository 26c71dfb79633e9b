"""Functions that start a script's processes: here they run it in this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from unipar.compat.accelerate_names import refuse
from unipar.compat.tables import Table


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    **kwargs: Any,
) -> None:
    """Call the function in this process.

    Raises:
        ConfigError: several processes are asked for.
    """
    if num_processes is not None and num_processes > 1:
        refuse("notebook_launcher(num_processes>1)")
    function(*args)


def debug_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2
) -> None:
    """As :func:`notebook_launcher`."""
    notebook_launcher(function, args, num_processes)


__getattr__ = Table("accelerate.launchers").refusing(__name__)
