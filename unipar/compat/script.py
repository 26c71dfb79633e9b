"""What a script says of its training: with its data, by its wrappers, and what it asks of a run."""

from __future__ import annotations

import contextlib
import logging
import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from unipar.compat.common_draws import CommonDraws
from unipar.compat.run import current
from unipar.errors import ConfigError

if TYPE_CHECKING:
    from unipar.compat.delayed import Delay

log = logging.getLogger("unipar")


class Script:
    """What is known of the script that runs.

    Attributes:
        aware: whether the script itself divides its data among ranks, as with DDP or Horovod.
        sums_in_backward: whether the script's framework sums gradients there, so that ranks make
            the same passes.
        by_ddp: whether that is DDP.
        accumulates: whether no step is to follow the next backward pass, as the script says.
        asked: settings of the run that the script's own calls ask for.
        compiled: modules that the script compiles.
        sums: optimizers that step by the sum over ranks, and not by the mean.
        compresses: optimizers whose gradients ranks sum in fp16.
        delays: when gradients are averaged, by optimizers that do it as Horovod's do.
        options: of the strategy, by models whose wrappers ask for them.
        of_thawed: by optimizers, what their framework does with parameters that are thawed later.
        draws: random numbers of ranks that know nothing of each other.
        inside: whether what is called now is called by an engine.
        retains: whether the backward pass under way is to leave its graph.
        syncs: whether DDP calls a model, and sums over ranks the gradients of that pass.
        gathers: whether the script takes state dicts on all ranks, as under FSDP.
        rank0_only: whether only the first of them wants those.
        optim_rank0_only: whether only that wants those of optimizers.
        synchronized: batch norms that the script has converted, to be over all ranks.
        by_policy: whether its precision is of a policy, and not of an autocast around passes.
        halves: half precision that policies of FSDP have for modules, or ``None``.
        gives: dtypes in which models give what they compute, as a policy of FSDP's has it.
    """

    def __init__(self) -> None:
        self.aware = self.inside = self.retains = self.syncs = False
        self.draws: CommonDraws | None = None
        self.sums_in_backward = self.by_ddp = self.accumulates = False
        self.gathers = self.rank0_only = self.optim_rank0_only = False
        self.by_policy = False
        self.synchronized: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.asked: dict[str, Any] = {}
        self.compiled: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        self.sums: weakref.WeakSet[Any] = weakref.WeakSet()
        self.compresses: weakref.WeakSet[Any] = weakref.WeakSet()
        self.delays: weakref.WeakKeyDictionary[Any, Delay] = weakref.WeakKeyDictionary()
        self.options: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = (
            weakref.WeakKeyDictionary()
        )
        self.of_thawed: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self.gives: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        self.halves: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        self._told: set[str] = set()

    def note_aware(self) -> None:
        """Take notice of a script that divides its data among ranks itself."""
        self.aware = True
        if self.draws is not None:
            self.draws.give_back()
            self.draws = None

    def ask(self, **settings: Any) -> None:
        """Ask for settings of the run, unless it is open."""
        if current.session is None:
            self.asked |= settings

    def engine_calls(self) -> contextlib.AbstractContextManager[None]:
        """Leave what is called to torch: an engine calls it."""
        return _While(self, "inside")

    def syncing(self) -> contextlib.AbstractContextManager[None]:
        """Around a call by a wrapper that sums gradients over ranks in the backward pass of it."""
        return _While(self, "syncs")

    def retaining(self) -> contextlib.AbstractContextManager[None]:
        """Around a backward pass that is to leave its graph."""
        return _While(self, "retains")

    def tell(self, message: str, *args: Any) -> None:
        """Warn on rank 0, once of each thing."""
        said = message % args
        if said not in self._told and current.placement().rank == 0:
            log.warning("%s", said)
        self._told.add(said)

    def refuse_parts(self, call: str) -> None:
        """Refuse what only some ranks may call, of what ranks have parts of.

        A script that knows nothing of ranks calls it on all of them.
        """
        if self.aware and not self.gathers:
            raise ConfigError(
                f"strategy '{current.config.strategy if current.config else ''}' divides the run's "
                f"state among ranks, so {call} is only a part here. Call unipar.compat.torch."
                "whole_state_dict(model_or_optimizer) on all ranks, and load_whole_state_dict."
            )


class _While:
    """A block in which an attribute is true; a class, for a step enters it several times."""

    def __init__(self, of: Script, name: str) -> None:
        self._of, self._name = of, name

    def __enter__(self) -> None:
        self._before = getattr(self._of, self._name)
        setattr(self._of, self._name, True)

    def __exit__(self, *error: Any) -> None:
        setattr(self._of, self._name, self._before)
