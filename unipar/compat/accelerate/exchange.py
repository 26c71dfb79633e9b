"""Data and tensors of all ranks, in the words of an ``Accelerator``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from unipar.compat.accelerate import operations
from unipar.compat.accelerate.data_loader import skip_first_batches
from unipar.compat.accelerate.settings import Settings
from unipar.errors import ConfigError


class Exchange(Settings):
    """What ranks tell each other between steps; most of it is collective."""

    _triggered: bool = False

    def set_trigger(self) -> None:
        """Have every rank's next :meth:`check_trigger` say so."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Return whether a rank has set the trigger, which is then reset. Collective."""
        found = any(self._session.world.gather(self._triggered))
        self._triggered = self._triggered and not found
        return found

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """The loader without its first batches."""
        return skip_first_batches(dataloader, num_batches)

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: Any, even_batches: bool | None = None
    ) -> Iterator[None]:
        """A block in which ranks may have different numbers of batches, if none has.

        Raises:
            ConfigError: a rank would run out of batches before others.
        """
        before = [(one, one.even) for one in self._dataloaders]
        for one, _ in before:
            one.even = one.even if even_batches is None else even_batches
        try:
            if uneven := [one for one, _ in before if one.uneven]:
                raise ConfigError(
                    f"join_uneven_inputs: ranks have {len(uneven[0])} batches and others one more "
                    "or less, so some would go on alone. Leave even_batches=True, which fills up "
                    "the last round; gather_for_metrics drops what was added."
                )
            yield
        finally:
            for one, even in before:
                one.even = even

    def gather(self, tensor: Any) -> Any:
        """Every rank's tensors, one behind the other. Collective."""
        return operations.gather(tensor, self._session.world)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """:meth:`gather` without the samples that fill up the last round. Collective."""
        world = self._session.world
        tensors = not use_gather_object and operations.holds_tensors_only(input_data)
        found = self.gather(input_data) if tensors else operations.gather_objects(input_data, world)
        kept = self.gradient_state.remainder
        if not self.gradient_state.end_of_dataloader or kept <= 0:
            return found
        if not tensors:
            return found[:kept]
        return operations.each_tensor(lambda one: one[:kept] if one.ndim else one, found)

    def reduce(
        self, tensor: Any, reduction: operations.Reduction = "sum", scale: float = 1.0
    ) -> Any:
        """Sum, mean or maximum of each tensor over ranks. Collective."""
        return operations.reduce(tensor, self._session.world, reduction)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        """Tensors as long as the longest of any rank. Collective."""
        return operations.pad(tensor, self._session.world, dim, pad_index, first=pad_first)
