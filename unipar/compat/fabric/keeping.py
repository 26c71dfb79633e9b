"""What is kept of a run of ``Fabric``: files, numbers, and callbacks that are told of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unipar.compat.fabric import checkpoints
from unipar.compat.fabric.loggers import in_numbers
from unipar.compat.fabric.ranks import rank_zero_warn
from unipar.compat.fabric_names import refuse
from unipar.session import Session
from unipar.utils.urls import is_url


class Keeping:
    """The methods of ``Fabric`` for files, callbacks and loggers."""

    _callbacks: list[Any]
    _loggers: list[Any]

    @property
    def _session(self) -> Session:
        raise NotImplementedError

    def save(
        self,
        path: Any,
        state: Any,
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a state, models and optimizers in it whole. Collective.

        Args:
            path: a file, or a directory where ranks divide the state.
            state: a dictionary, also of objects that have a ``state_dict``.
            filter: by key of ``state``, which entries of a state dict to keep.
        """
        if is_url(path):
            refuse("Fabric.save('s3://…')", f"fabric.save({path!r})")
        checkpoints.save(Path(path), state, filter or {}, self._session)

    def load(
        self,
        path: Any,
        state: Any = None,
        strict: bool = True,
        *,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Take over what :meth:`save` or Fabric under DDP has written. Collective.

        Args:
            path: the file or directory.
            state: what takes it over: a dictionary, a model or an optimizer.
            strict: whether all that is asked for must be there.
            weights_only: as for ``torch.load``.

        Returns:
            What is left over.
        """
        if is_url(path):
            refuse("Fabric.load('s3://…')", f"fabric.load({path!r})")
        return checkpoints.load(
            Path(path), state, self._session, strict=strict, weights_only=weights_only
        )

    def load_raw(
        self, path: Any, obj: Any, strict: bool = True, *, weights_only: bool | None = None
    ) -> None:
        """Take over a file that holds the state dict of one model or optimizer. Collective."""
        self.load(path, obj, strict, weights_only=weights_only)

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call the method of every callback that has it, with the arguments that it takes."""
        for one in self._callbacks:
            method = getattr(one, hook_name, None)
            if method is None:
                continue
            if not callable(method):
                rank_zero_warn(f"{type(one).__name__}.{hook_name} is no method, and is not called.")
                continue
            taken = inspect.signature(method).parameters
            every = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values())
            method(*args, **{k: v for k, v in kwargs.items() if every or k in taken})

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Tell all loggers of a value."""
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Tell all loggers of several values."""
        told = in_numbers(metrics)
        for one in self._loggers:
            one.log_metrics(metrics=told, step=step)

    @property
    def loggers(self) -> list[Any]:
        """The loggers."""
        return self._loggers

    @property
    def logger(self) -> Any:
        """The first logger."""
        return self._loggers[0]
