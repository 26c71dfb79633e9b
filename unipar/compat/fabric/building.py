"""What scripts build and compute beside models: devices, dtypes, precision."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from unipar.compat.fabric.settings import Asked
from unipar.compat.fabric.wrappers import FabricModule, default_dtype
from unipar.compat.run import current, own_randomness
from unipar.data import move_to
from unipar.engine import COMPUTE_DTYPES
from unipar.session import Session


class Building:
    """The methods of ``Fabric`` that make tensors, or say how they are computed with."""

    _asked: Asked

    @property
    def device(self) -> torch.device:
        raise NotImplementedError

    @property
    def _session(self) -> Session:
        raise NotImplementedError

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Autocast to the run's precision, if that is half."""
        _ = self._session
        assert current.config is not None
        if self._asked.true is not None:
            return default_dtype(self._asked.true)
        half = current.config.precision != "fp32"
        dtype = COMPUTE_DTYPES[current.config.precision] if half else None
        return torch.autocast(self.device.type, dtype, enabled=half)

    def to_device(self, obj: Any) -> Any:
        """A module, a tensor, or a collection of tensors on this process's device."""
        if isinstance(obj, FabricModule):
            return obj
        return obj.to(self.device) if isinstance(obj, nn.Module) else move_to(obj, self.device)

    @contextlib.contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """Build a module on this process's device; on the host where ranks divide parameters.

        Args:
            empty_init: whether no random numbers are drawn for its weights.
        """
        divides = "parameters" in self._session.capabilities.sharded
        with contextlib.ExitStack() as stack:
            if empty_init:
                stack.enter_context(own_randomness(self.device))
            if not divides:
                stack.enter_context(self.device)
            stack.enter_context(default_dtype(self._asked.true))
            yield

    @contextlib.contextmanager
    def init_tensor(self) -> Iterator[None]:
        """Build tensors on this process's device."""
        with self.device, default_dtype(self._asked.true):
            yield

    def sharded_model(self) -> contextlib.AbstractContextManager[None]:
        """Nothing: a strategy divides a model when it is set up."""
        return contextlib.nullcontext()
